//! Publishes what this node can still promise, as CSIStorageCapacity objects: the scheduler places no pod with a
//! new claim where its volume does not fit.

use std::collections::BTreeMap;
use std::future::{pending, ready};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, Event};
use nodekeel_fsquota::Bytes;
use nodekeel_supervisor::Backoff;
use serde_json::json;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::ability::{Ability, InabilityCause};
use crate::api::call::{ApiCall, ApiError, status_code};
use crate::api::claim_queue::ClaimQueue;
use crate::api::retry_tracker::{later, random_fraction};
use crate::api::watch_backoff::with_backoff;
use crate::api::watch_errors::WatchErrors;
use crate::api::writer::ApiWriter;
use crate::capacity::objects::{CapacityAction, capacity_labels, plan_capacities, wanted_capacities};
use crate::capacity::policy::StoreCapacity;
use crate::error_chain::format_chain;
use crate::failure::{FailureReporter, ReconcileError};
use crate::loss::status::ServedStore;
use crate::node::NodeObserver;
use crate::scope::StoreScope;
use crate::step::VolumeStep;
use crate::store::{VolumeStore, VolumeStoreError};

/// The shortest time between two publications: all changes within it are published together. A claim that does
/// not fit does not wait for it.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(5);

/// Time for which a size that did not fit is not offered, although it was not promised to others: the disk is full
/// of other data, or has no inodes left. Nothing reports when that ends.
const SHORTAGE_PERIOD: Duration = Duration::from_secs(60);

/// Time for which a claim that does not fit waits for the first list of the objects, without which nothing is published.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for which a store is asked for its capacity: a hung disk must not keep the claims from other nodes.
const MEASURE_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of times that changes are planned in a row, each time because another client has changed an object.
const MAX_PASSES: usize = 4;

pub(crate) struct CapacityPublisher {
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) classes: Store<StorageClass>,
    pub(crate) scope: StoreScope,
    pub(crate) claims: ClaimQueue,
    pub(crate) node: NodeObserver,
    pub(crate) served: ServedStore,
    pub(crate) failures: FailureReporter,
    pub(crate) watch_errors: WatchErrors,
    pub(crate) backoff: Backoff,
    pub(crate) state: PublisherState,
}

/// The objects of this node, and the offered capacity.
#[derive(Debug, Default)]
pub(crate) struct PublisherState {
    /// Notified when the objects may have to change.
    changed: Notify,
    /// The objects that exist, by their names.
    found: Mutex<FoundObjects>,
    /// Set once the first list of them is complete.
    is_listed: watch::Sender<bool>,
    /// Locked during a publication.
    offer: AsyncMutex<CapacityOffer>,
}

/// The objects that exist, as far as the watch and the answers to writes have reported.
#[derive(Debug, Default)]
struct FoundObjects {
    /// `None` before the first list is complete.
    known: Option<BTreeMap<String, CSIStorageCapacity>>,
    /// The objects of a list in progress.
    listed: BTreeMap<String, CSIStorageCapacity>,
}

/// The capacity that this node offers.
#[derive(Debug, Default)]
struct CapacityOffer {
    shortage: Option<Shortage>,
    /// The last offer, or less, if that was too little for a claim since: once there is more, claims that wait may
    /// fit.
    last: Option<Bytes>,
}

/// A size that did not fit, although the store had not promised as much.
#[derive(Debug, Clone, Copy)]
struct Shortage {
    size: Bytes,
    /// The sum of all promises at that time.
    promised: Bytes,
    until: Instant,
}

impl CapacityOffer {
    /// The size of the largest volume that is offered, after a volume of the size `failed` did not fit.
    fn available(&mut self, capacity: &StoreCapacity, failed: Option<Bytes>, now: Instant) -> Bytes {
        let available = capacity.available();
        // A volume that was removed since may have made room.
        self.shortage.take_if(|shortage| shortage.until <= now || capacity.promised < shortage.promised);
        if let Some(size) = failed.filter(|size| *size <= available) {
            let size = self.shortage.map_or(size, |shortage| shortage.size.min(size));
            let (promised, until) = (capacity.promised, now + SHORTAGE_PERIOD);
            self.shortage = Some(Shortage { size, promised, until });
        }
        self.shortage.map_or(available, |shortage| available.min(Bytes(shortage.size.0.saturating_sub(1))))
    }
}

impl FoundObjects {
    /// Records an object; `None` if it is gone. Returns whether that is news.
    fn record(&mut self, name: &str, object: Option<CSIStorageCapacity>) -> bool {
        let Some(known) = &mut self.known else { return false };
        match object {
            Some(object) if known.get(name).is_none_or(|old| is_newer(&object, old)) => {
                known.insert(name.to_owned(), object);
                true
            }
            Some(_) => false,
            None => known.remove(name).is_some(),
        }
    }

    /// Updates the objects after a watch event, and returns whether it is news.
    fn observe_event(&mut self, event: Event<CSIStorageCapacity>) -> bool {
        let name = |object: &CSIStorageCapacity| object.metadata.name.clone().unwrap_or_default();
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(object) => drop(self.listed.insert(name(&object), object)),
            Event::InitDone => {
                self.known = Some(std::mem::take(&mut self.listed));
                return true;
            }
            Event::Apply(object) => return self.record(&name(&object), Some(object)),
            Event::Delete(object) => return self.record(&name(&object), None),
        }
        false
    }
}

/// Returns whether an object is a later version of another one; of an unknown order, the last one reported counts.
fn is_newer(object: &CSIStorageCapacity, old: &CSIStorageCapacity) -> bool {
    let version =
        |object: &CSIStorageCapacity| object.metadata.resource_version.as_deref()?.parse::<u64>().ok();
    version(object).zip(version(old)).is_none_or(|(new, old)| new > old)
}

impl CapacityPublisher {
    /// Notifies that the objects may have to change: a class or the node has.
    pub(crate) fn notify_change(&self) {
        self.state.changed.notify_one();
    }

    fn found(&self) -> MutexGuard<'_, FoundObjects> {
        self.state.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The objects in the namespace of the credentials: for a pod, its own.
    fn objects_api(&self) -> Api<CSIStorageCapacity> {
        Api::default_namespaced(self.api.client().clone())
    }

    /// Keeps the objects up to date: none while the store is not served, and no capacity while it can't be used, or the
    /// scheduler would select this node for claims that then wait for its disk. Never returns.
    pub(crate) async fn run(&self) {
        let mut ability = self.served.subscribe_ability();
        // Never fails: `self` holds the sender.
        let _ = ability.wait_for(|ability| *ability != Ability::Unknown).await;
        if let Ok(None) = self.measure().await {
            // The store is unlimited, or does not know.
            return pending().await;
        }
        let publish = async {
            loop {
                tokio::select! {
                    () = self.publish_changes() => {}
                    // A lost, broken or repaired store is published at once, without the pause and the backoff.
                    Ok(()) = ability.changed() => {}
                }
            }
        };
        tokio::join!(self.watch_objects(), publish);
    }

    /// Observes the changes of this node's objects.
    async fn watch_objects(&self) {
        let labels = capacity_labels(&self.api.identity);
        let selector: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let config = watcher::Config::default().labels(&selector.join(","));
        let is_ours = |object: &CSIStorageCapacity| {
            let found = object.metadata.labels.as_ref();
            labels.iter().all(|(key, value)| found.and_then(|found| found.get(key)) == Some(value))
        };
        let events = with_backoff(watcher::watcher(self.objects_api(), config), self.watch_errors.clone());
        let observe = |event: Result<Event<CSIStorageCapacity>, watcher::Error>| {
            let event = event.ok().filter(|event| match event {
                Event::Apply(object) | Event::InitApply(object) | Event::Delete(object) => is_ours(object),
                Event::Init | Event::InitDone => true,
            });
            let is_list = matches!(event, Some(Event::InitDone));
            if event.is_some_and(|event| self.found().observe_event(event)) {
                self.notify_change();
            }
            if is_list {
                self.state.is_listed.send_replace(true);
            }
            ready(())
        };
        events.for_each(observe).await;
    }

    async fn publish_changes(&self) {
        let mut failures = 0;
        loop {
            let (seen, again) = match self.publish(None).await {
                Ok((seen, again)) => {
                    failures = 0;
                    (seen, again)
                }
                Err(error) => {
                    failures += 1;
                    let delay = self.backoff.jittered_delay(failures, random_fraction());
                    self.failures.count(&error);
                    tracing::warn!(
                        "publish the free capacity: {}; retrying in {delay:?}",
                        format_chain(&error)
                    );
                    (None, Some(later(delay)))
                }
            };
            // A change during this pause is not lost: `Notify` keeps one permit.
            sleep(PUBLISH_INTERVAL).await;
            let store_changed = async {
                match &seen {
                    Some(seen) => self.store.wait_for_capacity_change(seen).await,
                    None => pending().await,
                }
            };
            let is_due = async {
                match again {
                    Some(again) => sleep_until(again).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                () = self.state.changed.notified() => {}
                () = store_changed => {}
                () = is_due => {}
            }
        }
    }

    /// Brings the objects up to date, after a volume of the size `failed` did not fit. Returns the capacity, and
    /// when to publish again though nothing changes. Without a store nothing is offered. Without the Node or a
    /// list of the objects, nothing is published: no pod can be placed here yet, or the objects are unknown.
    async fn publish(
        &self,
        failed: Option<Bytes>,
    ) -> Result<(Option<StoreCapacity>, Option<Instant>), ReconcileError> {
        // Held until the objects are written: a claim that does not fit must not be overtaken by an older offer.
        let mut offer = self.state.offer.lock().await;
        let (capacity, available) = match self.served.ability() {
            // What is published stays until it is known.
            Ability::Unknown => return Ok((None, None)),
            Ability::Unable { cause: InabilityCause::Unserved, .. } => {
                self.served.set_offered(Bytes(0));
                self.write_objects(&[]).await?;
                return Ok((None, None));
            }
            Ability::Able => {
                let Some(capacity) = self.measure().await? else { return Ok((None, None)) };
                (Some(capacity), offer.available(&capacity, failed, Instant::now()))
            }
            Ability::Unable { .. } => match self.measure().await {
                Ok(None) => return Ok((None, None)),
                // One that can't be used may not be able to tell, either.
                Ok(Some(_)) | Err(_) => (None, Bytes(0)),
            },
        };
        self.served.set_offered(available);
        if offer.last.replace(available).is_some_and(|last| last < available) {
            self.claims.requeue_unselected();
            self.claims.requeue_bound();
        }
        let again = offer.shortage.map(|shortage| shortage.until);
        if let Some(node) = self.node.facts() {
            let classes = self.classes.state();
            let classes = classes.iter().map(std::convert::AsRef::as_ref);
            let missing = self.served.missing_formats().clone();
            let wanted = wanted_capacities(&self.api.identity, &node, classes, available, &missing);
            self.write_objects(&wanted).await?;
        }
        Ok((capacity, again))
    }

    /// The capacity of the store, unless its disk hangs.
    async fn measure(&self) -> Result<Option<StoreCapacity>, ReconcileError> {
        let hung = |_| Err(VolumeStoreError::Capacity { source: "the disk does not answer".into() });
        let measured = timeout(MEASURE_TIMEOUT, self.store.capacity()).await.unwrap_or_else(hung);
        measured.map_err(ReconcileError::Store)
    }

    async fn write_objects(&self, wanted: &[CSIStorageCapacity]) -> Result<(), ReconcileError> {
        for _ in 0..MAX_PASSES {
            let is_ours = |object: &&CSIStorageCapacity| {
                let class = self.classes.get(&ObjectRef::new(&object.storage_class_name));
                self.scope.answers_for(class.as_deref())
            };
            let known =
                self.found().known.as_ref().map(|known| known.values().filter(is_ours).cloned().collect());
            // Before the first list, the objects of an earlier run would look missing. Its end notifies.
            let Some(known): Option<Vec<_>> = known else { return Ok(()) };
            let actions = plan_capacities(wanted, &known);
            let current = known.len().saturating_sub(actions.len()).min(wanted.len());
            let obsolete = actions.iter().filter(|action| action.is_deletion()).count();
            self.failures.metrics.set_capacity_objects(wanted.len(), current, obsolete);
            if actions.is_empty() {
                return Ok(());
            }
            let mut rejected = None;
            for action in &actions {
                match self.apply(action).await {
                    Ok(object) => {
                        self.found().record(action.object_name(), object);
                    }
                    // The server may still accept the object of another class.
                    Err(error) if is_rejected(&error) => {
                        rejected.get_or_insert(error);
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            if let Some(error) = rejected {
                return Err(error.into());
            }
        }
        // Another client keeps changing them: the watch reports it.
        Ok(())
    }

    /// Applies an action to exactly the version that it was planned for. Returns the object as it is then, also if
    /// another client has changed it in between: then the action must be planned again.
    async fn apply(&self, action: &CapacityAction) -> Result<Option<CSIStorageCapacity>, ApiError> {
        let api = self.objects_api();
        let (call, written) = match action {
            CapacityAction::Create(wanted) => {
                let params = PostParams::default();
                let create = api.create(&params, wanted);
                (ApiCall::CreateCapacity, self.api.write(VolumeStep::PublishCapacity, create).await.map(Some))
            }
            CapacityAction::Update { found, wanted } => {
                let patch = Patch::Merge(json!({
                    "metadata": {
                        "uid": found.uid,
                        "resourceVersion": found.resource_version,
                        "labels": wanted.metadata.labels,
                        "ownerReferences": wanted.metadata.owner_references,
                    },
                    "capacity": wanted.capacity,
                    "maximumVolumeSize": wanted.maximum_volume_size,
                }));
                let params = PatchParams::default();
                let update = api.patch(action.object_name(), &params, &patch);
                (ApiCall::PatchCapacity, self.api.write(VolumeStep::PublishCapacity, update).await.map(Some))
            }
            CapacityAction::Delete(found) => {
                let preconditions = Some(Preconditions {
                    uid: found.uid.clone(),
                    resource_version: found.resource_version.clone(),
                });
                let params = DeleteParams { preconditions, ..DeleteParams::default() };
                let delete = api.delete(action.object_name(), &params);
                let deleted = self.api.write(VolumeStep::RemoveCapacity, delete).await;
                (ApiCall::DeleteCapacity, deleted.map(|_| None))
            }
        };
        match written {
            Ok(object) => Ok(object),
            // The object is another version, or is gone; or it exists already, because the answer to an earlier call was
            // lost, or the watch has not reported it yet.
            Err(error) if is_other_version(action, &error) => {
                self.api.read(ApiCall::ReadCapacity, &api, action.object_name()).await
            }
            Err(error) => Err(call.wrap_error(error)),
        }
    }

    /// Publishes that a volume of this size did not fit, before another node is selected for it: otherwise the
    /// scheduler might select this one again.
    pub(crate) async fn publish_shortage(&self, size: Bytes) -> Result<(), ReconcileError> {
        if self.measure().await?.is_some() {
            self.wait_until_listed().await;
        }
        self.publish_before_deselection(Some(size)).await
    }

    /// Publishes that no volume can be created on this node, before another node is selected for one.
    pub(crate) async fn publish_inability(&self) -> Result<(), ReconcileError> {
        if !matches!(self.measure().await, Ok(None)) {
            self.wait_until_listed().await;
        }
        self.publish_before_deselection(None).await
    }

    /// Waits for the first list of the objects, for a while: without the right to list them it never ends.
    async fn wait_until_listed(&self) {
        // Never fails: `self` holds the sender.
        let mut is_listed = self.state.is_listed.subscribe();
        let _ = timeout(LIST_TIMEOUT, is_listed.wait_for(|is_listed| *is_listed)).await;
    }

    async fn publish_before_deselection(&self, failed: Option<Bytes>) -> Result<(), ReconcileError> {
        match self.publish(failed).await {
            // Without that right the scheduler knows of no capacity: another try is all that is left.
            Err(ReconcileError::Api(error)) if is_rejected(&error) => {
                tracing::warn!("{}; deselecting this node all the same", format_chain(&error));
                Ok(())
            }
            published => published.map(drop),
        }
    }

    /// The reason why a volume of this size does not fit on this node, for a claim that no scheduler places; `None` if it fits.
    pub(crate) async fn find_shortage(&self, size: Bytes) -> Result<Option<String>, ReconcileError> {
        let Some(capacity) = self.measure().await? else {
            return Ok(None);
        };
        let mut offer = self.state.offer.lock().await;
        let available = offer.available(&capacity, None, Instant::now());
        if size <= available {
            return Ok(None);
        }
        // Otherwise, if a volume was created since the last publication, and is removed before the next one,
        // that would find as much as before, and would not bring the claim back.
        offer.last = Some(offer.last.map_or(available, |last| last.min(available)));
        self.notify_change();
        let why = capacity.check_limit(Bytes(0), size).err();
        Ok(Some(why.map_or("its disk is full".to_owned(), |why| why.to_string())))
    }
}

/// Returns whether a write of an object has failed because the object is not as it was when the write was planned.
fn is_other_version(action: &CapacityAction, error: &kube::Error) -> bool {
    match status_code(error) {
        Some(409) => true,
        // Of a new object, the namespace is missing.
        Some(404) => !matches!(action, CapacityAction::Create(_)),
        _ => false,
    }
}

/// Returns whether the API server rejects a write for good: the account may not do it, or an admission policy denies it (422).
fn is_rejected(error: &ApiError) -> bool {
    status_code(&error.source).is_some_and(|code| (400..=404).contains(&code) || code == 422)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::policy::{CapacityPolicy, DiskSpace};

    fn capacity(promised: u64) -> StoreCapacity {
        CapacityPolicy::default().store_capacity(
            DiskSpace { total: Bytes(100), free: Bytes(50) },
            Bytes(0),
            Bytes(promised),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_size_that_did_not_fit_is_not_offered_until_something_is_removed_or_a_minute_is_over() {
        let mut offer = CapacityOffer::default();
        let now = Instant::now();
        assert_eq!(offer.available(&capacity(40), None, now), Bytes(60));
        assert_eq!(offer.available(&capacity(40), Some(Bytes(61)), now), Bytes(60), "as published");
        assert_eq!(offer.available(&capacity(40), Some(Bytes(30)), now), Bytes(29));
        assert_eq!(offer.available(&capacity(40), Some(Bytes(50)), now), Bytes(29), "the smallest counts");
        assert_eq!(offer.available(&capacity(90), None, now), Bytes(10));
        assert_eq!(offer.available(&capacity(39), None, now), Bytes(61), "a volume was removed");
        assert_eq!(offer.available(&capacity(40), Some(Bytes(1)), now), Bytes(0));
        assert_eq!(offer.available(&capacity(40), None, now + SHORTAGE_PERIOD), Bytes(60));
    }
}
