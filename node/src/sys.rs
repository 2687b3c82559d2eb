//! The only unsafe code of the crate.
#![allow(
    unsafe_code,
    reason = "tokio asks for a promise about the descriptor, and no library has adjtimex, FITRIM and ioprio_set"
)]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};

use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The kernel's status of its clock, `STA_UNSYNC` and others. *Source:* adjtimex(2).
///
/// # Errors
/// The kernel does not report it: a sandbox may forbid the call.
pub(crate) fn read_clock_status() -> io::Result<i32> {
    // SAFETY: `timex` consists of integers, for which zeros are valid values.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: `timex` is a live value that the call may write to. Its `modes` are 0, so it changes nothing.
    match unsafe { libc::adjtimex(&raw mut timex) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(timex.status),
    }
}

/// `struct fstrim_range`. *Source:* `linux/fs.h`.
#[repr(C)]
struct TrimRange {
    start: u64,
    length: u64,
    least_length: u64,
}

nix::ioctl_readwrite!(
    /// `FITRIM`. *Source:* `linux/fs.h`.
    trim_range, b'X', 121, TrimRange
);

/// Discards the free blocks in a range of bytes of the file system with this directory, and returns how many bytes it
/// has discarded.
///
/// # Errors
/// Those of the ioctl: `EOPNOTSUPP` if the device takes no discards.
pub(crate) fn trim_file_system(directory: &impl AsFd, range: Range<u64>) -> io::Result<u64> {
    let mut range = TrimRange { start: range.start, length: range.end - range.start, least_length: 0 };
    // SAFETY: the descriptor is open, and the kernel reads and writes one `fstrim_range`, which lives through the call.
    unsafe { trim_range(directory.as_fd().as_raw_fd(), &raw mut range) }?;
    Ok(range.length)
}

/// Gives the calling thread the idle class: the disk serves it when nobody else asks, by schedulers that have classes.
///
/// # Errors
/// The kernel or a sandbox does not allow it.
pub(crate) fn set_idle_io_class() -> io::Result<()> {
    // *Source:* `linux/ioprio.h`: IOPRIO_WHO_PROCESS, and IOPRIO_CLASS_IDLE above IOPRIO_CLASS_SHIFT. 0 is this thread.
    const WHO_PROCESS: libc::c_int = 1;
    const CLASS_IDLE: libc::c_int = 3 << 13;
    // SAFETY: the call takes three integers, and changes the priority of this thread alone.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0 as libc::c_int, CLASS_IDLE) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
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
