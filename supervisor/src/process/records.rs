//! The directory in which a supervisor records the processes that it starts, so that its next start finds them.
//!
//! ```text
//! <dir>                         locked while the supervisor is running
//! ├── host-2fff-3fffff          identifies its processes by the part that all their marks share
//! ├── kept-2bff…01              one kept process, and its standard output and error (FIFOs):
//! ├── kept-2bff…01.stdout
//! └── kept-2bff…01.stderr
//! ```
//!
//! A record is replaced as a whole, and written before the processes that it identifies exist. A directory or a record
//! that another user owns or can write to is not believed.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::leftovers::{self, LeftoverReport};
use super::mark::{HostId, ProcessMark};
use super::private_dir;
use super::procfs;
use super::record::{BootId, HostRecord, KeptRecord, MAX_RECORD_BYTES, Record};

/// A directory in which a supervisor records the processes that it starts.
///
/// When the program is killed, the next supervisor with this directory ends the descendants of those processes,
/// also where no cgroups are available, before it starts anything; it waits up to a second for their exit. It
/// signals only processes of the same boot and PID namespace that are in a recorded cgroup; or that carry the recorded
/// mark, are not older than the killed program, and have no user but one as which it started processes; or that descend
/// from one of these that is running. It logs others with the mark, and leaves them alone. Every process can take a mark, but by that only has itself ended. It logs each of them by pid and name, and reports it as
/// [`RunnableChange::LeftoverEnded`](crate::RunnableChange::LeftoverEnded).
///
/// Processes that are [kept](super::Process::keep) stay, and are adopted by the runnable with the same DN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessRecords {
    dir: PathBuf,
    kept: Vec<Arc<str>>,
}

impl ProcessRecords {
    /// An existing directory, for one supervisor at a time; its files should not outlive the host's boot, but may.
    /// It must belong to this program's user, and no other may be able to write to it.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), kept: Vec::new() }
    }

    /// The DNs at which processes that an earlier program kept will be adopted. Those of other DNs end at the start.
    /// Default: none.
    #[must_use]
    pub fn expect_kept<Dn: Into<Arc<str>>>(mut self, dns: impl IntoIterator<Item = Dn>) -> Self {
        self.kept.extend(dns.into_iter().map(Into::into));
        self
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn expects(&self, dn: &str) -> bool {
        self.kept.iter().any(|known| **known == *dn)
    }
}

/// The reason why processes that an earlier program left behind may still run: see
/// [`Supervisor::record_problems`](crate::Supervisor::record_problems).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordProblem {
    /// The directory can't be used: none of the processes that it records ends, no process is kept, and none that this
    /// program leaves behind ends at the next start. Correct it, and start the program again.
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A record can't be read, or believed: the processes that it identifies keep running. End them, then remove the file.
    Record {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

/// The record directory of a running host.
#[derive(Debug)]
pub(super) struct HostRecords {
    path: PathBuf,
    /// The directory. Its lock shows other supervisors that this host is running.
    dir: OwnedFd,
    boot: BootId,
    host_file: String,
    host: Mutex<HostRecord>,
    /// The kept processes that no run has adopted yet, by DN.
    unclaimed: Mutex<HashMap<String, KeptRecord>>,
    /// Held while one of them is being ended, so that none is adopted at its end.
    ending: Mutex<()>,
}

impl HostRecords {
    /// Locks the directory, ends the leftovers that it records, and records this host. Returns a report of these
    /// leftovers, too.
    ///
    /// # Errors
    /// The directory can't be used; the text names the reason.
    pub(super) fn open(wanted: &ProcessRecords, host_id: HostId) -> io::Result<(Self, LeftoverReport)> {
        let dir = private_dir::open(&wanted.dir)?;
        // The kernel releases the lock when this program ends, also by a kill.
        rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => io::Error::other("another supervisor uses it"),
            errno => errno.into(),
        })?;
        let boot = current_boot()?;
        let start = procfs::read_stat(procfs::own_pid())?.start;
        let users = [rustix::process::geteuid().as_raw()].into();
        let host = HostRecord { boot: boot.clone(), host_id, start, users };
        let records = Self {
            path: wanted.dir.clone(),
            dir,
            boot,
            host_file: format!("host-{host_id}"),
            host: Mutex::new(host.clone()),
            unclaimed: Mutex::default(),
            ending: Mutex::default(),
        };
        let leftovers = leftovers::end_recorded(&records, wanted)?;
        // Before anything is started: a kill from here on leaves a record of this host.
        records.write(&records.host_file, &Record::Host(host))?;
        Ok((records, leftovers))
    }

    /// Records that a process is about to be started as this user.
    pub(super) fn add_user(&self, uid: u32) -> io::Result<()> {
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        if host.users.insert(uid) {
            self.write(&self.host_file, &Record::Host(host.clone()))
                .inspect_err(|_| _ = host.users.remove(&uid))?;
        }
        Ok(())
    }

    pub(super) fn boot(&self) -> &BootId {
        &self.boot
    }

    /// Returns whether a kept process of this DN waits for its adoption.
    pub(super) fn has_unclaimed(&self, dn: &str) -> bool {
        self.lock().contains_key(dn)
    }

    pub(super) fn claim(&self, dn: &str) -> Option<KeptRecord> {
        let _none_is_ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        self.lock().remove(dn)
    }

    pub(super) fn add_unclaimed(&self, kept: KeptRecord) {
        self.lock().insert(kept.dn.clone(), kept);
    }

    /// Ends the kept process of a DN that no run has adopted, if there is one. Blocks until it has exited, at most a
    /// second; one that takes longer still waits for its adoption.
    pub(super) fn end_unclaimed(&self, dn: &str) {
        let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let unclaimed = self.lock().get(dn).cloned();
        if unclaimed.is_some_and(|kept| leftovers::end_kept(self, &kept)) {
            self.lock().remove(dn);
        }
    }

    /// Ends the kept processes of all DNs that no run has adopted, as [`end_unclaimed`](Self::end_unclaimed).
    pub(super) fn end_all_unclaimed(&self) {
        let dns: Vec<_> = self.lock().keys().cloned().collect();
        dns.iter().for_each(|dn| self.end_unclaimed(dn));
    }

    /// The host has ended all its processes.
    pub(super) fn remove_host(&self) {
        self.remove(&self.host_file);
    }

    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(super) fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// The files in the directory that are records, by name.
    pub(super) fn read_all(&self) -> io::Result<Vec<(String, Result<Record, String>)>> {
        let mut found = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name.ends_with(NEW_SUFFIX) {
                // Its writer was killed: what it would have replaced still holds, or nothing that it records exists.
                self.remove(name);
            } else if (name.starts_with("host-") || name.starts_with(KEPT_PREFIX)) && !name.contains('.') {
                found.push((name.to_owned(), self.read(name)?));
            }
        }
        // readdir(3) has no order: of two records of one DN, the same one must count each time.
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(found)
    }

    fn read(&self, name: &str) -> io::Result<Result<Record, String>> {
        // A FIFO would keep this waiting for a writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.dir, name, flags, Mode::empty()) {
            Err(Errno::LOOP) => return Ok(Err("it is a symbolic link".to_owned())),
            opened => opened?,
        };
        let (stat, own) = (rustix::fs::fstat(&file)?, rustix::process::geteuid().as_raw());
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(Err("it is no regular file".to_owned()));
        }
        if stat.st_uid != own || stat.st_mode & 0o022 != 0 {
            let (owner, mode) = (stat.st_uid, stat.st_mode & 0o7777);
            return Ok(Err(format!(
                "user {own} alone must be able to write it: it belongs to user {owner}, with mode {mode:04o}"
            )));
        }
        let mut bytes = Vec::new();
        // A longer file is no record: it is cut here, and its sum does not match.
        File::from(file).take(MAX_RECORD_BYTES as u64).read_to_end(&mut bytes)?;
        Ok(Record::parse(&bytes).map_err(|error| error.to_string()))
    }

    /// Replaces a record as a whole.
    ///
    /// # Errors
    /// The failed system call, or a value that the format can't represent.
    pub(super) fn write(&self, name: &str, record: &Record) -> io::Result<()> {
        let text = record.to_string();
        if Record::parse(text.as_bytes()).as_ref() != Ok(record) {
            return Err(io::Error::new(ErrorKind::InvalidInput, "a name or path has a line break"));
        }
        // Without fsync: a loss of power ends the processes as well, and a record is of no use after another boot.
        let new = format!("{name}{NEW_SUFFIX}");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.dir, &*new, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(text.as_bytes())?;
        Ok(rustix::fs::renameat(&self.dir, &*new, &self.dir, name)?)
    }

    /// Removes a file, if it exists.
    pub(super) fn remove(&self, name: &str) {
        if let Err(error) = rustix::fs::unlinkat(&self.dir, name, AtFlags::empty())
            && error != Errno::NOENT
        {
            tracing::warn!(dn = "supervisor", %error, "can't remove {name} in {}", self.path.display());
        }
    }

    /// Removes the files of a kept process that has ended, the record last.
    pub(super) fn remove_kept(&self, mark: ProcessMark) {
        let name = kept_file(mark);
        // A kill in between leaves the record, by which the next program removes the rest.
        OUTPUT_SUFFIXES.iter().for_each(|suffix| self.remove(&format!("{name}{suffix}")));
        self.remove(&name);
    }

    /// The names of the FIFOs of a kept process.
    pub(super) fn output_files(mark: ProcessMark) -> [String; 2] {
        let name = kept_file(mark);
        OUTPUT_SUFFIXES.map(|suffix| format!("{name}{suffix}"))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KeptRecord>> {
        self.unclaimed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const KEPT_PREFIX: &str = "kept-";
const NEW_SUFFIX: &str = ".new";
const OUTPUT_SUFFIXES: [&str; 2] = [".stdout", ".stderr"];

pub(super) fn kept_file(mark: ProcessMark) -> String {
    format!("{KEPT_PREFIX}{:x}", mark.as_limit())
}

/// Reads a record and writes it again. `None` if it is rejected.
#[cfg(feature = "testing")]
pub(crate) fn rewrite_record(bytes: &[u8]) -> Option<Vec<u8>> {
    Record::parse(bytes).ok().map(|record| record.to_string().into_bytes())
}

fn current_boot() -> io::Result<BootId> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim_end().to_owned();
    let namespace = fs::read_link("/proc/self/ns/pid")?;
    Ok(BootId { boot, pid_namespace: namespace.to_string_lossy().into_owned() })
}
