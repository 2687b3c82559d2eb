//! What is counted.

use std::fmt;
use std::time::Duration;

#[cfg(feature = "metrics")]
mod prometheus;

#[cfg(feature = "metrics")]
pub use prometheus::PrometheusMeter;

/// Counts what was provisioned and deleted, and how long it took. `()` counts nothing.
///
/// # Contract
/// It is called once per attempt that came to an end, and whenever it was looked for what belongs to nobody, from any thread,
/// and doesn't block.
pub trait Meter: Send + Sync + fmt::Debug {
    /// An attempt to make a volume of this class has succeeded or failed after so long.
    fn provisioned(&self, class: &str, took: Duration, succeeded: bool);

    /// An attempt to destroy a volume of this class has succeeded or failed after so long.
    fn deleted(&self, class: &str, took: Duration, succeeded: bool);

    /// How many volumes may hold data and have no PersistentVolume, and how many PersistentVolumes have no volume. It is looked
    /// for at the start, where a watch began anew, and where a claim or a PersistentVolume went; a log entry names each.
    fn orphans(&self, volumes: usize, objects: usize) {
        let _ = (volumes, objects);
    }
}

impl Meter for () {
    fn provisioned(&self, _class: &str, _took: Duration, _succeeded: bool) {}

    fn deleted(&self, _class: &str, _took: Duration, _succeeded: bool) {}
}
