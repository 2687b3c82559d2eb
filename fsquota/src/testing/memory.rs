//! The kernel's part, in maps.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};

use crate::error::Call;
use crate::kernel::{Kernel, Record, Tag};
use crate::limits::KernelChange;

/// Device and inode.
type Identity = (u64, u64);

#[derive(Debug, Default)]
pub(crate) struct Memory {
    state: Mutex<State>,
    failures: Mutex<VecDeque<(Call, io::ErrorKind)>>,
    unfailing: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The descriptor keeps the inode's number from being used again, and tells when the directory has been removed.
    tagged: HashMap<Identity, (OwnedFd, Tag)>,
    /// KiB and inodes.
    limits: BTreeMap<u32, (u64, u64)>,
}

impl Memory {
    pub(crate) fn fail(&self, call: Call, error: io::ErrorKind) {
        lock(&self.failures).push_back((call, error));
    }

    pub(crate) fn without_failures<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = self.unfailing.swap(true, Ordering::Relaxed);
        let result = work();
        self.unfailing.store(before, Ordering::Relaxed);
        result
    }

    fn begin(&self, call: Call) -> io::Result<MutexGuard<'_, State>> {
        let mut failures = lock(&self.failures);
        if !self.unfailing.load(Ordering::Relaxed)
            && let Some(place) = failures.iter().position(|(failing, _)| *failing == call)
            && let Some((_, error)) = failures.remove(place)
        {
            return Err(error.into());
        }
        drop(failures);
        let mut state = lock(&self.state);
        state.tagged.retain(|_, (fd, _)| rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_nlink != 0));
        Ok(state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kernel for Memory {
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag> {
        self.begin(Call::ReadProject)?.tag(file)
    }

    fn set_tag(&self, file: BorrowedFd<'_>, tag: Tag) -> io::Result<()> {
        let mut state = self.begin(Call::WriteProject)?;
        let held = rustix::fs::openat(file, ".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        state.tagged.insert(identity(&rustix::fs::fstat(file)?), (held, tag));
        Ok(())
    }

    fn record(&self, project: u32) -> io::Result<Record> {
        self.begin(Call::ReadLimits)?.record(project)
    }

    fn set_limits(&self, project: u32, change: KernelChange) -> io::Result<()> {
        let mut state = self.begin(Call::WriteLimits)?;
        let limits = state.limits.entry(project).or_default();
        *limits = (change.kib.unwrap_or(limits.0), change.inodes.unwrap_or(limits.1));
        state.limits.retain(|_, limits| *limits != (0, 0));
        Ok(())
    }

    fn next(&self, from: u32) -> io::Result<Option<(u32, Record)>> {
        let state = self.begin(Call::ReadLimits)?;
        let limited = state.limits.range(from..).next().map(|(project, _)| *project);
        let tagged =
            state.tagged.values().map(|(_, tag)| tag.project).filter(|number| *number >= from.max(1));
        let first = limited.into_iter().chain(tagged).min();
        first.map(|project| Ok((project, state.record(project)?))).transpose()
    }

    fn lock(&self) -> io::Result<()> {
        // The engine's own lock is enough: nobody else can see this memory.
        self.begin(Call::Lock).map(drop)
    }

    fn unlock(&self) {}

    fn settle(&self) -> io::Result<()> {
        self.begin(Call::Settle).map(drop)
    }
}

impl State {
    /// Its own, or that of the nearest directory above it that has one.
    fn tag(&self, file: BorrowedFd<'_>) -> io::Result<Tag> {
        let mut stat = rustix::fs::fstat(file)?;
        if stat.st_nlink == 0 {
            // It is in no directory any more, and its own tag has been let go of.
            return Ok(Tag::default());
        }
        let mut at = rustix::fs::openat(file, ".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        loop {
            if let Some((_, tag)) = self.tagged.get(&identity(&stat)) {
                return Ok(*tag);
            }
            let above = rustix::fs::openat(&at, "..", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            let Ok(above) = above else { return Ok(Tag::default()) };
            let stat_above = rustix::fs::fstat(&above)?;
            // The root is above itself, and another file system has projects of its own.
            if identity(&stat_above) == identity(&stat) || stat_above.st_dev != stat.st_dev {
                return Ok(Tag::default());
            }
            (at, stat) = (above, stat_above);
        }
    }

    fn record(&self, project: u32) -> io::Result<Record> {
        let (kib_limit, inode_limit) = self.limits.get(&project).copied().unwrap_or_default();
        let mut record = Record { kib_limit, inode_limit, ..Record::default() };
        for (fd, _) in self.tagged.values().filter(|(_, tag)| tag.project == project) {
            self.count(fd.as_fd(), &mut record)?;
        }
        Ok(record)
    }

    fn count(&self, dir: BorrowedFd<'_>, record: &mut Record) -> io::Result<()> {
        add(&rustix::fs::fstat(dir)?, record);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut entries = Dir::new(rustix::fs::openat(dir, ".", flags, Mode::empty())?)?;
        while let Some(entry) = entries.read() {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            // It may have been removed since.
            let Ok(stat) = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                add(&stat, record);
            } else if !self.tagged.contains_key(&identity(&stat))
                && let Ok(below) = rustix::fs::openat(dir, name, flags, Mode::empty())
            {
                self.count(below.as_fd(), record)?;
            }
        }
        Ok(())
    }
}

fn identity(stat: &Stat) -> Identity {
    (stat.st_dev, stat.st_ino)
}

fn add(stat: &Stat, record: &mut Record) {
    // *Source:* stat(2): st_blocks counts 512-byte units.
    record.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
    record.inodes += 1;
}
