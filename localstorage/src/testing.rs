//! For tests: failpoints before every system call, and the checks that every implementation of a trait passes.

mod placement;

pub use crate::faults::{Verdict, with_hook};
pub use placement::conformance;
