//! Per-node volumes for Kubernetes: claim in, directory with a quota and PersistentVolume out, and back.

#[cfg(feature = "csi")]
pub mod csi;
mod id;
mod name;
mod plan;
mod quantity;
mod store;
#[cfg(feature = "testing")]
pub mod testing;

pub use id::{VolumeId, VolumeIdError};
pub use name::{DriverName, MAX_DRIVER_NAME_BYTES, MAX_NODE_NAME_BYTES, NameError, NodeName};
pub use plan::{
    BETA_STORAGE_PROVISIONER, ClaimAction, ClaimIgnored, ClaimRefusal, FINALIZER, HOSTNAME, Identity,
    PROVISIONED_BY, Reclaim, SELECTED_NODE, STORAGE_PROVISIONER, SeenClaim, SizeError, VolumeAction,
    VolumeIgnored, VolumeRefusal, VolumeSpec, plan_claim, plan_volume,
};
pub use quantity::QuantityError;
pub use store::{Cause, OpenVolume, StoreError, VolumeStore, VolumeUsage};
