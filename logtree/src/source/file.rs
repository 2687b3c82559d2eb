//! Files to which other programs append their logs.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::unistd::{Whence, lseek};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::coop::consume_budget;

use crate::LineWriter;
use crate::sys::watch_readable;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 64 << 10;

/// Buffer for inotify events, whose content is ignored.
const EVENT_BUFFER_BYTES: usize = 4 << 10;

/// A file to which other programs append lines. What has been read is given back to the file system, as a hole in the
/// file, so that the file takes no more space than its unread lines; the next reader begins after the hole.
///
/// Unlike a FIFO, it needs no reader: a program that opens it or writes to it never waits. While nobody reads it, it grows.
/// A program has to open it with `O_APPEND`, as the file never gets shorter. On a file system without holes, it grows.
///
/// *Source:* fallocate(2), `FALLOC_FL_PUNCH_HOLE`: of a block that is read in part, the part becomes zeros.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    file: File,
    events: AsyncFd<File>,
    /// The offset of the first byte that is not read.
    position: u64,
    /// True until the first byte that an earlier reader has not read.
    is_in_hole: bool,
}

/// The reason why a log file can't be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file can't be created, opened or watched: check its directory; a user has 128 inotify instances by default.
    #[error("can't open log file {path}")]
    Open {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The path is a link or another kind of file: remove it if it is not needed.
    #[error("{path} exists and is not a regular file: remove it, or configure another path")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
}

impl FileSource {
    /// Opens the file at `path`, and creates it with mode 0600 if it does not exist.
    ///
    /// # Errors
    /// All of [`FileError`]; a retry helps once the reported cause is fixed.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO enabled.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let failed = |source: io::Error| FileError::Open { path: path.to_owned(), source };
        match fs::symlink_metadata(path) {
            // Checked before it is opened: opening a FIFO waits, and opening a device can have side effects.
            Ok(found) if !found.is_file() => return Err(FileError::NotAFile { path: path.to_owned() }),
            _ => {}
        }
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits()).open(path);
        let file = file.map_err(failed)?;
        let watch = || {
            let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
            // Removing a path changes the link count, which is an attribute.
            let changes = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_MOVE_SELF;
            inotify.add_watch(&PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())), changes)?;
            watch_readable(File::from(OwnedFd::from(inotify)))
        };
        let events = watch().map_err(failed)?;
        let position = first_data(&file).map_err(failed)?;
        Ok(Self { path: path.to_owned(), file, events, position, is_in_hole: true })
    }

    /// Copies lines into a writer until the path no longer refers to this file, because it was removed, renamed or
    /// replaced. What programs that still have it open write after that is lost. Changes of parent directories are not
    /// detected.
    ///
    /// # Errors
    /// When reading fails, which is not known to happen; a retry may help.
    ///
    /// # Cancel safety
    /// All bytes that were read have been written: dropping the future loses nothing, and another call resumes.
    pub async fn copy_lines(&mut self, to: &mut LineWriter) -> io::Result<()> {
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            // Looked at before the last read, which then has all that was written until the removal.
            let is_here = self.is_at_path()?;
            while self.copy_part(&mut buffer, to)? {
                // A flood must not starve the other tasks of this thread.
                consume_budget().await;
            }
            if !is_here {
                return Ok(());
            }
            let mut events = [0; EVENT_BUFFER_BYTES];
            self.events.async_io(Interest::READABLE, |mut inotify| inotify.read(&mut events)).await?;
        }
    }

    fn is_at_path(&self) -> io::Result<bool> {
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let this = identity(self.file.metadata()?);
        Ok(fs::symlink_metadata(&self.path).is_ok_and(|found| identity(found) == this))
    }

    /// Copies the next part; false at the end.
    fn copy_part(&mut self, buffer: &mut [u8], to: &mut LineWriter) -> io::Result<bool> {
        let mut read = self.file.read_at(buffer, self.position)?;
        if read == 0 && self.file.metadata()?.len() < self.position {
            // Another program has truncated it.
            self.position = 0;
            read = self.file.read_at(buffer, 0)?;
        }
        if read == 0 {
            return Ok(false);
        }
        let lines = &buffer[..read];
        // The zeros of the block that an earlier reader has read in part.
        let zeros = lines.iter().take_while(|byte| self.is_in_hole && **byte == 0).count();
        self.is_in_hole &= zeros == read;
        to.write_all(&lines[zeros..])?;
        let (from, length) = (self.position, read as u64);
        self.position += length;
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        match fallocate(&self.file, hole, from.cast_signed(), length.cast_signed()) {
            Ok(()) | Err(Errno::EOPNOTSUPP) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// The offset of the first data after a hole at the start.
fn first_data(file: &File) -> io::Result<u64> {
    match lseek(file, 0, Whence::SeekData) {
        Ok(at) => Ok(at.cast_unsigned()),
        // There is none.
        Err(Errno::ENXIO) => Ok(file.metadata()?.len()),
        Err(errno) => Err(errno.into()),
    }
}
