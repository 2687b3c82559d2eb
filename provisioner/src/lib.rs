//! Per-node volumes for Kubernetes: claim in, directory with a quota and PersistentVolume out, and back.

mod apply;
mod controller;
#[cfg(feature = "csi")]
pub mod csi;
mod dir_store;
mod event;
mod id;
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
pub use id::{VolumeId, VolumeIdError};
pub use manifest::manifest;
#[cfg(feature = "metrics")]
pub use meter::PrometheusMeter;
pub use meter::Meter;
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
