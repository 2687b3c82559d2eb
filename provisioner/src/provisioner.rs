//! The provisioner service: its dependencies, its configuration, and its run.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use nodekeel_supervisor::{Backoff, CanceledError, Context, Failure, RunFuture, Runnable};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::ability::Ability;
use crate::api::event::EventRecorder;
use crate::api::health::ApiProbe;
use crate::api::watch_errors::WatchErrors;
use crate::api::writer::ApiWriter;
use crate::controller;
use crate::deletion::reservation::VolumeGuard;
use crate::failure::FailureReporter;
use crate::identity::ProvisionerIdentity;
use crate::image::ImageFormat;
use crate::loss::status::{ServedStore, StoreStatus};
use crate::loss::store::StoreRejection;
use crate::metrics::VolumeMetrics;
use crate::name::StoreName;
use crate::node::NodeObserver;
use crate::node_lease::LeaseStatus;
use crate::snapshot::SnapshotStore;
use crate::step::{StepHook, StepRunner};
use crate::store::{VolumeStore, VolumeStoreError};
use crate::volume_locks::VolumeLocks;

/// The dependencies of a provisioner.
#[derive(Clone)]
pub struct Deps {
    /// The API server. To mock it: `Client::new(tower_service, "default")`.
    pub client: Client,
    /// Stores the volumes.
    pub store: Arc<dyn VolumeStore>,
    /// Stores their snapshots, and copies volumes; usually the same object. `None`: claims with a data source are
    /// rejected, and snapshots are left to others.
    pub snapshots: Option<Arc<dyn SnapshotStore>>,
    /// Records metrics; `Arc::new(())` records nothing.
    pub metrics: Arc<dyn VolumeMetrics>,
    /// Prevents the deletion of volumes in use. `None` if volumes are not mounted.
    pub guard: Option<Arc<dyn VolumeGuard>>,
    /// True if the kubelet has registered the driver; the provisioner is not ready before. `None` without a
    /// CSI plugin.
    pub registered: Option<watch::Receiver<bool>>,
    /// Is called at each step; for tests.
    pub hook: Option<Arc<dyn StepHook>>,
}

/// The configuration of a provisioner.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProvisionerConfig {
    /// The driver and the node to serve.
    pub identity: ProvisionerIdentity,
    /// The number of claims that are reconciled concurrently; the same number applies to volumes. Default 16: most of
    /// the time is spent waiting for the API server.
    pub concurrency: NonZeroU16,
    /// The number of volumes that are copied from a snapshot or another volume concurrently, and of snapshots that are
    /// taken; the other claims don't wait for them. Default 4: copies keep the disk busy.
    pub copy_concurrency: NonZeroU16,
    /// The backoff of retries, for each claim and volume separately. Default 1 s, doubled up to 5 min, with a
    /// jitter of one tenth.
    pub backoff: Backoff,
    /// For a claim with immediate binding, the time for which the second node in the claim's order leaves it to the first
    /// one; later ones wait longer, by the logarithm of their place. A node that does not know the others waits for a
    /// random part of this. Default 2 s.
    pub node_selection_delay: Duration,
    /// After how many consecutive attempts without free space for a volume this node is deselected, so that
    /// the scheduler selects another. Default 1.
    pub reschedule_after: u32,
    /// The time between the end of an audit of the volumes' limits and the start of the next one. Default 6 h; the first
    /// one starts with the provisioner.
    pub audit_interval: Duration,
    /// The number of files and directories that an audit inspects in a second at most. Default 1,000.
    pub audit_rate: NonZeroU32,
}

impl ProvisionerConfig {
    /// The default configuration.
    pub fn new(identity: ProvisionerIdentity) -> Self {
        Self {
            identity,
            concurrency: NonZeroU16::MIN.saturating_add(15),
            copy_concurrency: NonZeroU16::MIN.saturating_add(3),
            backoff: Backoff {
                initial: Duration::from_secs(1),
                factor: 2.0,
                max: Duration::from_secs(300),
                jitter: 0.1,
            },
            node_selection_delay: Duration::from_secs(2),
            reschedule_after: 1,
            audit_interval: Duration::from_secs(6 * 60 * 60),
            audit_rate: NonZeroU32::MIN.saturating_add(999),
        }
    }
}

/// The reason why a run of a provisioner ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The token was canceled. Actions in progress are complete, or the next run completes them.
    #[error("the provisioner was stopped on request")]
    Canceled,
    /// A watch of the API server ended, which is not expected. Run the provisioner again.
    #[error("the watch of the API server's objects ended")]
    WatchEnded,
    /// The store is not the one of this node's volumes, nothing was changed, and it can't be opened again. Create
    /// another once its disk is mounted.
    #[error(transparent)]
    StoreRejected(StoreRejection),
    /// The store is no longer there, or creating its identity failed, and it can't be opened again. Create another.
    #[error(transparent)]
    StoreLost(VolumeStoreError),
}

/// A store with a name, next to that of the [`Deps`]. Its claims and volumes are served like those of that one, and
/// whether or not the others can be.
#[derive(Debug, Clone)]
#[allow(clippy::exhaustive_structs, reason = "made by programs, as `Deps`")]
pub struct NamedStore {
    /// As [`Deps::store`].
    pub store: Arc<dyn VolumeStore>,
    /// As [`Deps::snapshots`].
    pub snapshots: Option<Arc<dyn SnapshotStore>>,
    /// As [`Deps::metrics`], for this store.
    pub metrics: Arc<dyn VolumeMetrics>,
    /// As [`Deps::guard`], of the volumes of this store.
    pub guard: Option<Arc<dyn VolumeGuard>>,
}

/// What is known of a store of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "read by programs, whose tests make one")]
pub struct StoreHealth {
    /// The name; `None` is the store of the [`Deps`].
    pub name: Option<StoreName>,
    /// Whether its volumes are served.
    pub status: StoreStatus,
    /// Whether volumes can be created in it, as its last probe has found: at the start of serving, after each failure of the
    /// store, each minute, and every other second while they can't.
    pub ability: Ability,
    /// The formats of strict volumes that can't be created, with the reason: the program that makes the file system is
    /// missing. All other volumes can be created.
    pub missing_formats: BTreeMap<ImageFormat, String>,
}

/// A store, what serves its claims and volumes with, and its status.
#[derive(Debug, Clone)]
pub(crate) struct StoreUnit {
    /// Of the identity with the name of the store.
    pub(crate) api: ApiWriter,
    pub(crate) store: Arc<dyn VolumeStore>,
    pub(crate) snapshots: Option<Arc<dyn SnapshotStore>>,
    pub(crate) guard: Option<Arc<dyn VolumeGuard>>,
    pub(crate) failures: FailureReporter,
    pub(crate) served: ServedStore,
}

/// Provisions the claims of one node, and deletes its released volumes. It is a [`Runnable`].
#[derive(Debug, Clone)]
pub struct Provisioner {
    pub(crate) config: ProvisionerConfig,
    /// The store of the [`Deps`], and those that were added.
    pub(crate) units: Vec<StoreUnit>,
    pub(crate) locks: Arc<VolumeLocks>,
    pub(crate) registered: Option<watch::Receiver<bool>>,
    pub(crate) watch_errors: WatchErrors,
    pub(crate) node: NodeObserver,
    pub(crate) lease: LeaseStatus,
    api_probe: ApiProbe,
}

impl Provisioner {
    /// Creates a provisioner; it does nothing before it runs.
    pub fn new(config: ProvisionerConfig, deps: Deps) -> Self {
        let (steps, identity) = (StepRunner::new(deps.hook), config.identity.clone());
        let recorder =
            EventRecorder::new(deps.client.clone(), &identity.driver, identity.node.as_str(), steps.clone());
        let unit = StoreUnit {
            api: ApiWriter::new(identity, deps.client.clone(), steps),
            store: deps.store,
            snapshots: deps.snapshots,
            guard: deps.guard,
            failures: FailureReporter {
                metrics: Arc::clone(&deps.metrics),
                recorder: Arc::new(recorder),
                store_failed: Arc::default(),
            },
            served: ServedStore::new(),
        };
        Self {
            config,
            units: vec![unit],
            locks: Arc::default(),
            registered: deps.registered,
            watch_errors: WatchErrors::new(deps.metrics, deps.client),
            node: NodeObserver::default(),
            lease: LeaseStatus::default(),
            api_probe: ApiProbe::default(),
        }
    }

    /// Adds a store: of the classes whose parameter `store` is this name, which must not be that of another one.
    #[must_use]
    pub fn with_store(mut self, name: StoreName, added: NamedStore) -> Self {
        let NamedStore { store, snapshots, metrics, guard } = added;
        let first = self.first();
        let unit = StoreUnit {
            api: first.api.of_store(Some(name)),
            store,
            snapshots,
            guard,
            failures: FailureReporter {
                metrics,
                recorder: Arc::clone(&first.failures.recorder),
                store_failed: Arc::default(),
            },
            served: ServedStore::new(),
        };
        self.units.push(unit);
        self
    }

    /// The store of the [`Deps`].
    pub(crate) fn first(&self) -> &StoreUnit {
        &self.units[0]
    }

    /// What is known of each store: that of the [`Deps`], and those that were added, in this order.
    pub fn stores(&self) -> Vec<StoreHealth> {
        let health = |unit: &StoreUnit| StoreHealth {
            name: unit.api.identity.store.clone(),
            status: unit.served.status(),
            ability: unit.served.ability(),
            missing_formats: unit.served.missing_formats().clone(),
        };
        self.units.iter().map(health).collect()
    }

    /// Asks the API server whether it answers and accepts the credentials, at most once a second. Returns
    /// after at most four seconds why it cannot be used: that, or the error of a watch that it rejects. The future does not
    /// keep the store: another provisioner can open that meanwhile.
    ///
    /// # Cancel safety
    /// Has no side effects.
    pub fn check_api(&self) -> impl Future<Output = Option<String>> + Send + use<> {
        let (probe, client) = (self.api_probe.clone(), self.first().api.client().clone());
        let (metrics, watches) = (Arc::clone(&self.first().failures.metrics), self.watch_errors.clone());
        async move {
            let error = probe.probe_server(&client, &*metrics).await;
            // The server may answer and still reject a watch, for example one that its account may not open.
            error.or_else(|| watches.rejection())
        }
    }

    /// The reason why no pod can be scheduled to the volumes of this node, as of the last change of its object: the label that
    /// their affinity refers to is not its name. `None` while it is, or the object is not known.
    pub fn check_node(&self) -> Option<String> {
        self.node.mismatch().map(|mismatch| mismatch.to_string())
    }

    /// The reason why the Lease of this node has expired: pods are placed elsewhere until it is renewed.
    pub fn check_lease(&self) -> Option<String> {
        self.lease.expiry()
    }

    /// Returns whether the volumes of the store of the [`Deps`] are served.
    pub fn store_status(&self) -> StoreStatus {
        self.first().served.status()
    }

    /// Whether volumes can be created in the store of the [`Deps`]: as [`StoreHealth::ability`].
    pub fn ability(&self) -> Ability {
        self.first().served.ability()
    }

    /// The formats of strict volumes that can't be created on this node: as [`StoreHealth::missing_formats`], of the store of
    /// the [`Deps`].
    pub fn missing_formats(&self) -> BTreeMap<ImageFormat, String> {
        self.first().served.missing_formats().clone()
    }

    /// Runs until canceled. Calls `ready` once, when the first lists are complete, a store is the one of
    /// this node's volumes, and the kubelet has registered the driver.
    ///
    /// # Errors
    /// Always returns one: [`RunError::Canceled`] after the token is canceled, actions in progress have
    /// ended, and the Lease of the node is deleted; [`RunError::StoreRejected`] or [`RunError::StoreLost`], as soon as a store reports it that
    /// [can't be opened again](VolumeStore::watch_changes): any other is looked for, and served again when it is
    /// back; else [`RunError::WatchEnded`].
    ///
    /// # Cancel safety
    /// Dropping the future is like a crash: the next run resumes.
    pub async fn run_until(
        &self,
        token: CancellationToken,
        ready: impl FnOnce() + Send,
    ) -> Result<Infallible, RunError> {
        controller::run_controller(self, &token, ready).await?;
        // The controller returns success both after a cancellation and after the end of a watch.
        Err(if token.is_cancelled() { RunError::Canceled } else { RunError::WatchEnded })
    }
}

impl Runnable for Provisioner {
    fn run(&self, ctx: Context) -> RunFuture {
        // The run outlives this borrow. Its clone shares the status, so the checks of this one report on the run.
        let provisioner = self.clone();
        Box::pin(async move {
            let ready = || {
                // Fails only if this run has ended, and then readiness does not matter.
                let _ = ctx.signal_ready();
            };
            match provisioner.run_until(ctx.cancellation_token(), ready).await {
                // The supervisor does not count a cancellation as a failure.
                Err(RunError::Canceled) => Err(CanceledError.into()),
                Err(error) => Err(Failure::new(error)),
            }
        })
    }
}

impl fmt::Debug for Deps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deps")
            .field("store", &self.store)
            .field("metrics", &self.metrics)
            .finish_non_exhaustive()
    }
}
