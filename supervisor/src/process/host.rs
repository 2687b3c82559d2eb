//! The state that all child processes of one supervisor share.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit};
use tokio::signal::unix::SignalKind;
use tokio::time::timeout;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::cgroup::{CgroupParent, HostCgroup};
use super::child_lists::ChildLists;
use super::host_state::{HostState, is_init};
use super::kept::KeptProcess;
use super::leftovers::{LeftoverProcess, LeftoverReport};
use super::limits;
use super::mark::{HostId, MarkAllocator, ProcessMark, ProgramId};
use super::notify_socket::{NotifyDir, NotifySocket, socket_name};
use super::procfs;
use super::reap;
use super::records::{HostRecords, ProcessRecords, RecordProblem};
use super::settings::Process;
use super::spawn::ProcessSpawner;

/// The time that killed processes may take to exit before a shutdown no longer waits for them.
const REAP_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Default)]
pub(crate) struct HostSettings {
    pub(crate) cgroups: CgroupParent,
    pub(crate) records: Option<ProcessRecords>,
    pub(crate) child_limits: Vec<limits::Rlimit>,
    /// The directory of notification sockets.
    pub(crate) notify_dir: Option<PathBuf>,
}

/// Starts child processes and reaps their orphans. It exists as long as any process that it started has a
/// run.
#[derive(Debug)]
pub(crate) struct ProcessHost {
    pub(super) shared: Arc<HostState>,
    pub(super) spawner: ProcessSpawner,
    /// The parent of the cgroups of starts.
    pub(super) cgroup: Option<HostCgroup>,
    pub(super) records: Option<Arc<HostRecords>>,
    /// The limits of its children in place of this program's.
    pub(super) child_limits: Vec<limits::Rlimit>,
    /// The directory of notification sockets, or the reason why there is none.
    notify_dir: Result<Arc<NotifyDir>, String>,
    /// The reason why processes of an earlier host may still run.
    record_problems: Vec<RecordProblem>,
    /// The tasks that wait for killed processes which no run waits for any more.
    pub(super) reap_tasks: TaskTracker,
    _reaper: AbortOnDropHandle<()>,
    _subreaper: SubreaperGuard,
}

/// The number of hosts that need this program as the child subreaper, and whether it was one before the first of
/// them. The attribute belongs to the whole program, so all hosts share the count.
static SUBREAPER: Mutex<SubreaperUse> = Mutex::new(SubreaperUse { hosts: 0, was_set: false });

#[derive(Debug)]
struct SubreaperUse {
    hosts: usize,
    /// Before the first of them.
    was_set: bool,
}

/// Keeps this program the child subreaper. After the last guard, the previous setting is restored, because
/// this program would no longer reap the orphans.
#[derive(Debug)]
struct SubreaperGuard;

impl SubreaperGuard {
    fn new() -> io::Result<Self> {
        let mut subreaper = SUBREAPER.lock().unwrap_or_else(PoisonError::into_inner);
        if subreaper.hosts == 0 {
            let was_set = rustix::process::child_subreaper()?.is_some();
            rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
            subreaper.was_set = was_set;
        }
        subreaper.hosts += 1;
        Ok(Self)
    }
}

impl Drop for SubreaperGuard {
    fn drop(&mut self) {
        let mut subreaper = SUBREAPER.lock().unwrap_or_else(PoisonError::into_inner);
        subreaper.hosts -= 1;
        if subreaper.hosts == 0 && !subreaper.was_set {
            // A kernel that could set it can clear it.
            let _ = rustix::process::set_child_subreaper(None);
        }
    }
}

impl ProcessHost {
    /// Makes this program the child subreaper for as long as the host exists. Must be called within a tokio
    /// runtime with IO enabled. Returns the leftovers of an earlier host that it has ended, too.
    ///
    /// # Errors
    /// The failed system call; the text tells if `/proc` is missing or belongs to another PID namespace.
    pub(crate) fn new(settings: &HostSettings) -> io::Result<(Self, Vec<LeftoverProcess>)> {
        procfs::check_procfs()?;
        let program = ProgramId::current()?;
        let subreaper = SubreaperGuard::new()?;
        // Before there is a child, so that no exit is missed.
        let child_exited = tokio::signal::unix::signal(SignalKind::child())?;
        let initial_children = if is_init() { mark_own_children(program)? } else { HashSet::new() };
        let children = Arc::new(ChildLists::new());
        let spawner = ProcessSpawner::start(Arc::clone(&children))?;
        // A mark contains the id of a thread that lives as long as the host.
        let marks = MarkAllocator::new(program, spawner.first_thread());
        let (records, leftovers) = open_records(settings.records.as_ref(), marks.host_id());
        let LeftoverReport { ended, rejected: record_problems } = leftovers;
        // After the records, which report each leftover by its name; the cleanup of cgroups kills the others without
        // one.
        let cgroup = create_host_cgroup(&settings.cgroups, marks.host_id());
        let shared = HostState::new(program, marks, own_lock_limit(), initial_children, children);
        let shared = Arc::new(shared);
        let reaper =
            AbortOnDropHandle::new(tokio::spawn(reap::run_reaper(Arc::clone(&shared), child_exited)));
        let reap_tasks = TaskTracker::new();
        let notify_dir = open_notify_dir(settings.notify_dir.as_deref());
        let (_reaper, _subreaper) = (reaper, subreaper);
        let host = Self {
            shared,
            spawner,
            cgroup,
            records,
            child_limits: settings.child_limits.clone(),
            notify_dir,
            record_problems,
            reap_tasks,
            _reaper,
            _subreaper,
        };
        Ok((host, ended))
    }

    /// Records a process that is to be kept for this DN.
    ///
    /// # Errors
    /// There are no records, or they can't be written.
    pub(super) fn create_kept(
        &self,
        dn: &str,
        process: &Process,
        mark: ProcessMark,
        cgroup: Option<&Path>,
    ) -> io::Result<Arc<KeptProcess>> {
        let missing = || io::Error::other("this supervisor has no process records, or could not use them");
        let records = self.records.as_ref().ok_or_else(missing)?;
        KeptProcess::create(records, dn, process, mark, cgroup).map(Arc::new)
    }

    /// Binds the notification socket of a start.
    ///
    /// # Errors
    /// There is no directory for it, or the socket can't be bound there; the text names what to do.
    pub(super) fn bind_notify_socket(
        &self,
        mark: ProcessMark,
        process: &Process,
    ) -> io::Result<NotifySocket> {
        let dir = self.notify_dir.as_ref().map_err(|reason| io::Error::other(reason.clone()))?;
        dir.bind(&socket_name(mark.as_limit()), process)
    }

    /// Returns whether a kept process of this DN waits for its adoption.
    pub(crate) fn has_unclaimed(&self, dn: &str) -> bool {
        self.records.as_ref().is_some_and(|records| records.has_unclaimed(dn))
    }

    /// Ends the kept process of this DN that waits for its adoption, if there is one. Blocks, at most a second.
    pub(crate) fn end_unclaimed(&self, dn: &str) {
        self.records.iter().for_each(|records| records.end_unclaimed(dn));
    }

    /// The reason why processes of an earlier host may still run.
    pub(crate) fn record_problems(&self) -> &[RecordProblem] {
        &self.record_problems
    }

    /// Resolves when every killed process has exited, or after a timeout: a process that takes longer waits
    /// for a device, and the next host with the same records checks again.
    pub(crate) async fn wait_reaped(&self) {
        // Otherwise the wait would not end: a tracker waits for its close, too.
        self.reap_tasks.close();
        let reaped = timeout(REAP_TIMEOUT, self.reap_tasks.wait()).await;
        if let Some(records) = &self.records {
            // No run can adopt these any more, and this is not a kill: they end as all others do.
            records.end_all_unclaimed();
            if reaped.is_ok() {
                records.remove_host();
            }
        }
    }
}

/// Opens the records, and ends the leftovers in them. Without records, what a killed program has left behind keeps
/// running.
fn open_records(
    wanted: Option<&ProcessRecords>,
    host_id: HostId,
) -> (Option<Arc<HostRecords>>, LeftoverReport) {
    let Some(wanted) = wanted else { return (None, LeftoverReport::default()) };
    match HostRecords::open(wanted, host_id) {
        Ok((records, leftovers)) => (Some(Arc::new(records)), leftovers),
        Err(error) => {
            let path = wanted.dir().to_owned();
            tracing::warn!(dn = "supervisor", %error, "can't use the process records in {}: no process is kept, and none that is left behind ends at the next start", path.display());
            let unusable = RecordProblem::Directory { path, reason: error.to_string() };
            (None, LeftoverReport { ended: Vec::new(), rejected: vec![unusable] })
        }
    }
}

fn open_notify_dir(path: Option<&Path>) -> Result<Arc<NotifyDir>, String> {
    let path =
        path.ok_or("the supervisor has no directory for it: set SupervisorBuilder::notify_directory")?;
    NotifyDir::open(path).map(Arc::new).map_err(|error| format!("{}: {error}", path.display()))
}

/// Creates the host's cgroup if possible, and logs once how descendants are identified.
fn create_host_cgroup(cgroups: &CgroupParent, host_id: HostId) -> Option<HostCgroup> {
    match HostCgroup::create(cgroups, host_id) {
        Ok(Some(cgroup)) => {
            tracing::debug!(dn = "supervisor", cgroup = %cgroup.dir().display(), "descendants are identified by cgroup");
            Some(cgroup)
        }
        Ok(None) => None,
        Err(error) => {
            tracing::info!(dn = "supervisor", %error, "descendants are identified by their parents: cgroups are not available");
            None
        }
    }
}

fn own_lock_limit() -> u64 {
    rustix::process::getrlimit(Resource::Locks).current.unwrap_or(u64::MAX)
}

/// Marks PID 1 itself. This distinguishes its own children from processes that others bring into its
/// namespace. Returns the children that it already has.
fn mark_own_children(program: ProgramId) -> io::Result<HashSet<i32>> {
    let before = own_lock_limit();
    if ProcessMark::from_limit(before).is_none() {
        let hard = rustix::process::getrlimit(Resource::Locks).maximum;
        let mark = Rlimit { current: Some(program.own_mark().as_limit()), maximum: hard };
        rustix::process::setrlimit(Resource::Locks, mark)?;
    }
    let own = procfs::own_pid();
    let is_child = |pid: &i32| procfs::read_stat(*pid).is_ok_and(|stat| stat.parent == own);
    Ok(procfs::list_pids()?.into_iter().filter(is_child).collect())
}
