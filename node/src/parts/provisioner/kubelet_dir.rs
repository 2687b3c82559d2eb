//! Waits for a kubelet that has not started yet, as on a node that runs its own kubelet as a service.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nodekeel_supervisor::{Context, Failure};
use thiserror::Error;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys::register_fd;

/// The directories that a kubelet creates below its own when it starts, and that the CSI plugin needs.
///
/// *Source:* k8s.io/kubernetes, `pkg/kubelet/kubelet.go`, `setupDataDirs`.
const KUBELET_DIRECTORIES: [&str; 2] = ["pods", "plugins_registry"];

/// The kubelet's directory can't be watched: the user has too many inotify instances or watches, see
/// inotify(7).
#[derive(Debug, Error)]
#[error("can't watch {} for the start of the kubelet", path.display())]
struct WatchError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Waits until the kubelet has created its directories, and reports what is missing as the runnable's reason
/// not to be ready. Afterwards the reason is its ready signal, as without a wait.
///
/// # Errors
/// The runnable was canceled, or the directory can't be watched.
pub(crate) async fn wait_for_kubelet(kubelet: &Path, ctx: &Context) -> Result<(), Failure> {
    let mut has_waited = false;
    while let Some(missing) = missing_directory(kubelet) {
        // The directory was removed after it was found: the next round finds one above it.
        let Some(change) = DirectoryWatch::new(nearest_directory(&missing))? else { continue };
        // This look finds directories that were created before the watch began, and the watch reports later ones.
        if missing_directory(kubelet).as_ref() == Some(&missing) && nearest_directory(&missing) == change.path
        {
            ctx.signal_not_ready(format!(
                "waits for the kubelet to create {}: start the kubelet, or correct provisioner.kubelet",
                missing.display()
            ))?;
            has_waited = true;
            tokio::select! {
                changed = change.wait() => changed?,
                canceled = ctx.canceled() => return Err(canceled.into()),
            }
        }
    }
    if has_waited {
        ctx.signal_not_ready("waits for its ready signal")?;
    }
    Ok(())
}

/// The first directory that a kubelet has not created yet.
fn missing_directory(kubelet: &Path) -> Option<PathBuf> {
    KUBELET_DIRECTORIES.map(|name| kubelet.join(name)).into_iter().find(|path| !path.is_dir())
}

/// The deepest existing directory on the way to a path.
fn nearest_directory(path: &Path) -> PathBuf {
    path.ancestors().skip(1).find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

/// Watches for a new entry of a directory, and for mounts, which may cover it.
struct DirectoryWatch {
    path: PathBuf,
    entries: AsyncFd<OwnedFd>,
    mounts: AsyncFd<OwnedFd>,
}

impl DirectoryWatch {
    /// Starts to watch; `None` if the directory has been removed.
    fn new(path: PathBuf) -> Result<Option<Self>, WatchError> {
        let watches = || {
            let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
            // A directory is created in its place, or prepared elsewhere and moved there.
            let changes = AddWatchFlags::IN_CREATE
                | AddWatchFlags::IN_MOVED_TO
                | AddWatchFlags::IN_DELETE_SELF
                | AddWatchFlags::IN_MOVE_SELF;
            match inotify.add_watch(&path, changes) {
                Err(Errno::ENOENT) => return Ok(None),
                result => result.map(drop)?,
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

    async fn wait(&self) -> Result<(), WatchError> {
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

    #[test]
    fn the_directory_that_is_missing_and_the_one_to_watch_are_found() {
        let scratch = tempfile::tempdir().expect("a directory");
        let kubelet = scratch.path().join("lib/kubelet");
        assert_eq!(missing_directory(&kubelet), Some(kubelet.join("pods")));
        assert_eq!(nearest_directory(&kubelet.join("pods")), scratch.path());
        fs::create_dir_all(kubelet.join("pods")).expect("created");
        assert_eq!(missing_directory(&kubelet), Some(kubelet.join("plugins_registry")));
        assert_eq!(nearest_directory(&kubelet.join("plugins_registry")), kubelet);
        fs::write(kubelet.join("plugins_registry"), "").expect("written");
        assert_eq!(missing_directory(&kubelet), Some(kubelet.join("plugins_registry")), "a file is none");
        fs::remove_file(kubelet.join("plugins_registry")).expect("removed");
        fs::create_dir(kubelet.join("plugins_registry")).expect("created");
        assert_eq!(missing_directory(&kubelet), None);
    }

    #[tokio::test]
    async fn a_watch_notices_what_is_created_moved_and_removed() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (directory, other) = (scratch.path().join("a"), scratch.path().join("b"));
        type Change<'a> = &'a dyn Fn() -> io::Result<()>;
        let changes: [Change<'_>; 3] = [
            &|| fs::create_dir(directory.join("new")),
            &|| fs::rename(&other, directory.join("moved")),
            &|| fs::remove_dir_all(&directory),
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
