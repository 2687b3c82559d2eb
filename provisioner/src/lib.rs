//! Per-node volumes for Kubernetes: claim in, directory with a quota and PersistentVolume out, and back.
//!
//! It has no central controller and elects nobody: each node serves the claims that are placed on it. It makes no block
//! volumes, no snapshots and no clones, and refuses claims that ask for them; it never makes an empty volume for a restore.
//!
//! ```text
//!  claims ─┐                      ┌─ VolumeStore: a directory, born with its limits
//!  classes ├─▶ plan (pure) ─▶ apply ─ PersistentVolume: one POST, complete
//!  volumes ┘                      └─ event: ProvisioningSucceeded, ProvisioningFailed, VolumeFailedDelete
//! ```
//!
//! A claim of a driver and a node is provisioned, and a released volume of both is destroyed:
//!
//! ```no_run
//! use std::sync::Arc;
//! use nodekeel_fsquota::QuotaSetter;
//! use nodekeel_localstorage::Dir;
//! use nodekeel_provisioner::{Config, Deps, DirStore, DriverName, FINALIZER, Identity, NodeName, Provisioner};
//!
//! # fn example(client: kube::Client, quota: Arc<dyn QuotaSetter>) -> Result<Provisioner, Box<dyn std::error::Error>> {
//! let identity = Identity {
//!     driver: DriverName::try_new("volumes.example.org")?,
//!     node: NodeName::try_new("node-a")?,
//!     finalizer: Some(FINALIZER.to_owned()),
//! };
//! let store = Arc::new(DirStore::new(Dir::open("/data/volumes")?, quota)?);
//! let deps = Deps { client, store, meter: Arc::new(()), guard: None, registered: None, hook: None };
//! // It is a `Runnable`: give it to a supervisor, or run it by itself with `run_until`.
//! Ok(Provisioner::new(Config::new(identity), deps))
//! # }
//! ```
//!
//! # How it behaves
//! - A volume is named after its claim's UID and nothing else ([`VolumeId`]). What comes from outside either is such a name or
//!   names nothing, so no handle reaches another volume, or a path.
//! - A PersistentVolume is ours only if driver, annotation, affinity to this node alone, handle, name and claim agree. Before
//!   one is destroyed, it and its claim are read from the API server again, and the act is logged. What disagrees is passed over
//!   without an event: were it told, each node would tell it, of volumes of others too.
//! - Before a volume is made, its claim is read again: a cache that lags makes no second one.
//! - What fails is tried again after 1 s, doubled up to 5 min, for each object by itself; what is refused is told once and not
//!   tried until it changes.
//! - What is mounted on this node is not destroyed, whatever the API says of its pod and its claim.
//! - Everything can be killed anywhere. Volumes whose claim went before they were handed out are swept, if the store finds
//!   nothing in them.
//!
//! # Bring your own
//! - [`VolumeStore`]: where volumes live. `testing::conformance` checks yours; [`DirStore`] is ours.
//! - [`VolumeGuard`]: which volumes are in use. The CSI node plugin knows by its mounts.
//! - [`Meter`]: what is counted.
//!
//! # Features
//! - `csi`: the CSI node plugin.
//! - `metrics`: a [`Meter`] over a Prometheus registry.
//! - `testing`: a store and an API server in memory, objects, and the store's contract as a check.
//!
//! # Where it comes from
//! Monogon's `provisioner.go` (one agent per node, quotas on directories), without its holes: unchecked handles, blind
//! dereferences, no backoff, deletion that blocks everything. What others expect of a provisioner (annotations, finalizer, event
//! reasons, metrics) is that of the external-provisioner.

mod apply;
mod chain;
mod controller;
#[cfg(feature = "csi")]
pub mod csi;
mod dir_store;
mod event;
mod guard;
mod id;
mod in_time;
mod locks;
mod manifest;
mod meter;
mod name;
mod plan;
mod provisioner;
mod quantity;
mod step;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use dir_store::{DirStore, DirStoreError, DirStoreOptions};
pub use guard::{GuardError, Reservation, VolumeGuard};
pub use id::{VolumeId, VolumeIdError};
pub use manifest::manifest;
pub use meter::Meter;
#[cfg(feature = "metrics")]
pub use meter::PrometheusMeter;
pub use name::{DriverName, MAX_DRIVER_NAME_BYTES, MAX_NODE_NAME_BYTES, NameError, NodeName};
pub use plan::{
    BETA_STORAGE_PROVISIONER, ClaimAction, ClaimIgnored, ClaimRefusal, FINALIZER, HOSTNAME, Identity,
    PROVISIONED_BY, Reclaim, SELECTED_NODE, STORAGE_PROVISIONER, SeenClaim, SizeError, VolumeAction,
    VolumeIgnored, VolumeRefusal, VolumeSpec, plan_claim, plan_volume,
};
pub use provisioner::{Config, Deps, Provisioner, RunError};
pub use quantity::QuantityError;
pub use step::{Hook, Moment, Step};
pub use store::{Cause, OpenVolume, StoreError, VolumeStore, VolumeUsage};
