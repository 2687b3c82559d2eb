//! A claim becomes a volume: its specification, the decision, the effect, and its PersistentVolume.
//!
//! # A claim, step by step
//! 1. `EventFilter` (`controller/event_filter.rs`) passes it on its selected node, or on all nodes while it has
//!    none, and `reconcile_changes` (`api/work_queue.rs`) calls `ClaimReconciler`, which waits until `StoreGuard`
//!    (`loss/guard.rs`) serves the store, and `StoreProber` (`ability/prober.rs`) has found that it can be used.
//! 2. `plan_claim` decides on the cached claim. With immediate binding, the node selects itself
//!    first, when it is its turn (`claim/peers.rs`). While the store
//!    can't be used, `plan_selected_claim` (`ability.rs`) gives the claim to another node.
//! 3. `provision_claim` reads the claim, and decides again.
//! 4. `VolumeStore::create` (`dir_store/open_store.rs`): a directory in staging, its limits, the rename. A copy or an
//!    image gets its content, and then the mark of an unpublished volume, before the rename. It reserves capacity
//!    first; without it, `Exhausted` gives the claim to another node, unless its data source is on this
//!    one.
//! 5. `create_volume` writes the PersistentVolume.
//! 6. The claim gets its event. `deletion` sees the PersistentVolume, and removes the mark, unless a pod's mount has
//!    done so.
//!
//! # Killed in between
//! Before step 4, at most the selected node is in the claim; delays and counts of failures begin anew. Before the
//! rename, the next start discards the staging directory (`OpenStore::resume_interrupted`), and the claim is
//! provisioned anew. After it, the claim is still pending: steps 4 and 5 find the directory, raise its limits if
//! the claim wants more, and write the object. If the claim is deleted or another node's by then, the next list or
//! deletion makes `sweep.rs` remove the volume if it is empty, or has the mark. After step 5, only the event is
//! lost.

pub(crate) mod apply;
pub(crate) mod attributes;
pub(crate) mod decide;
#[cfg(test)]
mod decide_test;
pub(crate) mod manifest;
pub(crate) mod mount_option;
pub(crate) mod peers;
pub(crate) mod reconcile;
pub(crate) mod size;
pub(crate) mod source;
pub(crate) mod spec;
