//! Limits that only files know, for crash tests where the kernel has no quotas: they bind nobody, and leak as the kernel's would.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::PathBuf;

use nodekeel_fsquota::{
    Bytes, Call, Change, Error, Inodes, Limit, Limits, ProjectId, QuotaSetter, Status, Usage,
};

/// The directory of the files: one for each project, which is called as the inode of its directory.
const BOOKS: &str = "PROVISIONERD_BOOKS";

/// How many bytes a volume can have at most before there is no room for it.
const ROOM: &str = "PROVISIONERD_ROOM";

/// The books, and how much there is to give.
#[derive(Debug)]
pub(crate) struct Books {
    directory: PathBuf,
    room: Option<Bytes>,
}

impl Books {
    /// Those that the environment asks for.
    pub(crate) fn find() -> Option<Self> {
        let room = std::env::var(ROOM).ok().and_then(|text| text.parse().ok());
        Some(Self { directory: std::env::var_os(BOOKS)?.into(), room })
    }

    fn page(&self, project: ProjectId) -> PathBuf {
        self.directory.join(project.to_string())
    }

    fn read(&self, project: ProjectId) -> Option<Limits> {
        let text = fs::read_to_string(self.page(project)).ok()?;
        let (bytes, inodes) = text.split_once(' ')?;
        let (bytes, inodes) = (bytes.parse().ok().map(Bytes), inodes.parse().ok().map(Inodes));
        Some(Limits { bytes, inodes })
    }
}

fn failed(source: io::Error) -> Error {
    Error::Kernel { call: Call::WriteLimits, source }
}

fn project(dir: BorrowedFd<'_>) -> Result<ProjectId, Error> {
    let stat = rustix::fs::fstat(dir).map_err(|errno| failed(errno.into()))?;
    let number = u32::try_from(stat.st_ino & 0x7fff_ffff).ok().and_then(ProjectId::new);
    number.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))
}

/// What is directly in the directory, and the directory.
fn entries(dir: BorrowedFd<'_>) -> u64 {
    fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd())).map_or(1, |entries| entries.count() as u64 + 1)
}

fn changed<T>(change: Limit<T>, old: Option<T>) -> Option<T> {
    match change {
        Limit::Keep => old,
        Limit::Unlimited => None,
        Limit::At(limit) => Some(limit),
    }
}

impl QuotaSetter for Books {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        let project = project(dir)?;
        let old = self.read(project).unwrap_or_default();
        let limits =
            Limits { bytes: changed(change.bytes, old.bytes), inodes: changed(change.inodes, old.inodes) };
        if self.room.is_some_and(|room| limits.bytes.is_some_and(|bytes| bytes > room)) {
            return Err(failed(io::ErrorKind::StorageFull.into()));
        }
        let (bytes, inodes) = (limits.bytes.unwrap_or(Bytes(0)), limits.inodes.unwrap_or(Inodes(0)));
        fs::write(self.page(project), format!("{} {}", bytes.0, inodes.0)).map_err(failed)?;
        self.status(dir)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        let project = project(dir)?;
        let usage = Usage { bytes: Bytes(0), inodes: Inodes(entries(dir)) };
        Ok(self.read(project).map(|limits| Status { project, limits, usage }))
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.release(project(dir)?)
    }

    fn release(&self, project: ProjectId) -> Result<(), Error> {
        match fs::remove_file(self.page(project)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            _ => Ok(()),
        }
    }
}
