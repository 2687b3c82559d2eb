//! Quotas kept in files, for crash tests on kernels without quotas: not enforced, but they leak as those of
//! the kernel do.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::PathBuf;

use nodekeel_fsquota::{
    Bytes, Error, Inodes, KernelOperation, LimitChange, ProjectId, QuotaChange, QuotaLimits, QuotaSetter,
    QuotaStatus, QuotaUsage,
};
use rustix::fs::{AtFlags, StatxFlags, statx};

/// The directory of the files: one for each project.
const DIRECTORY_VARIABLE: &str = "PROVISIONERD_BOOKS";

/// Maximum byte limit of a volume; a larger one fails as on a full disk.
const MAX_BYTES_VARIABLE: &str = "PROVISIONERD_ROOM";

/// Quotas in files, with a maximum byte limit.
#[derive(Debug)]
pub(crate) struct FileQuota {
    directory: PathBuf,
    max_bytes: Option<Bytes>,
}

impl FileQuota {
    /// The quotas that the environment configures.
    pub(crate) fn from_env() -> Option<Self> {
        let max_bytes = std::env::var(MAX_BYTES_VARIABLE).ok().and_then(|text| text.parse().ok());
        Some(Self { directory: std::env::var_os(DIRECTORY_VARIABLE)?.into(), max_bytes })
    }

    fn limits_file(&self, project: ProjectId) -> PathBuf {
        self.directory.join(project.to_string())
    }

    fn read_limits(&self, project: ProjectId) -> Option<QuotaLimits> {
        let text = fs::read_to_string(self.limits_file(project)).ok()?;
        let (bytes, inodes) = text.split_once(' ')?;
        let (bytes, inodes) = (bytes.parse().ok().map(Bytes), inodes.parse().ok().map(Inodes));
        Some(QuotaLimits { bytes, inodes })
    }
}

fn kernel_error(source: io::Error) -> Error {
    Error::Kernel { call: KernelOperation::WriteLimits, source }
}

fn project_id(dir: BorrowedFd<'_>) -> Result<ProjectId, Error> {
    let wanted = StatxFlags::INO | StatxFlags::BTIME;
    let stat = statx(dir, c"", AtFlags::EMPTY_PATH, wanted).map_err(|errno| kernel_error(errno.into()))?;
    // The directory stands for the project that the kernel would assign. Its inode has a new directory as soon as it is
    // erased, and before its project is released; the kernel's number has none until then.
    let number = stat.stx_ino ^ (u64::from(stat.stx_btime.tv_nsec) << 1);
    let number = u32::try_from(number & 0x7fff_ffff).ok().and_then(ProjectId::new);
    number.ok_or_else(|| kernel_error(io::ErrorKind::InvalidData.into()))
}

/// The entries of the directory, plus the directory itself.
fn count_inodes(dir: BorrowedFd<'_>) -> u64 {
    fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd())).map_or(1, |entries| entries.count() as u64 + 1)
}

fn apply_change<T>(change: LimitChange<T>, old: Option<T>) -> Option<T> {
    match change {
        LimitChange::Keep => old,
        LimitChange::Unlimited => None,
        LimitChange::Set(limit) => Some(limit),
    }
}

impl QuotaSetter for FileQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        let project = project_id(dir)?;
        let old = self.read_limits(project).unwrap_or_default();
        let limits = QuotaLimits {
            bytes: apply_change(change.bytes, old.bytes),
            inodes: apply_change(change.inodes, old.inodes),
        };
        if self.max_bytes.is_some_and(|max| limits.bytes.is_some_and(|bytes| bytes > max)) {
            return Err(kernel_error(io::ErrorKind::StorageFull.into()));
        }
        // A missing limit is a word, so that it is read as one.
        let text = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
        let (bytes, inodes) = (limits.bytes.map(|bytes| bytes.0), limits.inodes.map(|inodes| inodes.0));
        let line = format!("{} {}", text(bytes), text(inodes));
        fs::write(self.limits_file(project), line).map_err(kernel_error)?;
        self.read_status(dir)?.ok_or_else(|| kernel_error(io::ErrorKind::NotFound.into()))
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        let project = project_id(dir)?;
        let usage = QuotaUsage { bytes: Bytes(0), inodes: Inodes(count_inodes(dir)) };
        Ok(self.read_limits(project).map(|limits| QuotaStatus { project, limits, usage }))
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.release_project(project_id(dir)?)
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        match fs::remove_file(self.limits_file(project)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(kernel_error(error)),
            _ => Ok(()),
        }
    }
}
