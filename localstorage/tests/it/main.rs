//! Tests of the public API.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod commit;
mod dir;
mod disks;
mod file_store;
mod fixture;
mod golden;
mod kernel;
mod luks;
mod matrix;
mod model;
mod mount;
mod paths;
mod pki;
mod power_cut;
mod removal;
mod replace;
mod step_journal;
mod tree;
mod volume;
