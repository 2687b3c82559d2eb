//! All unsafe code of the crate.
#![allow(
    unsafe_code,
    reason = "to watch a descriptor, the runtime requires a guarantee about its lifetime; hints to a processor are assembly"
)]

use std::fs::File;
use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers an open file to wait until it is readable.
pub(crate) fn watch_readable(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: a `File` owns its descriptor and refers to the same one until it is dropped. The `AsyncFd` owns
    // the file and deregisters it before dropping it. The descriptor can't be moved out of a `File` behind a
    // shared reference.
    unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }.map_err(io::Error::from)
}

/// Lets the processor get a value that another one may have written last, while the caller does something else before it
/// writes it.
#[inline]
pub(crate) fn prefetch_for_write<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is a hint: it changes neither memory nor registers, and faults at no address. Processors
    // without it ignore it.
    unsafe {
        let at = std::ptr::from_ref(value);
        std::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
