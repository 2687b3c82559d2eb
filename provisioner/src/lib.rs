//! A Kubernetes volume provisioner that runs on each node: it creates a directory with a project quota and a
//! PersistentVolume for each claim scheduled to the node, and deletes both after the claim is deleted.
//!
//! Each node serves the claims scheduled to it, without a central controller. An optional agent does the work that no
//! node can do for itself, such as to give up a claim whose node is gone. The provisioner never creates an
//! empty volume for a restore, nor a block volume from a file system, or the other way round.
//!
//! ```text
//!  claims ─┐                      ┌─ VolumeStore: a directory, created with its limits
//!  classes ├─▶ plan (pure) ─▶ apply ─ PersistentVolume: one POST, complete
//!  volumes ┘                      └─ event: ProvisioningSucceeded, ProvisioningFailed, VolumeFailedDelete
//! ```
//!
//! This program provisions the claims of one driver on one node, and deletes its released volumes:
//!
//! ```no_run
//! use std::error::Error as _;
//! use std::sync::Arc;
//!
//! use nodekeel_fsquota::ProjectQuota;
//! use nodekeel_localstorage::Dir;
//! use nodekeel_provisioner::{
//!     Deps, DirStore, DriverName, FINALIZER, NodeName, Provisioner, ProvisionerConfig, ProvisionerIdentity,
//! };
//! use tokio_util::sync::CancellationToken;
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let identity = ProvisionerIdentity {
//!         driver: DriverName::try_new("volumes.example.org")?,
//!         node: NodeName::try_new("node-a")?,
//!         finalizer: Some(FINALIZER.to_owned()),
//!         store: None,
//!     };
//!     let path = std::path::Path::new("/var/lib/nodekeel");
//!     let quota = match ProjectQuota::open(path) {
//!         Ok(quota) => Arc::new(quota),
//!         Err(error) => {
//!             // Names what is missing: the directory, root, or the mount option.
//!             let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
//!             println!("{error}{cause}");
//!             return Ok(());
//!         }
//!     };
//!     let store = Arc::new(DirStore::new(Dir::open(path)?, quota)?);
//!     // From $KUBECONFIG, ~/.kube/config, or the pod's service account.
//!     let client = kube::Client::try_default().await?;
//!     let deps = Deps {
//!         client,
//!         snapshots: Some(store.clone()),
//!         store,
//!         metrics: Arc::new(()),
//!         guard: None,
//!         registered: None,
//!         hook: None,
//!     };
//!
//!     // Or give it to a supervisor: it is a `Runnable`.
//!     let provisioner = Provisioner::new(ProvisionerConfig::new(identity), deps);
//!     let Err(error) = provisioner.run_until(CancellationToken::new(), || println!("ready")).await;
//!     println!("{error}");
//!     Ok(())
//! }
//! ```
//!
//! # Behaviour
//! - A volume is named only after its claim's UID ([`VolumeId`]). A handle from outside either is such a name
//!   or is rejected, so no handle reaches another volume, or a path.
//! - A PersistentVolume is ours only if its driver, annotation, affinity to this node alone, handle, name and
//!   claim agree. Before the provisioner deletes one, it reads the volume and its claim from the API server
//!   again, and logs the deletion. Volumes of another driver or node are skipped without an event; otherwise
//!   every node would emit one for every other node's volumes.
//! - A directory whose disk isn't mounted looks like an empty one. So a store has an identity ([`StoreId`]), on
//!   its disk and in each PersistentVolume: nothing is served without it, and a missing volume counts as
//!   removed only in the store that it was created in.
//! - A node can have several stores, each with a name ([`Provisioner::with_store`]): a class names that of its volumes by its
//!   parameter `store`. Each is served, probed, and offered by itself.
//! - The node affinity of volumes refers to a label of this driver ([`DriverName::topology_key`]), which the
//!   kubelet sets when it registers the plugin.
//! - Before it creates a volume, it reads the claim again: a stale cache causes no second volume.
//! - A claim with `volumeMode: Block` gets a file that pods see as a block device; one of a class with `strict: "true"`,
//!   a file system in a file, ext4 or XFS, whose files can't leave its limits. Both are snapshotted, cloned and
//!   expanded as directories are.
//! - A bound claim that requests more gets it at once, with and without a running pod; what the node can't
//!   promise is reported as infeasible, and the request can be lowered. A VolumeAttributesClass sets the inode
//!   limit.
//! - A failure is retried after 1 s, doubled up to 5 min, for each object separately. A rejection emits one
//!   event and is not retried until the object changes.
//! - A volume mounted on this node is not deleted, even if the API has neither its pod nor its claim.
//! - An existing directory becomes the volume of a claim by [`import_directory`], also while a provisioner runs.
//! - Whether the node can create volumes is probed, in the store itself, and not taken from its identity ([`Ability`]).
//!   While it can't, it offers no capacity, and gives up the claims that it was selected for; what exists is served.
//! - Limits are promised up to a ceiling ([`CapacityPolicy`]). The rest is published as CSIStorageCapacity objects, which
//!   belong to the Node; where a volume does not fit, they are written before the node is deselected.
//! - The process can be killed at any point. Volumes whose claim was deleted before they were published are
//!   swept, if the store finds them empty.
//!
//! # Bring your own
//! - [`VolumeStore`]: where volumes are stored. `testing::conformance` checks an implementation; [`DirStore`]
//!   ships with it.
//! - [`SnapshotStore`]: how snapshots are taken and volumes copied. `testing::snapshot_conformance` checks an
//!   implementation; [`DirStore`] does it by reflinks.
//! - [`VolumeGuard`]: which volumes are in use. The CSI node plugin implements it by looking at mounts.
//! - [`VolumeMetrics`]: receives counts and durations.
//!
//! # Features
//! - `agent`: the agent of a cluster, for what no node can do for itself.
//! - `csi`: the CSI node plugin.
//! - `metrics`: [`VolumeMetrics`] in a Prometheus registry.
//! - `settings`: the tables of a configuration file that programs with a provisioner share.
//! - `testing`: a store and an API server in memory, sample objects, and the conformance suite for stores.
//!
//! # Origin
//! Monogon's `provisioner.go` (one agent per node, quotas on directories), without its defects: unchecked
//! handles, unchecked dereferences, no backoff, deletion that blocks everything. Annotations, finalizer,
//! event reasons and metrics are those of the external-provisioner.

mod ability;
#[cfg(feature = "agent")]
pub mod agent;
mod api;
mod audit;
mod capacity;
mod claim;
mod controller;
#[cfg(feature = "csi")]
pub mod csi;
mod deletion;
mod dir_store;
mod error_chain;
mod failure;
mod id;
mod identity;
mod image;
mod import;
mod limits;
mod loss;
mod metrics;
mod name;
mod node;
mod node_lease;
mod objects;
mod provisioner;
mod quantity;
mod recovery;
mod resize;
mod scope;
#[cfg(feature = "settings")]
pub mod settings;
mod snapshot;
mod step;
mod store;
mod store_id;
mod sweep;
mod sys;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod volume_locks;
mod volume_move;

pub use ability::{Ability, InabilityCause};
pub use capacity::policy::{CapacityPolicy, CapacityShortage, DiskSpace, InvalidRatio, StoreCapacity};
pub use claim::attributes::AttributesRejection;
pub use claim::decide::{ClaimAction, ClaimIgnoreReason, ObservedClaim, plan_claim};
pub use claim::manifest::build_persistent_volume;
pub use claim::source::DataSource;
pub use claim::spec::{ClaimRejection, ReclaimPolicy, SizeError, VolumeSpec};
pub use deletion::decide::VolumeRejection;
pub use deletion::decide::{VolumeAction, VolumeIgnoreReason, plan_volume};
pub use deletion::reservation::{GuardError, VolumeGuard, VolumeReservation};
pub use dir_store::{
    DirStore, DirStoreError, DirStoreOptions, DirectoryOpener, EraseBacklog, IMAGE_FILE, StoredEntry,
    StoredPlace,
};
pub use dir_store::{ImportMode, ImportOutcome, MoveHeader, SourceError, VolumeImporter};
pub use error_chain::format_chain;
pub use id::{VolumeId, VolumeIdError};
pub use identity::{
    BETA_STORAGE_PROVISIONER, FINALIZER, HOSTNAME, PROVISIONED_BY, ProvisionerIdentity, SELECTED_NODE,
    STORAGE_PROVISIONER,
};
pub use image::{FormatError, ImageFormat, InvalidKind, VolumeKind};
pub use import::decide::{ImportAction, ImportRejection, plan_import};
pub use import::{ImportDeps, ImportError, ImportRequest, import_directory};
pub use loss::condition::required_volume;
pub use loss::status::{StoreFault, StoreStatus};
pub use loss::store::plan_new_store;
pub use loss::store::{StoreAction, StoreRejection, plan_store};
#[cfg(feature = "metrics")]
pub use metrics::PrometheusMetrics;
pub use metrics::VolumeMetrics;
pub use name::{
    DriverName, InvalidObjectName, MAX_DRIVER_NAME_BYTES, MAX_NODE_NAME_BYTES, MAX_STORE_NAME_BYTES,
    NodeName, StoreName,
};
pub use objects::{KIND_ATTRIBUTE, STORE_ATTRIBUTE, STORE_NAME_ATTRIBUTE, node_of_volume, store_of_volume};
pub use provisioner::{Deps, NamedStore, Provisioner, ProvisionerConfig, RunError, StoreHealth};
pub use quantity::QuantityError;
pub use recovery::orphan::{OrphanState, OrphanVolume, plan_orphan};
pub use recovery::{RecoveryError, VolumeOwners, VolumeRecovery};
pub use resize::bound_claim::BoundClaim;
pub use resize::expansion::{ExpansionAction, plan_expansion};
pub use resize::modification::{ModificationAction, plan_modification};
pub use snapshot::decide::{SnapshotAction, SnapshotRejection, plan_snapshot};
pub use snapshot::{
    BEING_DELETED, CONTENT_FINALIZER, MANAGED_BY_LABEL, SNAPSHOT_GROUP, SnapshotContentError,
    SnapshotContentSource, SnapshotId, SnapshotIdError, SnapshotInfo, SnapshotOwner, SnapshotStore,
    SnapshotStoreError, StoredId, VolumeSnapshot, VolumeSnapshotContent, VolumeSnapshotContentSpec,
    VolumeSnapshotContentStatus, VolumeSnapshotStatus, adopted_snapshot,
};
pub use step::{StepHook, StepMoment, VolumeStep};
pub use store::{
    ErrorSource, FoundLimits, LimitAudit, OpenVolume, PublishAttempts, VolumeOpener, VolumeStore,
    VolumeStoreError, VolumeUsage,
};
pub use store_id::{StoreId, StoreIdError, StoreIdentity};
pub use volume_move::decide::MoveRejection;
pub use volume_move::{
    MoveDeps, MoveError, MoveOutcome, MoveRequest, VolumeCarrier, VolumeCopy, list_moves, move_volume,
};
