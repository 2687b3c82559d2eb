//! For tests: failpoints before every system call, and the checks that every implementation of a trait passes.

mod parsers;
mod placement;

pub use crate::faults::{Verdict, with_hook};
pub use parsers::journal_record;
pub use placement::conformance;
