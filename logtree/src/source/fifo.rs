//! A FIFO others write their log to.

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
use crate::sys::watch;

/// The most a FIFO holds by default.
const BUFFER: usize = 64 << 10;

/// What takes some events of inotify, of which only that they came is of interest.
const EVENTS: usize = 4 << 10;

/// A FIFO in the file system that is read for as long as this exists.
///
/// It is open for writing as well, so that it never comes to an end when a writer goes and writers never wait for a
/// reader to come. Two writers at once may mix their lines, and one that dies within a line leaves its beginning to the next.
#[derive(Debug)]
pub struct Fifo {
    path: PathBuf,
    receiver: pipe::Receiver,
}

/// Why a FIFO cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FifoError {
    /// It could not be made: look at its directory.
    #[error("make the fifo {path}")]
    Make {
        /// Where it should be.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// Something else is there, or a link: remove it, if it is not wanted.
    #[error("{path} is not a fifo")]
    NotFifo {
        /// Where the FIFO should be.
        path: PathBuf,
    },
    /// It is there but cannot be opened: look at its owner and mode.
    #[error("open the fifo {path}")]
    Open {
        /// Where it is.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
}

impl Fifo {
    /// Opens the FIFO at `path`, making one its owner alone may use if nothing is there. Never waits for a writer.
    ///
    /// # Errors
    /// All of [`FifoError`]; a retry helps once the cause named is gone.
    ///
    /// # Panics
    /// Outside of a tokio runtime with IO enabled.
    pub fn open(path: &Path) -> Result<Fifo, FifoError> {
        let owned = || path.to_owned();
        match mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(FifoError::Make { path: owned(), source: errno.into() }),
        }
        // Checked before it is opened: to open a device can have effects.
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
        Ok(Fifo { path: owned(), receiver })
    }

    /// Copies what comes into a writer, until the future is dropped.
    ///
    /// # Errors
    /// When reading fails, which is not known to happen; a retry may help.
    ///
    /// # Cancel safety
    /// What was read has been written: nothing is lost if the future is dropped, and another may go on.
    pub async fn pump(&mut self, to: &mut LineWriter) -> io::Result<Infallible> {
        loop {
            copy(&self.receiver, to).await?;
        }
    }

    /// Watches the name; what is returned resolves once it no longer leads here, since it was removed, renamed or taken
    /// by another file. Whoever has this FIFO open still writes here then, and whoever comes later does not.
    ///
    /// It also resolves where that was so before the call. What becomes of the directories above is not noticed.
    ///
    /// # Errors
    /// When the kernel gives no watch: a user has 128 of them by default; or from the future, when it tells nothing more.
    ///
    /// *Source:* inotify(7).
    pub fn removed(&self) -> io::Result<impl Future<Output = io::Result<()>> + Send + use<>> {
        let here = self.here();
        let number = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
        let own = number(fs::metadata(&here)?);
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // A name that goes changes the count of names, which is an attribute.
        inotify.add_watch(&here, AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_MOVE_SELF)?;
        let events = watch(File::from(OwnedFd::from(inotify)))?;
        let path = self.path.clone();
        Ok(async move {
            let mut buffer = [0; EVENTS];
            while fs::symlink_metadata(&path).is_ok_and(|metadata| number(metadata) == own) {
                events.async_io(Interest::READABLE, |mut events| events.read(&mut buffer)).await?;
            }
            Ok(())
        })
    }

    /// Copies what comes into a writer until nobody has the FIFO open for writing any more: the end of one whose name is
    /// gone.
    ///
    /// # Errors
    /// When it can't be opened again, or reading fails; neither is known to happen.
    ///
    /// # Cancel safety
    /// What was read has been written; the FIFO is closed.
    pub async fn drain(self, to: &mut LineWriter) -> io::Result<()> {
        // This one is a writer itself.
        let receiver = pipe::OpenOptions::new().open_receiver(self.here())?;
        drop(self);
        copy(&receiver, to).await
    }

    /// Where it is whatever its name leads to.
    fn here(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.receiver.as_raw_fd()).into()
    }
}

/// Copies to the end, which is where nobody has it open for writing.
async fn copy(from: &pipe::Receiver, to: &mut LineWriter) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        // A flood must not keep the other tasks of this thread from running.
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
