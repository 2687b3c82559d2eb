//! Watches the directories of the bundles.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::sys::watch_descriptor;

/// The changes after which there may be another bundle, or one less. A file that is being written is complete when it is
/// closed.
const BUNDLE_CHANGES: WatchFlags = WatchFlags::CLOSE_WRITE.union(WatchFlags::ATTRIB).union(PATH_CHANGES);

/// The changes after which a path may lead to another directory. One directory may be watched for two reasons.
const PATH_CHANGES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::MASK_ADD);

/// Changes of directories of bundles, and of the namespaces in them, from now on; also that one is created, replaced or mounted. What
/// links point to is not watched.
#[derive(Debug)]
pub(super) struct BundleWatch {
    events: AsyncFd<OwnedFd>,
    mounts: AsyncFd<OwnedFd>,
    watched: Vec<WatchedDirectory>,
    /// What the paths of the directories and their namespaces led to.
    found: Vec<(PathBuf, Option<FileId>)>,
}

#[derive(Debug)]
struct WatchedDirectory {
    watch: i32,
    path: PathBuf,
    /// The only entry that counts, in a directory above the bundles; `None` if all do.
    entry: Option<OsString>,
}

/// Another one after a mount.
#[derive(Debug, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
}

impl BundleWatch {
    /// The directories may be missing. It blocks.
    pub(super) fn new(directories: &[PathBuf]) -> io::Result<Self> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // Before the paths are looked up: a mount after that is a change.
        // *Source:* proc_pid_mountinfo(5): a change of the mounts is an exceptional condition of the file.
        let mounts = File::open("/proc/self/mountinfo")?;
        let (mut watched, mut found) = (Vec::new(), Vec::new());
        let mut add = |path: &Path, entry: Option<&OsStr>| {
            let changes = if entry.is_some() { PATH_CHANGES } else { BUNDLE_CHANGES };
            match inotify::add_watch(&events, path, changes) {
                Ok(watch) => {
                    let (path, entry) = (path.to_owned(), entry.map(OsStr::to_owned));
                    watched.push(WatchedDirectory { watch, path, entry });
                    Ok(true)
                }
                // It is gone, or a file.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => Ok(false),
                Err(error) => Err(io::Error::from(error)),
            }
        };
        for directory in directories {
            // From the top: what is created after the directory above it was watched is an event.
            let mut below: Vec<_> = directory.ancestors().filter(|path| path.file_name().is_some()).collect();
            below.reverse();
            for path in below {
                if let Some(above) = path.parent() {
                    add(above, path.file_name())?;
                }
            }
            found.push((directory.clone(), find_file_id(directory)));
            if add(directory, None)? {
                for entry in std::fs::read_dir(directory)? {
                    let path = entry?.path();
                    add(&path, None)?;
                    let id = find_file_id(&path);
                    found.push((path, id));
                }
            }
        }
        let events = watch_descriptor(events, Interest::READABLE)?;
        let mounts = watch_descriptor(mounts.into(), Interest::PRIORITY)?;
        Ok(Self { events, mounts, watched, found })
    }

    /// Waits for a change; there may be more by then: watch anew, and look.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub(super) async fn wait(&self) -> io::Result<()> {
        tokio::select! {
            changed = self.wait_event() => changed,
            mounted = self.wait_mount() => mounted,
        }
    }

    async fn wait_event(&self) -> io::Result<()> {
        loop {
            let mut ready = self.events.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(self.events.get_ref(), &mut buffer);
            loop {
                match events.next() {
                    Ok(event) if self.is_change(&event) => return Ok(()),
                    Ok(_) => {}
                    Err(Errno::WOULDBLOCK) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            ready.clear_ready();
        }
    }

    /// Each container has mounts of its own: only one that covers or uncovers bundles counts.
    async fn wait_mount(&self) -> io::Result<()> {
        loop {
            let mut ready = self.mounts.ready(Interest::PRIORITY).await?;
            if self.found.iter().any(|(path, id)| find_file_id(path) != *id) {
                return Ok(());
            }
            ready.clear_ready();
        }
    }

    fn is_change(&self, event: &inotify::Event<'_>) -> bool {
        let Some(name) = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes())) else {
            return true;
        };
        let mut watched = self.watched.iter().filter(|watched| watched.watch == event.wd());
        watched.any(|WatchedDirectory { path, entry, .. }| match entry {
            Some(entry) => name == entry,
            // Hidden files are no bundles.
            None if name.as_bytes().starts_with(b".") => false,
            // A new file is still empty, unless it is a link.
            None if event.events().contains(ReadFlags::CREATE) => {
                let found = std::fs::symlink_metadata(path.join(name));
                found.is_ok_and(|found| !found.is_file() || found.nlink() > 1)
            }
            None => true,
        })
    }
}

fn find_file_id(path: &Path) -> Option<FileId> {
    let id = |found: Metadata| FileId { device: found.dev(), inode: found.ino() };
    std::fs::metadata(path).ok().map(id)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use super::*;

    /// Lets the runtime look for events.
    async fn poll<F: Future>(future: F) -> Option<F::Output> {
        let mut future = std::pin::pin!(future);
        for _ in 0..10 {
            tokio::select! {
                biased;
                done = &mut future => return Some(done),
                () = tokio::task::yield_now() => {}
            }
        }
        None
    }

    #[tokio::test]
    async fn bundles_are_noticed_when_they_are_complete_moved_linked_or_removed() {
        let scratch = tempfile::tempdir().expect("a directory");
        let (above, outside) = (scratch.path().join("above"), scratch.path().join("a.tar"));
        let top = above.join("images");
        fs::create_dir_all(top.join("k8s.io")).expect("created");
        let at = |name: &str| top.join("k8s.io").join(name);
        let watch =
            || BundleWatch::new(&[scratch.path().join("missing/images"), top.clone()]).expect("watched");
        let changes: [&dyn Fn() -> io::Result<()>; 11] = [
            &|| fs::write(at("a.tar"), "x"),
            &|| fs::rename(at("a.tar"), at("b.tar")),
            &|| symlink(&outside, at("link.tar")),
            &|| fs::remove_file(at("b.tar")),
            &|| fs::create_dir(top.join("other")),
            &|| fs::remove_dir(top.join("other")),
            // Away, and made again one level after the other.
            &|| fs::rename(&above, scratch.path().join("moved")),
            &|| fs::create_dir(&above),
            &|| fs::create_dir(&top),
            &|| fs::create_dir(top.join("k8s.io")),
            &|| fs::create_dir(scratch.path().join("missing")),
        ];
        for change in changes {
            let watch = watch();
            change().expect("changed");
            watch.wait().await.expect("noticed");
        }
        let (watch, mut file) = (watch(), File::create(at("slow.tar")).expect("created"));
        file.write_all(b"x").expect("written");
        for other in [at(".hidden"), above.join("other"), scratch.path().join("other")] {
            fs::write(other, "x").expect("written");
        }
        assert!(poll(watch.wait()).await.is_none(), "it is not complete");
        drop(file);
        watch.wait().await.expect("noticed");
    }
}
