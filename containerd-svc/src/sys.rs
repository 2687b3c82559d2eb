//! All unsafe code of the crate.
#![allow(unsafe_code, reason = "to watch a descriptor, the runtime requires a guarantee about its lifetime")]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor to wait until it is ready for this.
pub(crate) fn watch_descriptor(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` owns its descriptor and refers to the same one until it is dropped. The `AsyncFd` owns it, and
    // deregisters it before dropping it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}
