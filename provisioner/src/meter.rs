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
/// It is called once per attempt that came to an end, from any thread, and doesn't block.
pub trait Meter: Send + Sync + fmt::Debug {
    /// An attempt to make a volume of this class has succeeded or failed after so long.
    fn provisioned(&self, class: &str, took: Duration, succeeded: bool);

    /// An attempt to destroy a volume of this class has succeeded or failed after so long.
    fn deleted(&self, class: &str, took: Duration, succeeded: bool);
}

impl Meter for () {
    fn provisioned(&self, _class: &str, _took: Duration, _succeeded: bool) {}

    fn deleted(&self, _class: &str, _took: Duration, _succeeded: bool) {}
}
