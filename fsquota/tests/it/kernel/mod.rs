//! Tests in a guest whose kernel enforces limits, on XFS and on ext4.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use nodekeel_fsquota::{
    Bytes, Error, Inodes, LimitChange, ProjectQuota, QuotaChange, QuotaSetter as _, QuotaStatus, TreeSummary,
};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use testbed::guest::disk::{FileSystem, GuestDisk, MountedDisk};

mod audit;
mod concurrency;
mod contract;
mod enforcement;
mod open_errors;
mod ownership;
mod power_cut;
mod trees;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const MARK: &str = "trusted.nodekeel.project";

/// A file system on a dedicated disk that enforces limits.
pub(crate) struct QuotaFixture {
    pub(crate) kind: FileSystem,
    /// Dropped before `mounted`, which it holds open.
    pub(crate) quota: ProjectQuota,
    pub(crate) mounted: MountedDisk,
}

impl QuotaFixture {
    pub(crate) fn new(kind: FileSystem) -> Self {
        let mounted = GuestDisk::acquire().unwrap().format_and_mount(kind, "prjquota").unwrap();
        let quota = ProjectQuota::open(mounted.mount_point()).unwrap();
        Self { kind, mounted, quota }
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.mounted.mount_point().join(below)
    }

    pub(crate) fn create_dir(&self, name: &str) -> File {
        fs::create_dir(self.path(name)).unwrap();
        self.open_dir(name)
    }

    pub(crate) fn open_dir(&self, name: &str) -> File {
        File::open(self.path(name)).unwrap()
    }

    /// A new directory with limits.
    pub(crate) fn create_limited_dir(&self, name: &str, change: QuotaChange) -> QuotaStatus {
        self.set(&self.create_dir(name), change).unwrap()
    }

    pub(crate) fn set(&self, dir: &File, change: QuotaChange) -> Result<QuotaStatus, Error> {
        self.quota.set_limits(dir.as_fd(), change)
    }

    pub(crate) fn set_tree(&self, dir: &File, change: QuotaChange) -> (QuotaStatus, TreeSummary) {
        self.quota.set_limits_recursive(dir.as_fd(), change).unwrap()
    }

    pub(crate) fn read_status(&self, name: &str) -> Option<QuotaStatus> {
        self.quota.read_status(self.open_dir(name).as_fd()).unwrap()
    }

    /// The errno of a write beyond a limit.
    pub(crate) fn limit_errno(&self) -> i32 {
        if self.kind == FileSystem::Xfs { libc::ENOSPC } else { libc::EDQUOT }
    }
}

/// Runs the test on XFS, then on ext4.
pub(crate) fn on_xfs_and_ext4(test: impl Fn(QuotaFixture)) {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        eprintln!("on {kind:?}");
        test(QuotaFixture::new(kind));
    }
}

pub(crate) fn both_limits(bytes: u64, inodes: u64) -> QuotaChange {
    QuotaChange { bytes: LimitChange::Set(Bytes(bytes)), inodes: LimitChange::Set(Inodes(inodes)) }
}

/// Runs the work in a thread without one capability; it keeps the caller's others.
pub(crate) fn without_capability<T: Send>(capability: CapabilitySet, work: impl FnOnce() -> T + Send) -> T {
    let dropping = || {
        let mut sets = capabilities(None).unwrap();
        sets.effective -= capability;
        set_capabilities(None, sets).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(dropping).join().unwrap())
}

/// Runs the work without CAP_SYS_RESOURCE, with which ext4 lets processes exceed limits.
pub(crate) fn without_sys_resource<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    without_capability(CapabilitySet::SYS_RESOURCE, work)
}

/// Writes to the file until that fails; returns the number of written bytes and the error.
pub(crate) fn write_until_error(path: &Path) -> (u64, io::Error) {
    use std::io::Write as _;
    let mut written = 0;
    // A full XFS has no space for a name either.
    let mut file = match File::create(path) {
        Ok(file) => file,
        Err(error) => return (written, error),
    };
    loop {
        // Without the sync, delayed allocation would report the error later.
        match file.write_all(&[7; 4096]).and_then(|()| file.sync_data()) {
            Ok(()) => written += 4096,
            Err(error) => return (written, error),
        }
    }
}

/// Creates files until that fails; returns their number and the error.
pub(crate) fn create_files_until_error(directory: &Path) -> (u64, io::Error) {
    let mut created = 0;
    loop {
        match File::create(directory.join(created.to_string())) {
            Ok(_) => created += 1,
            Err(error) => return (created, error),
        }
    }
}
