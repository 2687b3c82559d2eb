//! provisionerd in a cluster: from its image, as `deploy/` has it, on a node with a kernel of its own.
//!
//! `cargo xtask test` makes the image. For `cargo test`, make it by `cargo xtask oci provisionerd`, and name its file in
//! the environment variable `NODEKEEL_PROVISIONERD_IMAGE`.

mod cluster;
mod disk;
#[cfg(feature = "kill-points")]
mod kills;
mod life;
mod times;
