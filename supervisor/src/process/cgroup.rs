//! A dedicated cgroup for each start, which the kernel kills as a unit.
//!
//! ```text
//! <parent>                      this program's cgroup, or a configured one
//! └── nodekeel-<program>-<host>-<n> locked while the host is running
//!     ├── <number>              one start of one process, with all its descendants
//!     └── <number>              the next start's, made ahead of it
//! ```
//!
//! The cgroup of a process that is kept is next to that of the host: `nodekeel-keep-<start>`.
//!
//! A process can't escape the kill by forking, and the kernel reports when the cgroup is empty. An unlocked
//! directory with exactly such a name is the leftover of a killed supervisor: the next host kills and removes
//! it.
//!
//! *Source:* the kernel's `Documentation/admin-guide/cgroup-v2.rst`, `cgroup.kill` (Linux 5.14) and
//! `cgroup.events`.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use super::cgroup_limits;
use super::cgroup_limits::CgroupLimitError;
use super::limits::CgroupSetting;
use super::mark::{HostId, ProcessMark};
use crate::process_exit::OomKill;
use crate::sys::{self, WatchedFile};

/// The prefix of all hosts' directory names.
const NAME_PREFIX: &str = "nodekeel-";
/// The number of names that a host tries for its directory.
const MAX_NAME_ATTEMPTS: usize = 8;
/// The time that all leftovers of dead supervisors together may take to exit. They have been killed: a process
/// that takes longer waits for a device, and the next host checks again.
const LEFTOVER_TIMEOUT: Duration = Duration::from_secs(1);

/// The parent of the dedicated cgroups of child processes. The kernel kills a cgroup with all its processes
/// at once.
///
/// Without cgroups, the supervisor identifies descendants by their parents and signals them one by one; on a loaded
/// host, processes that keep forking can evade it for a while. Cgroups need cgroup v2, Linux 5.14, and
/// permission to create directories and to move processes in the parent: root has it, and so does a user to
/// whom the parent is delegated (`Delegate=yes` in a systemd unit).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CgroupParent {
    /// This program's cgroup, or the one above where it has moved below that to limit its children. Without
    /// permission there are no dedicated cgroups.
    #[default]
    Current,
    /// This directory of a mounted hierarchy. Without permission there are no dedicated cgroups.
    Path(PathBuf),
    /// No dedicated cgroups.
    Disabled,
}

#[derive(Debug)]
pub(super) struct HostCgroup {
    /// The next start's, without limits. It is made when a start is complete, so that a restart does not wait for it.
    next: Mutex<Option<RunCgroup>>,
    /// The number of attempts: the name of the next one. No name is used twice.
    count: AtomicU64,
    dir: PathBuf,
    parent: PathBuf,
    /// Shows others that this host is running.
    _lock: File,
}

impl HostCgroup {
    /// Creates it, and ends the leftovers of dead hosts in the same parent. `Ok(None)` where cgroups are
    /// disabled.
    pub(super) fn create(wanted: &CgroupParent, host_id: HostId) -> io::Result<Option<Self>> {
        let Some(parent) = cgroup_limits::usable_parent(wanted)? else { return Ok(None) };
        end_leftovers(&parent);
        let mut names = (0..MAX_NAME_ATTEMPTS).map(|n| parent.join(format!("{NAME_PREFIX}{host_id}-{n}")));
        let made = names.find_map(|dir| Self::create_locked(dir).transpose());
        made.unwrap_or_else(|| Err(ErrorKind::AlreadyExists.into())).map(Some)
    }

    /// Creates and locks a directory with this name. `None` if it exists, or if a concurrent cleanup has
    /// locked or removed it before this one could lock it.
    fn create_locked(dir: PathBuf) -> io::Result<Option<Self>> {
        match fs::create_dir(&dir) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(None),
            made => made?,
        }
        let Some(lock) = try_lock_dir(&dir)? else { return Ok(None) };
        let parent = dir.parent().unwrap_or(&dir).to_owned();
        let host_cgroup = Self { next: Mutex::default(), count: AtomicU64::new(0), dir, parent, _lock: lock };
        // A kernel before 5.14 lacks the file: then the marks alone identify descendants.
        fs::metadata(host_cgroup.dir.join("cgroup.kill"))?;
        Ok(Some(host_cgroup))
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Creates the cgroup of one start, next to this one if its processes are kept: nothing ends them with those of
    /// this host.
    pub(super) fn create_run_cgroup(&self, mark: ProcessMark) -> io::Result<RunCgroup> {
        if mark.survives() {
            return RunCgroup::create(&self.parent.join(kept_cgroup_name(mark)));
        }
        let prepared = self.lock_next().take();
        prepared.map_or_else(|| self.create_numbered(), Ok)
    }

    /// Creates the cgroup of the next start, unless it is there, or no start has needed one so far. If that fails, the
    /// next start tries again, and reports why.
    pub(super) fn prepare_next(&self) {
        let mut next = self.lock_next();
        if next.is_none() && self.count.load(Ordering::Relaxed) > 0 {
            *next = self.create_numbered().ok();
        }
    }

    fn create_numbered(&self) -> io::Result<RunCgroup> {
        RunCgroup::create(&self.dir.join(self.count.fetch_add(1, Ordering::Relaxed).to_string()))
    }

    fn lock_next(&self) -> MutexGuard<'_, Option<RunCgroup>> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Limits everything in the cgroup of one start.
    pub(super) fn set_limits(
        &self,
        run: &mut RunCgroup,
        settings: &[CgroupSetting],
    ) -> Result<(), CgroupLimitError> {
        run.is_limited = true;
        cgroup_limits::enable_controllers(&[&self.parent, &self.dir], settings)?;
        cgroup_limits::write_settings(&run.dir, settings)
    }
}

impl Drop for HostCgroup {
    fn drop(&mut self) {
        // Also those of starts that are about to be removed. If processes remain, the next host ends them: the lock is
        // free then.
        let _ = remove_cgroup_tree(&self.dir);
    }
}

/// The cgroup of one start: its process and all descendants that have not moved to another cgroup. Dropping
/// it removes the cgroup if it is empty.
#[derive(Debug)]
pub(super) struct RunCgroup {
    dir: PathBuf,
    /// Open from the start: at the end no descriptors may be available.
    kill_file: File,
    events: Arc<OwnedFd>,
    /// The directory, in which a child is created, until then. It is open from the start: to find it by its path would
    /// wait for the removal of the cgroup beside it, which is that of the run before.
    pub(super) start_dir: Option<OwnedFd>,
    /// The process must not run anywhere else.
    pub(super) is_limited: bool,
}

impl RunCgroup {
    fn create(dir: &Path) -> io::Result<Self> {
        fs::create_dir(dir)?;
        let mut run = Self::open(dir).inspect_err(|_| _ = fs::remove_dir(dir))?;
        run.start_dir = Some(File::open(dir)?.into());
        Ok(run)
    }

    fn open(dir: &Path) -> io::Result<Self> {
        let kill_file = File::options().write(true).open(dir.join("cgroup.kill"))?;
        let events = Arc::new(File::open(dir.join("cgroup.events"))?.into());
        Ok(Self { dir: dir.to_owned(), kill_file, events, start_dir: None, is_limited: false })
    }

    /// The cgroup of a kept process, if the directory can only be that.
    pub(super) fn open_kept(dir: &Path, mark: ProcessMark) -> Option<Self> {
        let is_kept = dir.file_name().is_some_and(|name| *name == *kept_cgroup_name(mark));
        is_kept.then(|| Self::open(dir).ok())?
    }

    /// Returns whether a process is in this cgroup of a kept process, if the directory can only be that.
    pub(super) fn is_kept_in(dir: &Path, mark: ProcessMark, pid: i32) -> bool {
        dir.file_name().is_some_and(|name| *name == *kept_cgroup_name(mark)) && lists(dir, &pid.to_string())
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns whether it, or a cgroup below it, contains the process.
    pub(super) fn contains(&self, pid: i32) -> bool {
        lists(&self.dir, &pid.to_string())
    }

    /// Kills every process in it and below it, including those in the middle of a fork.
    pub(super) fn kill_all(&self) -> io::Result<()> {
        (&self.kill_file).write_all(b"1")
    }

    /// Resolves when neither it nor a cgroup below it contains a process other than zombies.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub(super) async fn wait_empty(&self) -> io::Result<()> {
        let changing = WatchedFile::new(Arc::clone(&self.events))?;
        while self.is_populated()? {
            changing.wait_changed().await?;
        }
        Ok(())
    }

    /// Reads the current value, which also re-arms the notification of the next change.
    pub(super) fn is_populated(&self) -> io::Result<bool> {
        let mut text = [0; 256];
        let length = rustix::io::pread(&*self.events, &mut text, 0)?;
        // Any other text counts as populated: to wait too long is better than to leave a process behind.
        Ok(!text[..length].split(|&byte| byte == b'\n').any(|line| line == b"populated 0"))
    }

    /// The processes that the kernel has killed in it because memory ran out. `None` also without the memory
    /// controller.
    pub(super) fn oom_kill(&self) -> Option<OomKill> {
        let read = |file| fs::read_to_string(self.dir.join(file)).ok();
        let events = read("memory.events")?;
        let killed = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok())?;
        // Without a limit the file contains "max", which is no number.
        let memory_max = read("memory.max").and_then(|text| text.trim().parse().ok());
        (killed > 0).then_some(OomKill { killed, memory_max })
    }

    /// Waits without a runtime. Returns whether the cgroup was empty before the deadline.
    fn wait_empty_blocking(&self, deadline: Instant) -> io::Result<bool> {
        while self.is_populated()? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            sys::poll_for_change(self.events.as_fd(), left)?;
        }
        Ok(true)
    }
}

impl Drop for RunCgroup {
    fn drop(&mut self) {
        // The next host ends what remains in it.
        let _ = remove_cgroup_tree(&self.dir);
    }
}

/// Returns whether `cgroup.procs` of a cgroup, or of one below it, has this line. Most processes are in the cgroup
/// itself.
fn lists(dir: &Path, pid: &str) -> bool {
    let listed = fs::read_to_string(dir.join("cgroup.procs"));
    listed.is_ok_and(|listed| listed.lines().any(|line| line == pid))
        || fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .any(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()) && lists(&entry.path(), pid))
}

/// Ends the leftovers of dead hosts. Errors are ignored: this host works without the cleanup.
fn end_leftovers(parent: &Path) {
    let deadline = Instant::now() + LEFTOVER_TIMEOUT;
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    // Where the parent is the root of a hierarchy, it also contains the cgroups of other programs.
    let homes = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_host_cgroup_name));
    // Kills all of them before it waits for the first, and keeps them locked until all are gone.
    let left: Vec<_> = homes.filter_map(|entry| kill_leftover(entry.path())).collect();
    for LeftoverCgroup { cgroup, .. } in &left {
        match cgroup.wait_empty_blocking(deadline) {
            Ok(true) => {}
            Ok(false) => {
                tracing::warn!(dn = "supervisor", cgroup = %cgroup.dir.display(), "leftover processes do not exit after SIGKILL")
            }
            Err(error) => {
                tracing::warn!(dn = "supervisor", cgroup = %cgroup.dir.display(), %error, "can't wait for leftover processes")
            }
        }
    }
}

/// The name of a kept process' cgroup, which is not that of a host.
fn kept_cgroup_name(mark: ProcessMark) -> String {
    format!("{NAME_PREFIX}keep-{:x}", mark.as_limit())
}

/// Returns whether a directory has the name of a host's cgroup.
fn is_host_cgroup_name(name: &str) -> bool {
    let parts = name.strip_prefix(NAME_PREFIX).and_then(|rest| rest.rsplit_once('-'));
    parts.is_some_and(|(host_id, number)| {
        HostId::parse(host_id).is_some() && (0..MAX_NAME_ATTEMPTS).any(|n| n.to_string() == number)
    })
}

/// The cgroup of a dead host. The fields are dropped in this order: it is removed before it is unlocked;
/// otherwise a host that has just created a cgroup of the same name could lock it in between.
struct LeftoverCgroup {
    cgroup: RunCgroup,
    _lock: File,
}

/// Locks the cgroup of a dead host, and kills what is left in it.
fn kill_leftover(dir: PathBuf) -> Option<LeftoverCgroup> {
    let lock = try_lock_dir(&dir).ok().flatten()?;
    let cgroup = RunCgroup::open(&dir).ok()?;
    if cgroup.is_populated().unwrap_or(true) {
        tracing::info!(dn = "supervisor", cgroup = %dir.display(), "ending leftover processes of a killed supervisor");
    }
    cgroup.kill_all().ok()?;
    Some(LeftoverCgroup { cgroup, _lock: lock })
}

/// Locks a host's directory. `None` if another process has locked or removed it.
fn try_lock_dir(dir: &Path) -> io::Result<Option<File>> {
    let locked = || {
        let file = File::open(dir)?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        // Its owner may have removed it before this lock, and another host may have made one of the same name.
        let is_there = fs::metadata(dir)?.ino() == file.metadata()?.ino();
        Ok(is_there.then_some(file))
    };
    locked().or_else(|error: io::Error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::NotFound => Ok(None),
        _ => Err(error),
    })
}

/// Removes an empty cgroup and the empty cgroups below it. Few have any.
fn remove_cgroup_tree(dir: &Path) -> io::Result<()> {
    if fs::remove_dir(dir).is_ok() {
        return Ok(());
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            // If it fails, the removal of this one does, unless another task has removed that one.
            let _ = remove_cgroup_tree(&entry.path());
        }
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::mark::{MarkAllocator, ProgramId};

    #[test]
    fn only_generated_names_count_as_host_cgroups() {
        let program = ProgramId::current().expect("proc is mounted");
        for thread in [0, 1, i32::MAX] {
            let host_id = MarkAllocator::new(program, thread).host_id();
            assert!(
                (0..MAX_NAME_ATTEMPTS).all(|n| is_host_cgroup_name(&format!("{NAME_PREFIX}{host_id}-{n}"))),
                "{host_id}"
            );
        }
        assert!(is_host_cgroup_name("nodekeel-0-0-0") && is_host_cgroup_name("nodekeel-7fff-3fffff-7"));
        let others = "precious 1-1 1-1-8 1-1-0-0 x-1-0 1-x-0 01-1-0 1-1-00 +1-1-0 A-1-0 8000-1-0 1-400000-0 keep-2bffffffff800001";
        for name in others.split(' ').chain([""]) {
            assert!(!is_host_cgroup_name(&format!("nodekeel-{name}")), "{name}");
        }
    }
}
