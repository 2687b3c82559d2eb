//! The limits of volumes, compared with what their PersistentVolumes promise: other programs can change them, and a volume
//! that was restored from a backup has none.

pub(crate) mod decide;
pub(crate) mod reconcile;
