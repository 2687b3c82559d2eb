//! The real binaries, and nodes in this process, through real sockets.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

mod api;
mod cluster;
mod daemons;
mod data;
mod errors;
mod golden;
mod harness;
mod lifecycle;
mod logs;
mod network_namespace;
mod nodectl;
mod parts;
mod preseed;
mod service_settings;
mod services;
mod volumes;
