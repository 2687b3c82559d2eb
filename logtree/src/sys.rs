//! The one place with unsafe code.
#![allow(unsafe_code, reason = "to watch a descriptor, the runtime wants a promise about its lifetime")]

use std::fs::File;
use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches an open file for being readable.
pub(crate) fn watch(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: a `File` owns its descriptor and names the same one until it is dropped, and it is given away here: the
    // `AsyncFd` drops it after itself. Nobody can take the descriptor out of a `File` behind a shared reference.
    unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) }.map_err(io::Error::from)
}
