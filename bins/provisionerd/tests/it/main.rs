//! provisionerd as its user sees it.

#[cfg(feature = "kill-points")]
mod cluster;
#[cfg(feature = "kill-points")]
mod crash;
mod words;
