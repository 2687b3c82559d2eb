//! For tests: failpoints before every system call.

pub use crate::faults::{Verdict, with_hook};
