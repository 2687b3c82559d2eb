//! The programs noded and nodectl, through real sockets and with real daemons.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

mod block_volumes;
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
mod many_services;
mod nodectl;
mod planned_stop;
mod ports;
mod preseed;
mod reload;
mod reserve;
mod service_settings;
mod services;
mod storage;
mod storage_cluster;
mod storage_device;
mod storage_disk;
mod storage_join;
mod storage_keys;
mod storage_partition;
mod storage_tpm;
mod systemd;
mod volumes;
