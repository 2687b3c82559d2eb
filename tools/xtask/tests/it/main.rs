//! Rules of the workspace that the compiler doesn't check.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

mod cluster;
mod dist;
mod documents;
mod layers;
mod sources;
mod unsafe_code;
