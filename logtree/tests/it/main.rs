//! Tests of the public API. Case numbers refer to the tests of the original, which define its behaviour.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod backlog;
mod concurrent;
mod layer;
mod levels;
mod limits;
mod line_writer;
mod live;
mod memory;
mod parsers;
mod properties;
mod rendering;
mod sources;
mod support;
