//! Tests of the crate as others see it.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod bed;
mod commit;
mod dir;
mod disks;
mod journal;
mod kernel;
mod matrix;
mod model;
mod mount;
mod paths;
mod pki;
mod placement;
mod removal;
mod replace;
mod tree;
mod volume;
