//! provisionerd in a cluster: from its image, as in `deploy/`, on a node with a separate kernel.
//!
//! `cargo xtask test` creates the image. For `cargo test`, create it with `cargo xtask oci provisionerd`, and
//! set the path of its file in the environment variable `NODEKEEL_PROVISIONERD_IMAGE`.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

mod cluster;
mod escapes;
mod external_storage;
mod images;
#[cfg(feature = "kill-points")]
mod kills;
mod lifecycle;
mod outages;
mod quickstart;
