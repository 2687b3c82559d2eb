//! Tests with real releases of containerd: Debian's, and the newest, built from its Go module.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod archive_table;
mod archives;
mod cri;
mod cri_health;
mod daemon_killed;
mod damage;
mod fake_daemons;
mod full_disk;
mod gvisor;
mod harness;
mod images;
mod late_cri;
mod mirrors;
mod pods;
mod process;
mod second_version;
