//! A FIFO others write their log to.

use std::convert::Infallible;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use tokio::net::unix::pipe;
use tokio::task::coop::consume_budget;

use crate::LineWriter;

/// The most a FIFO holds by default.
const BUFFER: usize = 64 << 10;

/// A FIFO in the file system that is read for as long as this exists.
///
/// It is open for writing as well, so that it never comes to an end when a writer goes and writers never wait for a
/// reader to come. Two writers at once may mix their lines, and one that dies within a line leaves its beginning to the next.
#[derive(Debug)]
pub struct Fifo {
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
        Ok(Fifo { receiver })
    }

    /// Copies what comes into a writer, until the future is dropped.
    ///
    /// # Errors
    /// When reading fails, which is not known to happen; a retry may help.
    ///
    /// # Cancel safety
    /// What was read has been written: nothing is lost if the future is dropped, and another may go on.
    pub async fn pump(&mut self, to: &mut LineWriter) -> io::Result<Infallible> {
        let mut buffer = vec![0; BUFFER];
        loop {
            // A flood must not keep the other tasks of this thread from running.
            consume_budget().await;
            self.receiver.readable().await?;
            match self.receiver.try_read(&mut buffer) {
                Ok(length) => to.write_all(&buffer[..length])?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}
