//! Publishes what this node can still promise, as CSIStorageCapacity objects: the scheduler places no pod with a
//! new claim where its volume does not fit.

use std::collections::BTreeMap;
use std::future::{pending, ready};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher::{self, Event};
use nodekeel_fsquota::Bytes;
use tokio::sync::{Mutex as AsyncMutex, Notify, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::api::retry_tracker::{later, random_fraction};
use crate::api::watch_backoff::with_backoff;
use crate::apply::{ApplyError, status_code};
use crate::capacity::objects::{capacity_labels, plan_capacities, wanted_capacities};
use crate::capacity::policy::StoreCapacity;
use crate::claim::size::requested_capacity;
use crate::controller::ReconcileContext;
use crate::error_chain::format_chain;
use crate::loss::status::StoreStatus;
use crate::plan::SELECTED_NODE;

/// The shortest time between two publications: what changes meanwhile is published together. A claim that does
/// not fit does not wait for it.
const PUBLISH_INTERVAL: Duration = Duration::from_secs(5);

/// How long a size that did not fit is not offered, although it was not promised to others: the disk is full
/// of other data, or has no inodes left. Nothing reports when that ends.
const SHORTAGE_PERIOD: Duration = Duration::from_secs(60);

/// How long a claim that does not fit waits for the first list of the objects, without which nothing is published.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// How often changes are planned in a row; each time another client has changed an object meanwhile.
const MAX_PASSES: usize = 4;

/// The objects of this node, and what they depend on.
#[derive(Debug, Default)]
pub(crate) struct CapacityPublisher {
    /// Notified when the objects may have to change.
    changed: Notify,
    /// The objects that exist, by their names.
    found: Mutex<FoundObjects>,
    /// Whether the first list of them is complete.
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

/// What this node offers.
#[derive(Debug, Default)]
struct CapacityOffer {
    shortage: Option<Shortage>,
    /// What was offered last, or less, if that was too little for a claim since: once there is more, claims that wait may
    /// fit.
    last: Option<Bytes>,
}

/// A size that did not fit, although the store had not promised as much.
#[derive(Debug, Clone, Copy)]
struct Shortage {
    size: Bytes,
    /// What was promised then.
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

/// Whether an object is a later version of another one; of an unknown order, the last one reported counts.
fn is_newer(object: &CSIStorageCapacity, old: &CSIStorageCapacity) -> bool {
    let version =
        |object: &CSIStorageCapacity| object.metadata.resource_version.as_deref()?.parse::<u64>().ok();
    version(object).zip(version(old)).is_none_or(|(new, old)| new > old)
}

impl CapacityPublisher {
    /// The objects may have to change: a class or the node has.
    pub(crate) fn notify_change(&self) {
        self.changed.notify_one();
    }

    /// Waits until it is known which objects exist.
    async fn wait_until_listed(&self) {
        // Never fails: `self` holds the sender.
        let _ = self.is_listed.subscribe().wait_for(|is_listed| *is_listed).await;
    }

    fn found(&self) -> MutexGuard<'_, FoundObjects> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the objects up to date: none while the store is not served, or the scheduler would select this node for claims that
/// then wait for its disk. Never returns.
pub(crate) async fn run_publisher(context: &ReconcileContext) {
    let mut status = context.provisioner.store_status.subscribe();
    // Never fails: the sender lives as long as the context.
    let _ = status.wait_for(|status| *status != StoreStatus::Unknown).await;
    if let Ok(None) = context.provisioner.applier.store.capacity().await {
        // The store is unlimited, or does not know.
        return pending().await;
    }
    let publish = async {
        loop {
            tokio::select! {
                () = publish_changes(context) => {}
                Ok(()) = status.changed() => {}
            }
        }
    };
    tokio::join!(watch_objects(context), publish);
}

/// Reports the changes of this node's objects to the publisher.
async fn watch_objects(context: &ReconcileContext) {
    let labels = capacity_labels(&context.provisioner.applier.identity);
    let selector: Vec<_> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let config = watcher::Config::default().labels(&selector.join(","));
    let is_ours = |object: &CSIStorageCapacity| {
        let found = object.metadata.labels.as_ref();
        labels.iter().all(|(key, value)| found.and_then(|found| found.get(key)) == Some(value))
    };
    let api = context.provisioner.applier.capacities_api();
    let events = with_backoff(watcher::watcher(api, config), context.optional_watches.clone());
    let observe = |event: Result<Event<CSIStorageCapacity>, watcher::Error>| {
        let event = event.ok().filter(|event| match event {
            Event::Apply(object) | Event::InitApply(object) | Event::Delete(object) => is_ours(object),
            Event::Init | Event::InitDone => true,
        });
        let is_list = matches!(event, Some(Event::InitDone));
        if event.is_some_and(|event| context.capacity.found().observe_event(event)) {
            context.capacity.notify_change();
        }
        if is_list {
            context.capacity.is_listed.send_replace(true);
        }
        ready(())
    };
    events.for_each(observe).await;
}

async fn publish_changes(context: &ReconcileContext) {
    let (store, backoff) = (&context.provisioner.applier.store, context.provisioner.config.backoff);
    let mut failures = 0;
    loop {
        let (seen, again) = match context.publish_capacity(None).await {
            Ok((seen, again)) => {
                failures = 0;
                (seen, again)
            }
            Err(error) => {
                failures += 1;
                let delay = backoff.jittered_delay(failures, random_fraction());
                context.record_api_error(&error);
                tracing::warn!("publish the free capacity: {}; retrying in {delay:?}", format_chain(&error));
                (None, Some(later(delay)))
            }
        };
        sleep(PUBLISH_INTERVAL).await;
        let store_changed = async {
            match &seen {
                Some(seen) => store.wait_for_capacity_change(seen).await,
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
            () = context.capacity.changed.notified() => {}
            () = store_changed => {}
            () = is_due => {}
        }
    }
}

impl ReconcileContext {
    /// Brings the objects up to date, after a volume of the size `failed` did not fit. Returns the capacity, and
    /// when to publish again though nothing changes. Without a store nothing is offered. Without the Node or a
    /// list of the objects, nothing is published: no pod can be placed here yet, or it is unknown what is there.
    async fn publish_capacity(
        &self,
        failed: Option<Bytes>,
    ) -> Result<(Option<StoreCapacity>, Option<Instant>), ApplyError> {
        let applier = &self.provisioner.applier;
        let mut offer = self.capacity.offer.lock().await;
        if matches!(*self.provisioner.store_status.borrow(), StoreStatus::Unserved { .. }) {
            self.write_capacities(&[]).await?;
            return Ok((None, None));
        }
        let Some(capacity) = applier.store.capacity().await.map_err(ApplyError::Store)? else {
            return Ok((None, None));
        };
        let available = offer.available(&capacity, failed, Instant::now());
        if offer.last.replace(available).is_some_and(|last| last < available) {
            self.requeue_unselected_claims();
            self.requeue_resized_claims();
        }
        let again = offer.shortage.map(|shortage| shortage.until);
        if let Some(node_uid) = self.provisioner.node.uid() {
            let classes = self.classes.state();
            let classes = classes.iter().map(std::convert::AsRef::as_ref);
            let wanted = wanted_capacities(&applier.identity, &node_uid, classes, available);
            self.write_capacities(&wanted).await?;
        }
        Ok((Some(capacity), again))
    }

    async fn write_capacities(&self, wanted: &[CSIStorageCapacity]) -> Result<(), ApplyError> {
        let applier = &self.provisioner.applier;
        for _ in 0..MAX_PASSES {
            let known = self.capacity.found().known.as_ref().map(|known| known.values().cloned().collect());
            let Some(known): Option<Vec<_>> = known else { return Ok(()) };
            let actions = plan_capacities(wanted, &known);
            let current = known.len().saturating_sub(actions.len()).min(wanted.len());
            let obsolete = actions.iter().filter(|action| action.is_deletion()).count();
            applier.metrics.set_capacity_objects(wanted.len(), current, obsolete);
            if actions.is_empty() {
                return Ok(());
            }
            let mut rejected = None;
            for action in &actions {
                match applier.apply_capacity(action).await {
                    Ok(object) => {
                        self.capacity.found().record(action.object_name(), object);
                    }
                    // The object of another class may be accepted all the same.
                    Err(error) if is_rejected(&error) => {
                        rejected.get_or_insert(error);
                    }
                    Err(error) => return Err(error),
                }
            }
            if let Some(error) = rejected {
                return Err(error);
            }
        }
        // Another client keeps changing them: the watch reports it.
        Ok(())
    }

    /// Publishes that a volume of this size did not fit, before another node is selected for it: otherwise the
    /// scheduler might select this one again.
    pub(crate) async fn publish_shortage(&self, size: Bytes) -> Result<(), ApplyError> {
        let store = &self.provisioner.applier.store;
        if store.capacity().await.map_err(ApplyError::Store)?.is_some() {
            // Without the right to list them it never ends.
            let _ = timeout(LIST_TIMEOUT, self.capacity.wait_until_listed()).await;
        }
        match self.publish_capacity(Some(size)).await {
            // Without that right the scheduler knows of no capacity: another try is all that is left.
            Err(error) if is_rejected(&error) => {
                tracing::warn!("{}; deselecting this node all the same", format_chain(&error));
                Ok(())
            }
            published => published.map(drop),
        }
    }

    /// Whether a claim that no scheduler places fits on this node; an invalid one does, to be rejected.
    pub(crate) async fn has_space_for(&self, claim: &PersistentVolumeClaim) -> Result<bool, ApplyError> {
        let Some(Ok(size)) = claim.spec.as_ref().map(requested_capacity) else { return Ok(true) };
        let store = &self.provisioner.applier.store;
        let Some(capacity) = store.capacity().await.map_err(ApplyError::Store)? else { return Ok(true) };
        let mut offer = self.capacity.offer.lock().await;
        let available = offer.available(&capacity, None, Instant::now());
        if size > available {
            // Otherwise, if a volume was created since the last publication, and is removed before the next one,
            // that would find as much as before, and would not bring the claim back.
            offer.last = Some(offer.last.map_or(available, |last| last.min(available)));
            self.capacity.notify_change();
            let (namespace, name) = (claim.metadata.namespace.as_deref(), claim.metadata.name.as_deref());
            let why = capacity.check_limit(Bytes(0), size).err();
            let why = why.map_or("its disk is full".to_owned(), |why| why.to_string());
            tracing::info!(
                namespace,
                claim = name,
                "leaving a claim with immediate binding to other nodes: {why}"
            );
        }
        Ok(size <= available)
    }

    /// Reconciles the claims that no node has been selected for: this node may be the one now.
    pub(crate) fn requeue_unselected_claims(&self) {
        for claim in self.claims.state() {
            let annotations = claim.metadata.annotations.as_ref();
            if annotations.and_then(|all| all.get(SELECTED_NODE)).is_none_or(String::is_empty) {
                self.signals.requeue_claim(ObjectRef::from_obj(&*claim));
            }
        }
    }
}

/// Whether the API server rejects a write for good: the account may not do it, or an admission policy denies it (422).
fn is_rejected(error: &ApplyError) -> bool {
    let ApplyError::Api { source, .. } = error else { return false };
    status_code(source).is_some_and(|code| (400..=404).contains(&code) || code == 422)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::policy::CapacityPolicy;

    fn capacity(promised: u64) -> StoreCapacity {
        CapacityPolicy::default().store_capacity((Bytes(100), Bytes(50)), Bytes(0), Bytes(promised))
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
