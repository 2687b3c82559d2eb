//! All unsafe code of the crate.
#![allow(unsafe_code, reason = "to watch a descriptor, the runtime requires a guarantee about its lifetime")]

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
