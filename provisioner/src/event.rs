//! The events that people see on claims and volumes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};

use crate::in_time::in_time;
use crate::plan::Identity;
use crate::step::{Step, Steps};

/// Longest note of an event, in bytes. *Source:* the API's validation of `events.k8s.io/v1`.
const MAX_NOTE_BYTES: usize = 1024;

/// Longest reporting instance, in bytes. *Source:* as above.
const MAX_INSTANCE_BYTES: usize = 128;

/// Longest part of an event's name that is the object's; the rest is a number that makes it unique.
const MAX_NAME_BYTES: usize = 200;

/// How many events are known well enough to be counted up instead of written again.
const MAX_KNOWN: usize = 512;

/// Where the events of objects without a namespace are.
const DEFAULT_NAMESPACE: &str = "default";

/// What is told, and on which object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    ProvisioningSucceeded,
    ProvisioningFailed,
    VolumeFailedDelete,
}

impl Reason {
    fn as_str(self) -> &'static str {
        match self {
            Self::ProvisioningSucceeded => "ProvisioningSucceeded",
            Self::ProvisioningFailed => "ProvisioningFailed",
            Self::VolumeFailedDelete => "VolumeFailedDelete",
        }
    }

    fn action(self) -> &'static str {
        match self {
            Self::ProvisioningSucceeded | Self::ProvisioningFailed => "Provision",
            Self::VolumeFailedDelete => "Delete",
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::ProvisioningSucceeded => "Normal",
            Self::ProvisioningFailed | Self::VolumeFailedDelete => "Warning",
        }
    }
}

/// Writes events. The same note on the same object is written once and then counted up.
pub(crate) struct Recorder {
    client: Client,
    controller: String,
    instance: String,
    steps: Steps,
    known: Mutex<HashMap<Key, Known>>,
}

type Key = (Option<String>, Reason, String);

#[derive(Clone)]
struct Known {
    name: String,
    count: i32,
    last: Timestamp,
}

impl Recorder {
    pub(crate) fn new(client: Client, me: &Identity, steps: Steps) -> Self {
        Self {
            client,
            controller: me.driver.to_string(),
            instance: cut(me.node.as_str(), MAX_INSTANCE_BYTES).to_owned(),
            steps,
            known: Mutex::default(),
        }
    }

    /// Tells it. An event is for people to read: one that can't be written is logged, and nothing else fails for it.
    pub(crate) async fn tell(&self, about: &ObjectReference, reason: Reason, note: &str) {
        let note = cut(note, MAX_NOTE_BYTES);
        if let Err(error) = self.steps.wait(Step::PostEvent, self.write(about, reason, note)).await {
            let object = about.name.as_deref().unwrap_or_default();
            tracing::warn!(object, reason = reason.as_str(), note, "can't write an event: {error}");
        }
    }

    async fn write(&self, about: &ObjectReference, reason: Reason, note: &str) -> Result<(), kube::Error> {
        let namespace = about.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE);
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let (key, now) = ((about.uid.clone(), reason, note.to_owned()), Timestamp::now());
        let known = self.known().get(&key).cloned();
        let known = match known {
            Some(known) => match again(&events, &known, now).await {
                // The API server forgets events after an hour.
                Err(kube::Error::Api(status)) if status.code == 404 => {
                    self.first(&events, about, reason, note).await?
                }
                again => again?,
            },
            None => self.first(&events, about, reason, note).await?,
        };
        self.remember(key, known);
        Ok(())
    }

    async fn first(
        &self,
        events: &Api<Event>,
        about: &ObjectReference,
        reason: Reason,
        note: &str,
    ) -> Result<Known, kube::Error> {
        let now = Timestamp::now();
        let object = cut(about.name.as_deref().unwrap_or_default(), MAX_NAME_BYTES);
        let name = format!("{object}.{:x}", now.as_nanosecond());
        let event = Event {
            action: Some(reason.action().to_owned()),
            event_time: Some(MicroTime(now)),
            metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
            note: Some(note.to_owned()),
            reason: Some(reason.as_str().to_owned()),
            regarding: Some(about.clone()),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(reason.kind().to_owned()),
            ..Event::default()
        };
        in_time(events.create(&PostParams::default(), &event)).await?;
        Ok(Known { name, count: 1, last: now })
    }

    fn remember(&self, key: Key, event: Known) {
        let mut known = self.known();
        if known.len() >= MAX_KNOWN && !known.contains_key(&key) {
            let oldest = known.iter().min_by_key(|(_, event)| event.last).map(|(key, _)| key.clone());
            oldest.map(|key| known.remove(&key));
        }
        known.insert(key, event);
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<Key, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts up an event that was written before.
async fn again(events: &Api<Event>, known: &Known, now: Timestamp) -> Result<Known, kube::Error> {
    let count = known.count.saturating_add(1);
    let series = EventSeries { count, last_observed_time: MicroTime(now) };
    let patch = Patch::Merge(serde_json::json!({ "series": series }));
    in_time(events.patch(&known.name, &PatchParams::default(), &patch)).await?;
    Ok(Known { name: known.name.clone(), count, last: now })
}

/// The beginning of a text, at most so many bytes of it.
fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("instance", &self.instance).finish_non_exhaustive()
    }
}
