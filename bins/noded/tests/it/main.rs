//! The real binaries, and nodes in this process, through real sockets.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

mod api;
mod callers;
mod cluster;
mod completion;
mod control_plane;
mod daemons;
mod data;
mod errors;
mod golden;
mod harness;
mod health;
mod kernel;
mod killed;
mod kubelet;
mod lifecycle;
mod log_levels;
mod logs;
mod many_services;
mod network_namespace;
mod nodectl;
mod parts;
mod planned_stop;
mod preseed;
mod reload;
mod reserve;
mod service_settings;
mod services;
mod storage;
mod storage_cluster;
mod storage_device;
mod storage_keys;
mod storage_partition;
mod systemd;
mod volumes;
