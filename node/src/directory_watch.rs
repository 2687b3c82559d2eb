//! Waits for a change of what a directory contains, or of the way to it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys::register_fd;

/// The directory can't be watched: the user has too many inotify instances or watches, see inotify(7).
#[derive(Debug, Error)]
#[error("can't watch {}", path.display())]
pub(crate) struct WatchError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// The deepest existing directory on the way to a path.
pub(crate) fn nearest_directory(path: &Path) -> PathBuf {
    path.ancestors().skip(1).find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

/// Watches for new and removed entries of a directory, for a move or removal of it or of a directory above, and for mounts, which
/// may cover it.
pub(crate) struct DirectoryWatch {
    path: PathBuf,
    entries: AsyncFd<OwnedFd>,
    mounts: AsyncFd<OwnedFd>,
}

impl DirectoryWatch {
    /// Starts to watch; `None` if the directory has been removed.
    pub(crate) fn new(path: PathBuf) -> Result<Option<Self>, WatchError> {
        let watches = || {
            let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
            let ends = AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
            // An entry is created in its place, or prepared elsewhere and moved there.
            let arrivals = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
            let departures = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM;
            match inotify.add_watch(&path, ends | arrivals | departures) {
                Err(Errno::ENOENT) => return Ok(None),
                result => result.map(drop)?,
            }
            for above in path.ancestors().skip(1) {
                // A directory that this user can't read is not watched: its owner does not move it away.
                match inotify.add_watch(above, ends) {
                    Ok(_) | Err(Errno::EACCES | Errno::ENOENT) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            // *Source:* proc_pid_mountinfo(5): a change of the mounts is an exceptional condition of the file.
            let mounts = register_fd(File::open("/proc/self/mountinfo")?.into(), Interest::PRIORITY)?;
            io::Result::Ok(Some((register_fd(inotify.into(), Interest::READABLE)?, mounts)))
        };
        match watches() {
            Ok(watches) => Ok(watches.map(|(entries, mounts)| Self { path, entries, mounts })),
            Err(source) => Err(WatchError { path, source }),
        }
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for the first change since the watch began. Others may have come with it: look again by a new watch.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub(crate) async fn wait(&self) -> Result<(), WatchError> {
        let changed = tokio::select! {
            changed = self.entries.readable() => changed.map(drop),
            changed = self.mounts.ready(Interest::PRIORITY) => changed.map(drop),
        };
        changed.map_err(|source| WatchError { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn a_watch_notices_what_is_created_moved_and_removed() {
        let scratch = tempfile::tempdir().expect("a directory");
        let above = scratch.path().join("above");
        let (directory, other) = (above.join("a"), above.join("b"));
        type Change<'a> = &'a dyn Fn() -> io::Result<()>;
        let changes: [Change<'_>; 5] = [
            &|| fs::create_dir(directory.join("new")),
            &|| fs::rename(&other, directory.join("moved")),
            &|| fs::remove_dir(directory.join("moved")),
            &|| fs::remove_dir_all(&directory),
            &|| fs::rename(&above, scratch.path().join("moved")),
        ];
        for change in changes {
            fs::create_dir_all(&directory).expect("created");
            fs::create_dir_all(&other).expect("created");
            let watch = DirectoryWatch::new(directory.clone()).expect("watched").expect("it exists");
            change().expect("changed");
            watch.wait().await.expect("noticed");
        }
    }
}
