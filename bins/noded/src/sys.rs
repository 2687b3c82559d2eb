//! The only unsafe code of the crate.
#![allow(unsafe_code, reason = "tokio asks for a promise about the descriptor, and no library has adjtimex")]

use std::io;
use std::os::fd::OwnedFd;

use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The kernel's status of its clock, `STA_UNSYNC` and others. *Source:* adjtimex(2).
///
/// # Errors
/// The kernel does not say: a sandbox may forbid the call.
pub(crate) fn read_clock_status() -> io::Result<i32> {
    // SAFETY: `timex` consists of integers, for which zeros are valid values.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `timex` is a live value that the call may write to. Its `modes` are 0, so it changes nothing.
    match unsafe { libc::adjtimex(&raw mut timex) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(timex.status),
    }
}

/// Registers a descriptor with the runtime.
///
/// # Errors
/// The kernel can't wait for the descriptor, or has no memory.
pub(crate) fn register_fd(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` owns its descriptor and refers to the same one until it is dropped. The `AsyncFd` owns
    // it and hands out only shared references, by which it can't be replaced.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(io::Error::from)
}
