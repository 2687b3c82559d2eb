//! The control loop of the agent that leads: watches, plans, waits, acts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

use futures_util::stream::{self, BoxStream, StreamExt as _};
use futures_util::{FutureExt as _, future};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::AgentConfig;
use super::agenda::{ActionOutcome, Agenda};
use super::applier::AgentApplier;
use super::facts::{ClusterObjects, NodeFacts, PendingClaim, PendingPod, VolumeFacts};
use super::lease::sleep_until_due;
use super::plan::{ClusterCondition, find_conditions};
use crate::DriverName;
use crate::api::watch_backoff::with_backoff;
use crate::api::watch_errors::WatchErrors;
use crate::claim::peers::has_driver;

/// The objects of a page of a list: few, because objects of other drivers are dropped after each page.
const PAGE_SIZE: u32 = 100;

const CONCURRENCY: usize = 8;

/// The pods that are looked at in one pass, each by a request: claims and nodes must not wait for many of them.
const MAX_PODS: usize = 16;

/// A watch event of one of the kinds.
#[allow(clippy::large_enum_variant, reason = "one event exists at a time")]
enum ObjectEvent {
    Claim(Event<PersistentVolumeClaim>),
    Class(Event<StorageClass>),
    Node(Event<Node>),
    CsiNode(Event<CSINode>),
    Volume(Event<PersistentVolume>),
    Lease(Event<Lease>),
    Pod(Event<Pod>),
    /// A watch has failed. It is logged, and the watch retries.
    Failure,
}

impl ClusterObjects {
    /// Applies an event, and returns whether anything has changed that planning looks at.
    fn observe(&mut self, driver: &DriverName, event: ObjectEvent) -> bool {
        match event {
            ObjectEvent::Claim(event) => self.claims.observe(event, PendingClaim::extract),
            ObjectEvent::Class(event) => self.classes.observe(event, extract_class),
            ObjectEvent::Node(event) => self.nodes.observe(event, |node| Some(NodeFacts::extract(node))),
            ObjectEvent::CsiNode(event) => {
                self.csi_nodes.observe(event, |node| Some(has_driver(node, driver)))
            }
            ObjectEvent::Volume(event) => {
                self.volumes.observe(event, |volume| VolumeFacts::extract(driver, volume))
            }
            ObjectEvent::Lease(event) => self.leases.observe(driver, event, Instant::now()),
            ObjectEvent::Pod(event) => self.pods.observe(event, PendingPod::extract),
            ObjectEvent::Failure => false,
        }
    }
}

fn extract_class(class: &StorageClass) -> Option<StorageClass> {
    let mut class = class.clone();
    // Planning looks at no metadata, so a change of them alone must not start it.
    class.metadata = kube::api::ObjectMeta::default();
    Some(class)
}

/// The time between two looks whether a watch still fails: it may work again without an event.
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);

/// Runs until a watch ends, which is not expected. While a watch fails, it acts on nothing: a node that is not known may
/// be new. `unanswered` receives the times in which the API server has not answered.
pub(super) async fn run_leader(
    config: &AgentConfig,
    applier: &AgentApplier,
    watch_errors: &WatchErrors,
    unanswered: &mut mpsc::UnboundedReceiver<Duration>,
) {
    let mut events = watch_objects(applier, watch_errors);
    let (mut objects, mut agenda) = (ClusterObjects::default(), Agenda::new(config));
    let (mut has_changed, mut is_failing) = (false, false);
    loop {
        let due = match is_failing {
            true => Some(Instant::now() + FAILURE_INTERVAL),
            false => agenda.next_due().into_iter().chain(objects.leases.next_expiry()).min(),
        };
        tokio::select! {
            event = events.next() => {
                let Some(event) = event else { return };
                has_changed |= objects.observe(&config.driver, event);
            }
            () = sleep_until_due(due) => {}
            Some(time) = unanswered.recv() => objects.leases.postpone(time, Instant::now()),
        }
        // A burst of changes is planned once.
        while let Some(Some(event)) = events.next().now_or_never() {
            has_changed |= objects.observe(&config.driver, event);
        }
        let failure = watch_errors.failure();
        let was_failing = std::mem::replace(&mut is_failing, failure.is_some());
        if let Some(failure) = failure.filter(|_| !was_failing) {
            tracing::warn!(
                "the agent acts on nothing while it can't watch the cluster: {failure}; `provisionerd agent --check` names \
                 missing permissions"
            );
        }
        applier.metrics.set_watches_failing(is_failing);
        if was_failing && !is_failing {
            tracing::info!("the agent acts again");
            // The objects were outdated until now, so the time until now does not count.
            agenda.restart_delays(Instant::now());
            objects.leases.restart(Instant::now());
        }
        // Incomplete or outdated objects would make existing nodes look deleted.
        if is_failing || !objects.is_complete() {
            continue;
        }
        has_changed |= objects.leases.expire(Instant::now());
        if std::mem::take(&mut has_changed) {
            let pending: BTreeSet<&str> =
                objects.claims.iter().map(|(_, claim)| claim.key.uid.as_str()).collect();
            let conditions = find_conditions(&config.driver, &objects);
            agenda.update(conditions, |uid| pending.contains(uid), Instant::now());
        }
        // Events wait until all actions have ended, so the actions of one pass see the same objects.
        let outcomes = act_on_due(&agenda, applier, &objects).await;
        for (condition, outcome) in outcomes {
            agenda.record_outcome(&condition, outcome, Instant::now());
        }
        record_totals(&agenda, &objects, applier);
    }
}

async fn act_on_due(
    agenda: &Agenda,
    applier: &AgentApplier,
    objects: &ClusterObjects,
) -> Vec<(ClusterCondition, ActionOutcome)> {
    let act = |condition: ClusterCondition| async move {
        let outcome = applier.act(objects, &condition).await;
        (condition, outcome)
    };
    let due = agenda.due_conditions(Instant::now());
    let (of_nodes, others): (Vec<_>, Vec<_>) =
        due.into_iter().partition(|it| matches!(it, ClusterCondition::Unresponsive { .. }));
    let (mut of_pods, others): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|it| matches!(it, ClusterCondition::StuckPod { .. }));
    // The others are still due after the next events.
    of_pods.truncate(MAX_PODS);
    let mut outcomes = Vec::new();
    // First the capacity, then the claims: otherwise the scheduler might select such a node again. Advice about pods is last.
    for batch in [of_nodes, others, of_pods] {
        outcomes.extend(stream::iter(batch).map(act).buffer_unordered(CONCURRENCY).collect::<Vec<_>>().await);
    }
    outcomes
}

fn record_totals(agenda: &Agenda, objects: &ClusterObjects, applier: &AgentApplier) {
    let (mut gone, mut unserved, mut unresponsive) = (BTreeMap::<String, usize>::new(), 0, 0);
    for condition in agenda.reached_conditions(Instant::now()) {
        match condition {
            ClusterCondition::NodeGone { node, .. } => *gone.entry(node.to_string()).or_default() += 1,
            ClusterCondition::UnservedClaim { .. } => unserved += 1,
            // One that was stopped has told the kubelet, so that its driver is no longer registered.
            ClusterCondition::Unresponsive { node } => {
                unresponsive += usize::from(objects.csi_nodes.get(node) == Some(&true));
            }
            ClusterCondition::UnusableNode { .. }
            | ClusterCondition::StuckPod { .. }
            | ClusterCondition::Removable { .. } => {}
        }
    }
    applier.metrics.set_gone_volumes(&gone);
    applier.metrics.set_unserved_claims(unserved);
    applier.metrics.set_unresponsive_nodes(unresponsive);
}

fn watch_objects(applier: &AgentApplier, errors: &WatchErrors) -> BoxStream<'static, ObjectEvent> {
    let client = || applier.client.0.clone();
    let watches = [
        watch_kind(Api::all(client()), errors, ObjectEvent::Claim),
        watch_kind(Api::all(client()), errors, ObjectEvent::Class),
        watch_kind(Api::all(client()), errors, ObjectEvent::Node),
        watch_kind(Api::all(client()), errors, ObjectEvent::CsiNode),
        watch_kind(Api::all(client()), errors, ObjectEvent::Volume),
        watch_kind(Api::namespaced(client(), &applier.namespace), errors, ObjectEvent::Lease),
        watch_pods(client(), errors),
    ];
    // The end of one watch ends all: without it, planning would go on with outdated objects.
    let ended = |event: &Option<ObjectEvent>| future::ready(event.is_some());
    let watches = watches.map(|watch| watch.map(Some).chain(stream::once(future::ready(None))).boxed());
    stream::select_all(watches).take_while(ended).filter_map(future::ready).boxed()
}

fn watch_kind<K>(
    objects: Api<K>,
    errors: &WatchErrors,
    wrap: impl Fn(Event<K>) -> ObjectEvent + Send + 'static,
) -> BoxStream<'static, ObjectEvent>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    watch_selected(objects, watcher::Config::default(), errors, wrap)
}

/// Watches the pods that don't run yet. Without the permission, the agent does everything else.
fn watch_pods(client: Client, errors: &WatchErrors) -> BoxStream<'static, ObjectEvent> {
    let pending = watcher::Config::default().fields("status.phase=Pending");
    watch_selected(Api::all(client), pending, &errors.of_optional_apis(), ObjectEvent::Pod)
}

fn watch_selected<K>(
    objects: Api<K>,
    config: watcher::Config,
    errors: &WatchErrors,
    wrap: impl Fn(Event<K>) -> ObjectEvent + Send + 'static,
) -> BoxStream<'static, ObjectEvent>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let config = config.page_size(PAGE_SIZE);
    let events = with_backoff(watcher(objects, config), errors.clone());
    events.map(move |event| event.map_or(ObjectEvent::Failure, &wrap)).boxed()
}
