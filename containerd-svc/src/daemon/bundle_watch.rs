//! Watches the directory of the bundles.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

use crate::sys::watch_readable;

/// The changes after which there may be another bundle, or one less. A file that is being written is complete when it is
/// closed.
const CHANGES: WatchFlags = WatchFlags::CLOSE_WRITE
    .union(WatchFlags::CREATE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Changes of a directory of bundles, and of the namespaces in it, from now on. What links point to is not watched.
#[derive(Debug)]
pub(super) struct BundleWatch {
    events: AsyncFd<OwnedFd>,
    directories: Vec<(i32, PathBuf)>,
}

impl BundleWatch {
    /// `None` if the directory is missing. It blocks.
    pub(super) fn new(directory: &Path) -> io::Result<Option<Self>> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut directories = Vec::new();
        let mut add = |path: PathBuf| match inotify::add_watch(&events, &path, CHANGES) {
            Ok(watch) => {
                directories.push((watch, path));
                Ok(true)
            }
            // It is gone, or a file.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) => Ok(false),
            Err(error) => Err(io::Error::from(error)),
        };
        // The directory first: a namespace that is created after it was listed is an event.
        if !add(directory.to_owned())? {
            return Ok(None);
        }
        for entry in std::fs::read_dir(directory)? {
            add(entry?.path())?;
        }
        Ok(Some(Self { events: watch_readable(events)?, directories }))
    }

    /// Waits for a change; there may be more by then: watch anew, and look.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub(super) async fn wait(&self) -> io::Result<()> {
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

    fn is_change(&self, event: &inotify::Event<'_>) -> bool {
        // Hidden files are no bundles.
        let Some(name) = event.file_name().map(|name| name.to_bytes()) else { return true };
        let directory = self.directories.iter().find(|(watch, _)| *watch == event.wd());
        match directory {
            _ if name.starts_with(b".") => false,
            // A new file is still empty, unless it is a link.
            Some((_, directory)) if event.events().contains(ReadFlags::CREATE) => {
                let found = std::fs::symlink_metadata(directory.join(OsStr::from_bytes(name)));
                found.is_ok_and(|found| !found.is_file() || found.nlink() > 1)
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
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
        let (top, outside) = (scratch.path().join("images"), scratch.path().join("a.tar"));
        fs::create_dir_all(top.join("k8s.io")).expect("created");
        let at = |name: &str| top.join("k8s.io").join(name);
        let watch = || BundleWatch::new(&top).expect("watched").expect("it exists");
        let changes: [&dyn Fn() -> io::Result<()>; 6] = [
            &|| fs::write(at("a.tar"), "x"),
            &|| fs::rename(at("a.tar"), at("b.tar")),
            &|| symlink(&outside, at("link.tar")),
            &|| fs::remove_file(at("b.tar")),
            &|| fs::create_dir(top.join("other")),
            &|| fs::remove_dir(top.join("other")),
        ];
        for change in changes {
            let watch = watch();
            change().expect("changed");
            watch.wait().await.expect("noticed");
        }
        let (watch, mut file) = (watch(), File::create(at("slow.tar")).expect("created"));
        file.write_all(b"x").expect("written");
        fs::write(at(".hidden"), "x").expect("written");
        assert!(poll(watch.wait()).await.is_none(), "it is not complete");
        drop(file);
        watch.wait().await.expect("noticed");
        assert!(BundleWatch::new(&scratch.path().join("missing")).expect("looked").is_none());
    }
}
