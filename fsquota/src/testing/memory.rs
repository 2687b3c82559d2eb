//! The kernel's side of quotas, in memory.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use nodekeel_localstorage::{OpenOutcome, TreeWalk, WalkEvent};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};

use crate::Error;
use crate::error::KernelOperation;
use crate::kernel::{ProjectTag, QuotaKernel, QuotaRecord};
use crate::limits::KernelLimitChange;
use crate::owner::OwnerMark;

/// Device and inode.
type InodeIdentity = (u64, u64);

#[derive(Debug, Default)]
pub(crate) struct MemoryKernel {
    state: Mutex<MemoryState>,
    failures: Mutex<VecDeque<(KernelOperation, io::ErrorKind)>>,
    unfailing: AtomicBool,
}

#[derive(Debug, Default)]
struct MemoryState {
    /// The descriptor prevents reuse of the inode number, and shows when the directory has been removed.
    tagged: HashMap<InodeIdentity, (OwnedFd, ProjectTag)>,
    /// Of tagged directories, and of those that are about to be.
    marks: HashMap<InodeIdentity, (OwnedFd, OwnerMark)>,
    /// Limits in KiB and inodes, by project.
    limits: BTreeMap<u32, (u64, u64)>,
    is_enforcement_off: bool,
}

impl MemoryKernel {
    pub(crate) fn fail_next_call(&self, call: KernelOperation, error: io::ErrorKind) {
        lock_mutex(&self.failures).push_back((call, error));
    }

    #[cfg(test)]
    pub(crate) fn turn_enforcement_off(&self) {
        lock_mutex(&self.state).is_enforcement_off = true;
    }

    pub(crate) fn without_failures<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.unfailing.swap(true, Ordering::Relaxed);
        let result = work();
        self.unfailing.store(before, Ordering::Relaxed);
        result
    }

    fn start_call(&self, call: KernelOperation) -> io::Result<MutexGuard<'_, MemoryState>> {
        let mut failures = lock_mutex(&self.failures);
        if !self.unfailing.load(Ordering::Relaxed)
            && let Some(place) = failures.iter().position(|(failing, _)| *failing == call)
            && let Some((_, error)) = failures.remove(place)
        {
            return Err(error.into());
        }
        drop(failures);
        let mut state = lock_mutex(&self.state);
        let exists = |fd: &OwnedFd| rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_nlink != 0);
        state.tagged.retain(|_, (fd, _)| exists(fd));
        state.marks.retain(|_, (fd, _)| exists(fd));
        Ok(state)
    }
}

fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl QuotaKernel for MemoryKernel {
    fn project_tag(&self, file: BorrowedFd<'_>) -> io::Result<ProjectTag> {
        self.start_call(KernelOperation::ReadProject)?.effective_tag(file)
    }

    fn set_project_tag(&self, file: BorrowedFd<'_>, tag: ProjectTag) -> io::Result<()> {
        let mut state = self.start_call(KernelOperation::WriteProject)?;
        // The descriptor is read for the usage. While it is open, no other inode gets the number.
        let descriptor = rustix::fs::openat(file, ".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        state.tagged.insert(inode_identity(&rustix::fs::fstat(file)?), (descriptor, tag));
        Ok(())
    }

    fn owner_mark(&self, dir: BorrowedFd<'_>) -> io::Result<Option<OwnerMark>> {
        let state = self.start_call(KernelOperation::ReadOwner)?;
        Ok(state.marks.get(&inode_identity(&rustix::fs::fstat(dir)?)).map(|(_, mark)| *mark))
    }

    fn set_owner_mark(&self, dir: BorrowedFd<'_>, mark: Option<OwnerMark>) -> io::Result<()> {
        let mut state = self.start_call(KernelOperation::WriteOwner)?;
        let identity = inode_identity(&rustix::fs::fstat(dir)?);
        let descriptor = rustix::fs::openat(dir, ".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        match mark {
            Some(mark) => drop(state.marks.insert(identity, (descriptor, mark))),
            None => drop(state.marks.remove(&identity)),
        }
        Ok(())
    }

    /// Those of the tree are the directory's; a tagged directory below it counts for its own project.
    fn count_tree(&self, dir: BorrowedFd<'_>, project: u32, _: SystemTime) -> Result<u64, Error> {
        let failed = KernelOperation::InspectDirectory;
        let state = self.start_call(failed).map_err(failed.into_error())?;
        let mut record = QuotaRecord::default();
        if state.effective_tag(dir).map_err(failed.into_error())?.project == project {
            state.count_usage(dir, &mut record).map_err(failed.into_error())?;
        }
        Ok(record.inodes)
    }

    fn is_enforced(&self) -> io::Result<bool> {
        self.start_call(KernelOperation::ReadEnforcement).map(|state| !state.is_enforcement_off)
    }

    fn quota_record(&self, project: u32) -> io::Result<QuotaRecord> {
        self.start_call(KernelOperation::ReadLimits)?.quota_record(project)
    }

    fn set_limits(&self, project: u32, change: KernelLimitChange) -> io::Result<()> {
        let mut state = self.start_call(KernelOperation::WriteLimits)?;
        let limits = state.limits.entry(project).or_default();
        *limits = (change.kib.unwrap_or(limits.0), change.inodes.unwrap_or(limits.1));
        state.limits.retain(|_, limits| *limits != (0, 0));
        Ok(())
    }

    fn next_record(&self, from: u32) -> io::Result<Option<(u32, QuotaRecord)>> {
        let state = self.start_call(KernelOperation::ReadLimits)?;
        // As the kernel does for the number that is not a project.
        if from == u32::MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let limited = state.limits.range(from..).next().map(|(project, _)| *project);
        let tagged =
            state.tagged.values().map(|(_, tag)| tag.project).filter(|number| *number >= from.max(1));
        let first = limited.into_iter().chain(tagged).min();
        first.map(|project| Ok((project, state.quota_record(project)?))).transpose()
    }

    fn lock_allocation(&self, _: Instant) -> Result<(), Error> {
        // The mutex of the engine is enough: no other process shares this memory.
        let operation = KernelOperation::LockAllocation;
        self.start_call(operation).map(drop).map_err(operation.into_error())
    }

    fn unlock_allocation(&self) {}

    fn flush_removed_inodes(&self) -> io::Result<()> {
        self.start_call(KernelOperation::FlushRemoved).map(drop)
    }
}

impl MemoryState {
    /// The tag of the directory, or of the nearest directory above it that has one.
    fn effective_tag(&self, file: BorrowedFd<'_>) -> io::Result<ProjectTag> {
        let mut stat = rustix::fs::fstat(file)?;
        if stat.st_nlink == 0 {
            // It is no longer in any directory, and its tag has been dropped.
            return Ok(ProjectTag::default());
        }
        let mut at = rustix::fs::openat(file, ".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        loop {
            if let Some((_, tag)) = self.tagged.get(&inode_identity(&stat)) {
                return Ok(*tag);
            }
            let above = rustix::fs::openat(&at, "..", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            let Ok(above) = above else { return Ok(ProjectTag::default()) };
            let stat_above = rustix::fs::fstat(&above)?;
            // `..` of the root is the root, and another file system has separate projects.
            if inode_identity(&stat_above) == inode_identity(&stat) || stat_above.st_dev != stat.st_dev {
                return Ok(ProjectTag::default());
            }
            (at, stat) = (above, stat_above);
        }
    }

    fn quota_record(&self, project: u32) -> io::Result<QuotaRecord> {
        let (kib_limit, inode_limit) = self.limits.get(&project).copied().unwrap_or_default();
        let mut record = QuotaRecord { kib_limit, inode_limit, ..QuotaRecord::default() };
        for (fd, _) in self.tagged.values().filter(|(_, tag)| tag.project == project) {
            self.count_usage(fd.as_fd(), &mut record)?;
        }
        Ok(record)
    }

    fn count_usage(&self, dir: BorrowedFd<'_>, record: &mut QuotaRecord) -> io::Result<()> {
        add_inode(&rustix::fs::fstat(dir)?, record);
        let mut walk = TreeWalk::open(dir)?;
        while let Some(event) = walk.next_event()? {
            let (WalkEvent::Entry { name, .. } | WalkEvent::Directory { name }) = event else { continue };
            // It may have been removed since.
            let Ok(stat) = rustix::fs::statat(walk.dir(), &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                add_inode(&stat, record);
            } else if !self.tagged.contains_key(&inode_identity(&stat))
                && let Ok(OpenOutcome::Opened(below)) = walk.open_dir(&name)
            {
                add_inode(&stat, record);
                walk.enter(&name, below)?;
            }
        }
        Ok(())
    }
}

fn inode_identity(stat: &Stat) -> InodeIdentity {
    (stat.st_dev, stat.st_ino)
}

fn add_inode(stat: &Stat, record: &mut QuotaRecord) {
    // *Source:* stat(2): st_blocks counts 512-byte units.
    record.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
    record.inodes += 1;
}
