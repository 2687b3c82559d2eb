//! The standard input of a process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::MemfdFlags;

/// The source of a process' standard input.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum StdinSource {
    /// Empty: `/dev/null`.
    #[default]
    Null,
    /// These bytes, from the beginning at each start. The process sees a file, not a pipe.
    Bytes(Arc<[u8]>),
    /// An open file. All starts share its position.
    File(Arc<OwnedFd>),
}

impl From<Vec<u8>> for StdinSource {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl From<File> for StdinSource {
    fn from(file: File) -> Self {
        Self::File(Arc::new(file.into()))
    }
}

impl From<OwnedFd> for StdinSource {
    fn from(fd: OwnedFd) -> Self {
        Self::File(Arc::new(fd))
    }
}

impl fmt::Debug for StdinSource {
    /// Without the bytes, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("Null"),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
            Self::File(file) => f.debug_tuple("File").field(file).finish(),
        }
    }
}

impl StdinSource {
    /// The content that distinguishes it from another source, as far as it can be known.
    pub(super) fn content(&self) -> &[u8] {
        match self {
            Self::Null => b"",
            Self::Bytes(bytes) => bytes,
            Self::File(_) => b"file",
        }
    }

    /// The descriptor for one start.
    pub(super) fn open(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Null => Ok(File::open("/dev/null")?.into()),
            Self::File(file) => file.try_clone(),
            // A file in memory rather than a pipe, which a task would have to write to.
            Self::Bytes(bytes) => {
                let file = rustix::fs::memfd_create("stdin", MemfdFlags::CLOEXEC)?;
                let mut written = 0;
                while written < bytes.len() {
                    // With an offset, so that the child reads from the beginning.
                    written += rustix::io::pwrite(&file, &bytes[written..], written as u64)?;
                }
                Ok(file)
            }
        }
    }
}
