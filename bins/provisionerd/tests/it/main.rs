//! provisionerd as its user sees it.

#[cfg(feature = "kill-points")]
mod cluster;
#[cfg(feature = "kill-points")]
mod crash;
#[cfg(feature = "kill-points")]
mod errors;
#[cfg(feature = "kill-points")]
mod policy;
mod words;
