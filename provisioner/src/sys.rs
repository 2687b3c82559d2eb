//! All unsafe code of the crate.
#![allow(
    unsafe_code,
    reason = "to watch a descriptor, the runtime requires a guarantee about its lifetime; a child of fork must not \
              allocate"
)]

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers an open file to wait for its exceptional conditions.
pub(crate) fn watch_priority(file: File) -> io::Result<AsyncFd<File>> {
    // SAFETY: a `File` owns its descriptor and refers to the same one until it is dropped. The `AsyncFd` owns
    // the file and deregisters it before dropping it. The descriptor can't be moved out of a `File` behind a
    // shared reference.
    unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) }.map_err(io::Error::from)
}

/// Has the kernel kill the program of this command when this program is killed, or the thread ends that starts it.
pub(crate) fn end_with_parent(command: &mut Command) {
    let parent = getpid();
    // SAFETY: between fork and exec, the closure makes two system calls, and neither allocates nor locks.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have been killed before.
            if getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
        })
    };
}
