//! The only unsafe code of the crate.
#![allow(unsafe_code, reason = "tokio asks for a promise about the descriptor")]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the runtime.
///
/// # Errors
/// The kernel can't wait for the descriptor, or has no memory.
pub(crate) fn register_fd(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` owns its descriptor and refers to the same one until it is dropped. The `AsyncFd` owns
    // it and hands out only shared references, by which it can't be replaced.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}
