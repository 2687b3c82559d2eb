//! The mounts of this process: the kernel reports when they change.

use std::fs::File;
use std::io;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys;

/// The mounts since they were opened.
#[derive(Debug)]
pub(super) struct MountTable(AsyncFd<File>);

impl MountTable {
    /// Must be called within a tokio runtime.
    ///
    /// *Source:* proc_pid_mountinfo(5): a change of the mounts is an exceptional condition of the file.
    pub(super) fn open() -> io::Result<Self> {
        let file = File::open("/proc/self/mountinfo")?;
        sys::watch_priority(file).map(Self)
    }

    /// Waits until a mount is added, removed, moved or remounted.
    pub(super) async fn wait_for_change(&self) -> io::Result<()> {
        self.0.ready(Interest::PRIORITY).await.map(drop)
    }
}
