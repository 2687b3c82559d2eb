//! Tests of the provisionerd binary.

#[cfg(feature = "kill-points")]
mod cluster;
#[cfg(feature = "kill-points")]
mod crash;
#[cfg(feature = "kill-points")]
mod errors;
mod messages;
#[cfg(feature = "kill-points")]
mod policy;
#[cfg(feature = "kill-points")]
mod store;
