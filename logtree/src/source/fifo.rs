//! FIFOs into which other programs write their logs.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::io::Interest;
use tokio::net::unix::pipe;
use tokio::task::coop::consume_budget;

use crate::LineWriter;
use crate::sys::watch_readable;

/// The default capacity of a FIFO.
const BUFFER_BYTES: usize = 64 << 10;

/// Buffer for inotify events, whose content is ignored.
const EVENT_BUFFER_BYTES: usize = 4 << 10;

/// A FIFO in the file system, open for reading as long as this exists.
///
/// The FIFO is open for writing as well, so reads never end when a writer closes it, and writers never wait for a
/// reader. Two concurrent writers may mix their lines. If a writer dies within a line, the next writer
/// continues that line.
#[derive(Debug)]
pub struct FifoSource {
    path: PathBuf,
    receiver: pipe::Receiver,
}

/// The reason why a FIFO can't be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FifoError {
    /// The FIFO could not be created: check its directory.
    #[error("can't create FIFO {path}")]
    Create {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The path is a link or another kind of file: remove it if it is not needed.
    #[error("{path} exists and is not a FIFO (named pipe): remove it, or configure another path")]
    NotFifo {
        /// The path.
        path: PathBuf,
    },
    /// The FIFO exists but can't be opened: check its owner and mode.
    #[error("can't open FIFO {path}")]
    Open {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl FifoSource {
    /// Opens the FIFO at `path`, and creates it with mode 0600 if it does not exist. Never waits for a
    /// writer.
    ///
    /// # Errors
    /// All of [`FifoError`]; a retry helps once the reported cause is fixed.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO enabled.
    pub fn open(path: &Path) -> Result<FifoSource, FifoError> {
        let owned = || path.to_owned();
        match mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(FifoError::Create { path: owned(), source: errno.into() }),
        }
        // Checked before it is opened, because opening a device can have side effects.
        let kind = fs::symlink_metadata(path)
            .map_err(|source| FifoError::Open { path: owned(), source })?
            .file_type();
        if !kind.is_fifo() {
            return Err(FifoError::NotFifo { path: owned() });
        }
        let receiver = pipe::OpenOptions::new()
            .read_write(true)
            .open_receiver(path)
            .map_err(|source| FifoError::Open { path: owned(), source })?;
        Ok(FifoSource { path: owned(), receiver })
    }

    /// Copies lines from the FIFO into a writer, until the future is dropped.
    ///
    /// # Errors
    /// When reading fails, which is not known to happen; a retry may help.
    ///
    /// # Cancel safety
    /// All bytes read have been written: dropping the future loses nothing, and another call resumes.
    pub async fn copy_lines(&mut self, to: &mut LineWriter) -> io::Result<Infallible> {
        loop {
            copy_until_eof(&self.receiver, to).await?;
        }
    }

    /// Watches the path. The returned future resolves once the path no longer refers to this FIFO, because it
    /// was removed, renamed or replaced by another file. Processes that have this FIFO open still write into
    /// it then; processes that open the path later do not.
    ///
    /// The future also resolves if that happened before the call. Changes of parent directories are not
    /// detected.
    ///
    /// # Errors
    /// When the kernel grants no watch (a user has 128 inotify instances by default); from the future, when
    /// reading events fails.
    ///
    /// *Source:* inotify(7).
    pub fn watch_removal(&self) -> io::Result<impl Future<Output = io::Result<()>> + Send + use<>> {
        let here = self.proc_fd_path();
        let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let fifo_identity = identity(fs::metadata(&here)?);
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // Removing a path changes the link count, which is an attribute.
        inotify.add_watch(&here, AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_MOVE_SELF)?;
        let events = watch_readable(File::from(OwnedFd::from(inotify)))?;
        let path = self.path.clone();
        Ok(async move {
            let mut buffer = [0; EVENT_BUFFER_BYTES];
            while fs::symlink_metadata(&path).is_ok_and(|metadata| identity(metadata) == fifo_identity) {
                events.async_io(Interest::READABLE, |mut events| events.read(&mut buffer)).await?;
            }
            Ok(())
        })
    }

    /// Copies lines from the FIFO into a writer until the last process that has it open for writing closes
    /// it. Use it for a FIFO whose path was removed.
    ///
    /// # Errors
    /// When it can't be opened again, or reading fails; neither is known to happen.
    ///
    /// # Cancel safety
    /// All bytes read have been written; the FIFO is closed.
    pub async fn copy_to_end(self, to: &mut LineWriter) -> io::Result<()> {
        // `self` is a writer, too.
        let receiver = pipe::OpenOptions::new().open_receiver(self.proc_fd_path())?;
        drop(self);
        copy_until_eof(&receiver, to).await
    }

    /// A path to the open FIFO, independent of its path in the file system.
    fn proc_fd_path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.receiver.as_raw_fd()).into()
    }
}

/// Copies until end of file, which comes when no process has the FIFO open for writing.
async fn copy_until_eof(from: &pipe::Receiver, to: &mut LineWriter) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        // A flood must not starve the other tasks of this thread.
        consume_budget().await;
        from.readable().await?;
        match from.try_read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => to.write_all(&buffer[..length])?,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}
