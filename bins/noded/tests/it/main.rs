//! The real binaries, and nodes in this process, through real sockets.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod api;
mod cluster;
mod daemons;
mod data;
mod errors;
mod harness;
mod life;
mod logs;
mod nodectl;
mod services;
mod site;
mod volumes;
