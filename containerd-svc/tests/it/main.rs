//! Bundles into a store in memory: offline, as any user.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod bundles;
mod conformance;
mod directory;
mod faults;
mod hostile;
mod retold;
mod runsc;
mod single;
mod stalled;
