//! Imports bundles into a store in memory: offline, as any user.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod at_once;
mod bundles;
mod conformance;
mod directory;
mod faults;
mod golden;
mod hostile;
mod incremental;
mod instances;
mod mixed_bundles;
mod policy;
mod reconcile;
mod runsc;
mod several_directories;
mod single_archive;
mod space;
mod states;
