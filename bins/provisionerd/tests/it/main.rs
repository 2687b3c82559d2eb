//! Tests of the provisionerd binary.
#![allow(clippy::unwrap_used, reason = "a test that can't continue fails")]

#[cfg(feature = "kill-points")]
mod accounts;
#[cfg(feature = "kill-points")]
mod agent;
#[cfg(feature = "kill-points")]
mod agent_policy;
#[cfg(feature = "kill-points")]
mod api_outage;
#[cfg(feature = "kill-points")]
mod capacity;
mod charts;
#[cfg(feature = "kill-points")]
mod cluster;
#[cfg(feature = "kill-points")]
mod commands;
#[cfg(feature = "kill-points")]
mod crash;
#[cfg(feature = "kill-points")]
mod errors;
#[cfg(feature = "kill-points")]
mod import;
#[cfg(feature = "kill-points")]
mod inability;
mod messages;
#[cfg(feature = "kill-points")]
mod moves;
#[cfg(feature = "kill-points")]
mod own_memory;
#[cfg(feature = "kill-points")]
mod policy;
#[cfg(feature = "kill-points")]
mod ports;
#[cfg(feature = "kill-points")]
mod principals;
#[cfg(feature = "kill-points")]
mod snapshot_policy;
#[cfg(feature = "kill-points")]
mod store;
