//! Tests of the crate as others see it.

mod dir;
mod disks;
mod mount;
mod pki;
mod placement;
mod tree;
mod volume;
