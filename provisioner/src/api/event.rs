//! Kubernetes events on claims and volumes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};

use crate::api::timeout::with_timeout;
use crate::error_chain::format_chain;
use crate::name::DriverName;
use crate::step::{StepRunner, VolumeStep};

/// Maximum length of an event's note in bytes. *Source:* the API's validation of `events.k8s.io/v1`.
pub(crate) const MAX_NOTE_BYTES: usize = 1024;

/// Maximum length of the reporting instance in bytes. *Source:* as above.
const MAX_INSTANCE_BYTES: usize = 128;

/// Maximum length of the object's name in an event's name, in bytes; the rest is a number that makes it
/// unique.
const MAX_NAME_BYTES: usize = 200;

/// The number of recent events that are remembered, so that a repetition updates their series instead of creating a new
/// event.
const MAX_RECENT_EVENTS: usize = 512;

/// Namespace of the events about objects without a namespace.
const DEFAULT_NAMESPACE: &str = "default";

/// The reason of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum EventReason {
    Provisioning,
    ProvisioningSucceeded,
    ProvisioningFailed,
    SnapshotCreationFailed,
    SnapshotDeleteError,
    VolumeFailedDelete,
    VolumeConditionAbnormal,
    VolumeConditionNormal,
    Resizing,
    VolumeResizeSuccessful,
    VolumeResizeFailed,
    VolumeModify,
    VolumeModifySuccessful,
    VolumeModifyFailed,
    #[cfg(feature = "agent")]
    ReferencedNodeDeleted,
}

impl EventReason {
    /// The reason, the action and the type, as the API has them.
    fn names(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Provisioning => ("Provisioning", "Provision", "Normal"),
            Self::ProvisioningSucceeded => ("ProvisioningSucceeded", "Provision", "Normal"),
            Self::ProvisioningFailed => ("ProvisioningFailed", "Provision", "Warning"),
            Self::SnapshotCreationFailed => ("SnapshotCreationFailed", "CreateSnapshot", "Warning"),
            Self::SnapshotDeleteError => ("SnapshotDeleteError", "DeleteSnapshot", "Warning"),
            Self::VolumeFailedDelete => ("VolumeFailedDelete", "Delete", "Warning"),
            Self::VolumeConditionAbnormal => ("VolumeConditionAbnormal", "CheckCondition", "Warning"),
            Self::VolumeConditionNormal => ("VolumeConditionNormal", "CheckCondition", "Normal"),
            Self::Resizing => ("Resizing", "Resize", "Normal"),
            Self::VolumeResizeSuccessful => ("VolumeResizeSuccessful", "Resize", "Normal"),
            Self::VolumeResizeFailed => ("VolumeResizeFailed", "Resize", "Warning"),
            Self::VolumeModify => ("VolumeModify", "Modify", "Normal"),
            Self::VolumeModifySuccessful => ("VolumeModifySuccessful", "Modify", "Normal"),
            Self::VolumeModifyFailed => ("VolumeModifyFailed", "Modify", "Warning"),
            #[cfg(feature = "agent")]
            Self::ReferencedNodeDeleted => ("ReferencedNodeDeleted", "Inspect", "Warning"),
        }
    }

    fn as_str(self) -> &'static str {
        self.names().0
    }
}

/// Records events. Repetitions of the same note on the same object update one event's series.
pub(crate) struct EventRecorder {
    client: Client,
    controller: String,
    instance: String,
    steps: StepRunner,
    recent_events: Mutex<HashMap<EventKey, RecentEvent>>,
}

type EventKey = (Option<String>, EventReason, String);

#[derive(Clone)]
struct RecentEvent {
    name: String,
    count: i32,
    last: Timestamp,
}

impl EventRecorder {
    /// `instance` is the reporter: a node, or an agent.
    pub(crate) fn new(client: Client, driver: &DriverName, instance: &str, steps: StepRunner) -> Self {
        Self {
            client,
            controller: driver.to_string(),
            instance: truncate_bytes(instance, MAX_INSTANCE_BYTES).to_owned(),
            steps,
            recent_events: Mutex::default(),
        }
    }

    /// Records an event. Events are informational: a failure to write one is logged, and nothing else fails.
    pub(crate) async fn record_event(&self, about: &ObjectReference, reason: EventReason, note: &str) {
        self.try_record_event(about, reason, note).await;
    }

    /// Records an event. A failure is logged; returns whether there was none.
    pub(crate) async fn try_record_event(
        &self,
        about: &ObjectReference,
        reason: EventReason,
        note: &str,
    ) -> bool {
        let note = truncate_bytes(note, MAX_NOTE_BYTES);
        let written =
            self.steps.run_async(VolumeStep::CreateEvent, self.write_event(about, reason, note)).await;
        if let Err(error) = &written {
            let object = about.name.as_deref().unwrap_or_default();
            tracing::warn!(object, reason = reason.as_str(), note, "record event: {}", format_chain(error));
        }
        written.is_ok()
    }

    async fn write_event(
        &self,
        about: &ObjectReference,
        reason: EventReason,
        note: &str,
    ) -> Result<(), kube::Error> {
        let namespace = about.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let (key, now) = ((about.uid.clone(), reason, note.to_owned()), Timestamp::now());
        // Cloned, so that the mutex is not locked during the call. Two tasks at once may then create two events.
        let known = self.recent_events().get(&key).cloned();
        let known = match known {
            Some(known) => match update_series(&events, &known, now).await {
                // The API server deletes events after an hour.
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    self.create_event(&events, about, reason, note).await?
                }
                updated => updated?,
            },
            None => self.create_event(&events, about, reason, note).await?,
        };
        self.remember_event(key, known);
        Ok(())
    }

    async fn create_event(
        &self,
        events: &Api<Event>,
        about: &ObjectReference,
        reason: EventReason,
        note: &str,
    ) -> Result<RecentEvent, kube::Error> {
        let now = Timestamp::now();
        let name = event_name(about, now.as_nanosecond());
        let event = self.build_event(name.clone(), now, about, reason, note);
        with_timeout(events.create(&PostParams::default(), &event)).await?;
        Ok(RecentEvent { name, count: 1, last: now })
    }

    /// Records an event that nothing repeats, whichever instance records it: its name follows from what it is `of`, which is
    /// its note, or what stays of one with figures. The API server deletes events after an hour, and then it may be
    /// recorded again.
    #[cfg(feature = "agent")]
    pub(crate) async fn record_once(
        &self,
        about: &ObjectReference,
        reason: EventReason,
        of: &str,
        note: &str,
    ) -> Result<(), kube::Error> {
        use std::hash::{DefaultHasher, Hash as _, Hasher as _};

        let note = truncate_bytes(note, MAX_NOTE_BYTES);
        // This hasher has fixed keys, so each instance computes the same name.
        let mut hasher = DefaultHasher::new();
        (&about.uid, &self.controller, reason.as_str(), truncate_bytes(of, MAX_NOTE_BYTES)).hash(&mut hasher);
        let name = event_name(about, hasher.finish());
        let event = self.build_event(name, Timestamp::now(), about, reason, note);
        let namespace = about.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let params = PostParams::default();
        let call = with_timeout(events.create(&params, &event));
        match self.steps.run_async(VolumeStep::CreateEvent, call).await {
            // This agent or another has recorded it before.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            created => created.map(drop),
        }
    }

    fn build_event(
        &self,
        name: String,
        now: Timestamp,
        about: &ObjectReference,
        reason: EventReason,
        note: &str,
    ) -> Event {
        let (reason, action, type_) = reason.names();
        Event {
            action: Some(action.to_owned()),
            event_time: Some(MicroTime(now)),
            metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() },
            note: Some(note.to_owned()),
            reason: Some(reason.to_owned()),
            regarding: Some(about.clone()),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(type_.to_owned()),
            ..Event::default()
        }
    }

    fn remember_event(&self, key: EventKey, event: RecentEvent) {
        let mut known = self.recent_events();
        if known.len() >= MAX_RECENT_EVENTS && !known.contains_key(&key) {
            // An evicted event costs little: its repetition creates a new event instead of updating the series.
            let oldest = known.iter().min_by_key(|(_, event)| event.last).map(|(key, _)| key.clone());
            oldest.map(|key| known.remove(&key));
        }
        known.insert(key, event);
    }

    fn recent_events(&self) -> std::sync::MutexGuard<'_, HashMap<EventKey, RecentEvent>> {
        self.recent_events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of an event about an object; the number makes it unique.
fn event_name(about: &ObjectReference, number: impl fmt::LowerHex) -> String {
    let object = truncate_bytes(about.name.as_deref().unwrap_or_default(), MAX_NAME_BYTES);
    format!("{object}.{number:x}")
}

/// Increments the series of an existing event.
async fn update_series(
    events: &Api<Event>,
    known: &RecentEvent,
    now: Timestamp,
) -> Result<RecentEvent, kube::Error> {
    let count = known.count.saturating_add(1);
    let series = EventSeries { count, last_observed_time: MicroTime(now) };
    // Without a version: only the recorder that has created an event counts its repetitions.
    let patch = Patch::Merge(serde_json::json!({ "series": series }));
    with_timeout(events.patch(&known.name, &PatchParams::default(), &patch)).await?;
    Ok(RecentEvent { name: known.name.clone(), count, last: now })
}

/// Truncates a text to at most `max` bytes, at the end of a character.
pub(crate) fn truncate_bytes(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

impl fmt::Debug for EventRecorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventRecorder").field("instance", &self.instance).finish_non_exhaustive()
    }
}
