//! The real thing: in a guest, on XFS and on ext4, whose kernel enforces limits.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use nodekeel_fsquota::{Bytes, Change, Inodes, Limit, ProjectQuota, QuotaSetter as _, Status};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use testbed::guest::inside::{Disk, FileSystem, Mounted};

mod bounds;
mod contract;
mod lacks;
mod together;
mod trees;

/// A file system with limits that bind, on a disk of its own.
pub(crate) struct Place {
    pub(crate) kind: FileSystem,
    /// Dropped before what is mounted, which it holds open.
    pub(crate) quota: ProjectQuota,
    pub(crate) mounted: Mounted,
}

impl Place {
    pub(crate) fn new(kind: FileSystem) -> Self {
        let mounted = Disk::take().unwrap().mount(kind, "prjquota").unwrap();
        let quota = ProjectQuota::open(mounted.path()).unwrap();
        Self { kind, mounted, quota }
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.mounted.path().join(below)
    }

    pub(crate) fn make(&self, name: &str) -> File {
        fs::create_dir(self.path(name)).unwrap();
        self.open(name)
    }

    pub(crate) fn open(&self, name: &str) -> File {
        File::open(self.path(name)).unwrap()
    }

    /// A new directory with limits.
    pub(crate) fn limited(&self, name: &str, change: Change) -> Status {
        self.quota.set(self.make(name).as_fd(), change).unwrap()
    }

    pub(crate) fn status(&self, name: &str) -> Option<Status> {
        self.quota.status(self.open(name).as_fd()).unwrap()
    }

    /// What a limit's refusal looks like here.
    pub(crate) fn refusal(&self) -> i32 {
        if self.kind == FileSystem::Xfs { libc::ENOSPC } else { libc::EDQUOT }
    }
}

/// On XFS, then on ext4.
pub(crate) fn on_both(test: impl Fn(Place)) {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        eprintln!("on {kind:?}");
        test(Place::new(kind));
    }
}

pub(crate) fn at(bytes: u64, inodes: u64) -> Change {
    Change { bytes: Limit::At(Bytes(bytes)), inodes: Limit::At(Inodes(inodes)) }
}

/// Does it in a thread without a capability; of the others, those stay that the caller has.
pub(crate) fn without<T: Send>(capability: CapabilitySet, work: impl FnOnce() -> T + Send) -> T {
    let dropping = || {
        let mut sets = capabilities(None).unwrap();
        sets.effective -= capability;
        set_capabilities(None, sets).unwrap();
        work()
    };
    std::thread::scope(|scope| scope.spawn(dropping).join().unwrap())
}

/// Does it as somebody whom limits bind: ext4 lets the others exceed them.
pub(crate) fn bound<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    without(CapabilitySet::SYS_RESOURCE, work)
}

/// Writes to the file until that fails; how much was written and why it ended.
pub(crate) fn fill(path: &Path) -> (u64, io::Error) {
    use std::io::Write as _;
    let mut written = 0;
    // On a full XFS there is no room for a name either.
    let mut file = match File::create(path) {
        Ok(file) => file,
        Err(error) => return (written, error),
    };
    loop {
        // Without the sync, delayed allocation would tell later.
        match file.write_all(&[7; 4096]).and_then(|()| file.sync_data()) {
            Ok(()) => written += 4096,
            Err(error) => return (written, error),
        }
    }
}

/// Makes files until that fails; how many were made and why it ended.
pub(crate) fn crowd(directory: &Path) -> (u64, io::Error) {
    let mut made = 0;
    loop {
        match File::create(directory.join(made.to_string())) {
            Ok(_) => made += 1,
            Err(error) => return (made, error),
        }
    }
}
