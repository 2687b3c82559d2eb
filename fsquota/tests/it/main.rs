//! Tests of the public API.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod kernel;
mod memory;
mod parsers;
mod states;
