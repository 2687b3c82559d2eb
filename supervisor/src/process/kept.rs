//! A process that outlives this program, and its adoption by the next.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::cgroup::RunCgroup;
use super::descendants::{Kinship, has_exited};
use super::host_state::HostState;
use super::mark::ProcessMark;
use super::procfs;
use super::record::{KeptRecord, ProcessId, Record, fnv1a};
use super::records::{self, HostRecords};
use super::settings::{KillMode, Process};
use super::spawn::{KillScope, MainProcess, OutputEnds};
use crate::sys::StartedChild;

/// The amount of output that a kept process can write while no supervisor reads it: what an ordinary user may set,
/// see `/proc/sys/fs/pipe-max-size`.
const FIFO_BYTES: usize = 1024 * 1024;

/// The record of one kept process. Dropping it removes the files: the process has ended, or has not started.
#[derive(Debug)]
pub(super) struct KeptProcess {
    records: Arc<HostRecords>,
    record: Mutex<KeptRecord>,
    /// It is running, and can't be adopted at present.
    is_left: AtomicBool,
}

impl KeptProcess {
    /// Records a process before its start.
    ///
    /// # Errors
    /// The failed system call, or a setting that rules it out.
    pub(super) fn create(
        records: &Arc<HostRecords>,
        dn: &str,
        process: &Process,
        mark: ProcessMark,
        cgroup: Option<&Path>,
    ) -> io::Result<Self> {
        if process.kill_mode == KillMode::Process {
            let hint = "a process whose descendants must survive its stop can't be kept: remove keep";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, hint));
        }
        let record = KeptRecord {
            boot: records.boot().clone(),
            dn: dn.to_owned(),
            mark,
            user: process.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw()),
            definition: definition_hash(process),
            cgroup: cgroup.map(Path::to_owned),
            process: None,
            is_ready: false,
        };
        let kept = Self::adopt(records, record);
        kept.write()?;
        Ok(kept)
    }

    /// The process that an earlier program has started.
    pub(super) fn adopt(records: &Arc<HostRecords>, record: KeptRecord) -> Self {
        let is_left = AtomicBool::new(false);
        Self { records: Arc::clone(records), record: Mutex::new(record), is_left }
    }

    /// Returns whether this process would be started in the same way, and be kept.
    pub(super) fn has_definition(&self, process: &Process) -> bool {
        process.keep && self.lock().definition == definition_hash(process)
    }

    pub(super) fn mark(&self) -> ProcessMark {
        self.lock().mark
    }

    /// Leaves it as it is, for another adoption.
    pub(super) fn leave(&self) {
        self.is_left.store(true, Ordering::Relaxed);
        self.records.add_unclaimed(self.lock().clone());
    }

    pub(super) fn record_start(&self, pid: i32) -> io::Result<()> {
        // The pid may be another process' by the time the next program reads it; with the start time it is unique.
        let start = procfs::read_stat(pid)?.start;
        self.lock().process = Some(ProcessId { pid, start });
        self.write()
    }

    pub(super) fn record_ready(&self) {
        if !std::mem::replace(&mut self.lock().is_ready, true)
            && let Err(error) = self.write()
        {
            tracing::warn!(%error, "can't record that the kept process is ready: the next start waits for READY=1");
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.lock().is_ready
    }

    /// Creates the FIFOs of its output. Each end is open for reading and writing: so neither this program's exit
    /// nor its start is noticed by a writer.
    pub(super) fn create_fifos(&self) -> io::Result<OutputEnds> {
        for name in HostRecords::output_files(self.mark()) {
            rustix::fs::mknodat(self.records.dir(), name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        }
        let readers = self.open_fifos()?;
        let [stdout, stderr] = self.open_fifo_ends(OFlags::empty());
        Ok(OutputEnds { readers, writers: [stdout?, stderr?] })
    }

    pub(super) fn open_fifos(&self) -> io::Result<[OwnedFd; 2]> {
        let [stdout, stderr] = self.open_fifo_ends(OFlags::NONBLOCK);
        let fifos = [stdout?, stderr?];
        // The kernel limits the pipes of ordinary users together: then it keeps its size.
        fifos.iter().for_each(|fifo| _ = rustix::pipe::fcntl_setpipe_size(fifo, FIFO_BYTES));
        Ok(fifos)
    }

    fn open_fifo_ends(&self, flags: OFlags) -> [io::Result<OwnedFd>; 2] {
        let flags = flags | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        HostRecords::output_files(self.mark())
            .map(|name| Ok(rustix::fs::openat(self.records.dir(), name, flags, Mode::empty())?))
    }

    /// The running process, identified again. It runs on if the result is dropped.
    ///
    /// # Errors
    /// `ESRCH` or `ENOENT` if it has exited or is another one.
    pub(super) fn open_main(&self, shared: &Arc<HostState>) -> io::Result<MainProcess> {
        let KeptRecord { mark, user, process, cgroup, .. } = self.lock().clone();
        let ProcessId { pid, start } = process.ok_or(Errno::SRCH)?;
        let pidfd = rustix::process::pidfd_open(Pid::from_raw(pid).ok_or(Errno::SRCH)?, PidfdFlags::empty())?;
        // Checked while the descriptor is open: it keeps referring to the process that was checked.
        let cgroup = cgroup.and_then(|dir| RunCgroup::open_kept(&dir, mark));
        let is_its = || match &cgroup {
            Some(cgroup) if cgroup.contains(pid) => Ok(true),
            _ => Ok::<_, io::Error>(procfs::locks_limit(pid)? == mark.as_limit()),
        };
        if procfs::read_stat(pid)?.start != start || !is_its()? || has_exited(pidfd.as_fd()) {
            return Err(Errno::SRCH.into());
        }
        let kill_scope =
            cgroup.map_or(KillScope::ByParents, |cgroup| KillScope::WholeCgroup(Arc::new(cgroup)));
        // From now on a run waits for it, and the reaper leaves it alone.
        shared.end_start(mark, Some(pid));
        let child = StartedChild { pid, pidfd };
        let mut main = MainProcess::new(Arc::clone(shared), child, mark, kill_scope, Kinship::User(user));
        main.is_left_alone = true;
        Ok(main)
    }

    /// When it started.
    ///
    /// # Errors
    /// `ESRCH` if it has not, or the error of reading `/proc`.
    pub(super) fn started_at(&self) -> io::Result<Instant> {
        let ticks = self.lock().process.ok_or(Errno::SRCH)?.start;
        let age = procfs::time_since_boot().saturating_sub(ticks_to_time(ticks));
        // It has run since this boot, and so has the clock of `Instant`.
        Ok(Instant::now().checked_sub(age).unwrap_or_else(Instant::now))
    }

    fn write(&self) -> io::Result<()> {
        let record = self.lock().clone();
        self.records.write(&records::kept_file(record.mark), &Record::Kept(record))
    }

    fn lock(&self) -> MutexGuard<'_, KeptRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeptProcess {
    fn drop(&mut self) {
        if !self.is_left.load(Ordering::Relaxed) {
            self.records.remove_kept(self.mark());
        }
    }
}

/// A hash of what a process is started with. It may differ in another release; then the process is started anew.
fn definition_hash(process: &Process) -> u64 {
    let Process {
        program_path, args, env, current_dir, stdin, uid, gid, privileges, limits, watchdog, ..
    } = process;
    let notifies = process.needs_notify_socket();
    let settings =
        format!("{current_dir:?} {uid:?} {gid:?} {privileges:?} {limits:?} {watchdog:?} {notifies}");
    let words = std::iter::once(program_path.as_os_str())
        .chain(args.iter().map(OsString::as_os_str))
        .chain(env.iter().flat_map(|(key, value)| [key.as_os_str(), value.as_os_str()]));
    let words = words.map(OsStr::as_bytes);
    let lengths: Vec<u8> = [args.len(), env.len()].into_iter().flat_map(usize::to_le_bytes).collect();
    // No word contains a NUL byte.
    let separated = words.flat_map(|word| [word, &b"\0"[..]]);
    fnv1a(separated.chain([&lengths[..], settings.as_bytes(), stdin.content()]))
}

fn ticks_to_time(ticks: u64) -> Duration {
    let per_second = rustix::param::clock_ticks_per_second();
    Duration::from_millis(ticks.saturating_mul(1000) / per_second.max(1))
}
