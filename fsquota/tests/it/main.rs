//! Tests of the public API.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use nodekeel_fsquota::{ProjectId, ProjectRange};

mod kernel;
mod memory;
mod parsers;

pub(crate) fn range(first: u32, last: u32) -> ProjectRange {
    let id = |number| ProjectId::new(number).unwrap();
    ProjectRange::new(id(first), id(last)).unwrap()
}
