//! The volume of a deleted claim, or one that is released, is deleted: the decision, the effect, and what prevents it.
//!
//! # A deletion, step by step
//! 1. `VolumeReconciler` gets each change of a PersistentVolume of this node. It takes the mark of an unpublished copy
//!    off, and `plan_volume` decides on the cached object: a released one with the policy Delete goes.
//! 2. `delete_volume` (`apply.rs`) reads the object, and decides again. A live claim with the volume's UID stops it, under
//!    any name, unless that claim is bound to another volume.
//! 3. A volume that names another store, and is not in this one, is left alone, unless the object is marked as lost.
//! 4. `reserve_volume` fails while a pod uses the volume; from then on none can begin to.
//! 5. `OpenStore::remove` renames the directory into the trash, by an entry whose name keeps its project number: the
//!    claim's promise ends, and its bytes count until they are erased.
//! 6. `delete_object` deletes the object, then takes the driver's finalizer off.
//! 7. Later, the eraser (`dir_store/eraser.rs`) removes the data, then frees the project, then removes the entry.
//!
//! After a kill before step 5, nothing has changed. After it, the object is still released: step 5 finds no volume, and
//! step 6 follows. The next start erases what is in the trash.

pub(crate) mod apply;
pub(crate) mod decide;
#[cfg(test)]
mod decide_test;
pub(crate) mod live_claims;
pub(crate) mod reconcile;
pub(crate) mod reservation;
