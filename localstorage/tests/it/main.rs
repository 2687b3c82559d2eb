//! Tests of the public API.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod clone;
mod commit;
mod dir;
mod disks;
mod fifty_disks;
mod file_store;
mod fixture;
mod golden;
mod kernel;
mod luks;
mod matrix;
mod model;
mod monogon_root;
mod mount;
mod owner;
mod partitions;
mod paths;
mod pki;
mod power_cut;
mod removal;
mod replace;
mod step_journal;
mod tang;
mod tree;
mod volume;
