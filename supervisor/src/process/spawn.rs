//! The start of a main process.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::pipe::PipeFlags;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

use super::cgroup::{HostCgroup, RunCgroup};
use super::cgroup_limits::CgroupLimitError;
use super::child_lists::ChildLists;
use super::child_setup;
use super::descendants::{DescendantSet, Kinship};
use super::host_state::HostState;
use super::mark::ProcessMark;
use super::settings::{KillMode, Process};
use crate::process_exit::{OomKill, Signal};
use crate::sys::{self, ExecImage, StartError, StartStep, StartedChild, StdioSlots};

/// The search path for a program without a slash when the process has no `PATH`.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

/// The time that the next start waits for a thread before it gets a new one.
const SPAWN_QUEUE_TIMEOUT: Duration = Duration::from_millis(100);

/// The number of starts that are prepared and performed at the same time: enough to keep a thread busy.
/// If a thousand were prepared at once, every other task of the runtime, such as an answer to a client, would wait for all of them at each
/// of its awaits. A turn therefore comes back by a task of the runtime. If the thread gave it back, a thread as fast as the preparation would
/// let each of the thousand go on in its first step.
const MAX_QUEUED_STARTS: usize = 4;

/// The threads that start all processes of a host.
///
/// The kernel sends the parent-death signal when the forking thread exits, not when its program does. The
/// threads therefore live as long as the host. Usually there is one. The kernel blocks it until the new
/// program runs; if that takes long, for example on an unresponsive mount, another thread is added so that
/// other starts do not wait.
#[derive(Debug)]
pub(super) struct ProcessSpawner {
    /// A start has one of these until its task hears that it is done, or that it is slow.
    turns: Arc<Semaphore>,
    jobs: mpsc::Sender<SpawnJob>,
    waiting: Arc<Mutex<mpsc::Receiver<SpawnJob>>>,
    /// Those of the threads.
    children: Arc<ChildLists>,
    first_thread: i32,
}

#[derive(Debug)]
pub(super) struct PreparedStart {
    pub(super) image: ExecImage,
    pub(super) mark: ProcessMark,
    pub(super) kill_scope: KillScope,
}

#[derive(Debug)]
struct SpawnJob {
    start: PreparedStart,
    shared: Arc<HostState>,
    is_started: Arc<AtomicBool>,
    reply: oneshot::Sender<Result<MainProcess, StartError>>,
}

impl ProcessSpawner {
    pub(super) fn start(children: Arc<ChildLists>) -> io::Result<Self> {
        let (jobs, waiting) = mpsc::channel();
        let waiting = Arc::new(Mutex::new(waiting));
        // The id of this thread is a part of every mark of the host, so it is needed before the first start.
        let thread = add_spawner_thread(&waiting, &children)?.recv().map_err(io::Error::other)?;
        let turns = Arc::new(Semaphore::new(MAX_QUEUED_STARTS));
        Ok(Self { turns, jobs, waiting, children, first_thread: thread.as_raw_nonzero().get() })
    }

    /// Waits until a start may be prepared. Starts get their turns in the order of their calls.
    pub(super) async fn wait_turn(&self) -> StartTurn {
        let permit = Arc::clone(&self.turns).acquire_owned().await;
        StartTurn { _permit: permit.expect("nothing closes the semaphore") }
    }

    pub(super) fn first_thread(&self) -> i32 {
        self.first_thread
    }

    /// Starts a process. If this future is dropped before it returns, the process is killed.
    pub(super) async fn spawn(
        &self,
        turn: StartTurn,
        start: PreparedStart,
        shared: &Arc<HostState>,
    ) -> Result<MainProcess, StartError> {
        let (reply, mut result) = oneshot::channel();
        let is_started = Arc::<AtomicBool>::default();
        let shared = Arc::clone(shared);
        let job = SpawnJob { start, shared, is_started: Arc::clone(&is_started), reply };
        let gone = || {
            let source = io::Error::other("the thread that starts processes has exited");
            StartError { step: StartStep::Fork, source }
        };
        self.jobs.send(job).map_err(|_| gone())?;
        if let Ok(result) = timeout(SPAWN_QUEUE_TIMEOUT, &mut result).await {
            return result.unwrap_or_else(|_| Err(gone()));
        }
        // A slow start holds no other.
        drop(turn);
        // The threads are all blocked in slow starts.
        if !is_started.load(Ordering::Relaxed)
            && let Err(error) = add_spawner_thread(&self.waiting, &self.children)
        {
            tracing::warn!(%error, "can't add a thread to start a process: it waits for another slow start");
        }
        result.await.unwrap_or_else(|_| Err(gone()))
    }
}

/// A start's turn to be prepared, see [`ProcessSpawner::wait_turn`].
#[derive(Debug)]
pub(super) struct StartTurn {
    _permit: OwnedSemaphorePermit,
}

/// Adds a thread that runs jobs until the sender is dropped. Its id follows when it runs.
fn add_spawner_thread(
    waiting: &Arc<Mutex<mpsc::Receiver<SpawnJob>>>,
    children: &Arc<ChildLists>,
) -> io::Result<mpsc::Receiver<rustix::process::Pid>> {
    let (started, thread) = mpsc::sync_channel(1);
    let (waiting, children) = (Arc::clone(waiting), Arc::clone(children));
    let next = move || waiting.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
    let run = move || {
        let thread = rustix::thread::gettid();
        // Only the caller that adds the first thread waits for it.
        let _ = started.send(thread);
        // Without them, a start takes longer.
        let mut slots = StdioSlots::open().ok();
        children.add_starter(thread.as_raw_nonzero().get());
        std::iter::from_fn(next).for_each(|job| job.run_job(&mut slots));
    };
    thread::Builder::new().name("process-spawner".to_owned()).spawn(run)?;
    Ok(thread)
}

impl SpawnJob {
    fn run_job(self, slots: &mut Option<StdioSlots>) {
        let Self { start: PreparedStart { mut image, mark, mut kill_scope }, shared, is_started, reply } =
            self;
        is_started.store(true, Ordering::Relaxed);
        // Before the child exists: until its pid is registered, the reaper leaves processes with this mark alone.
        shared.begin_start(mark);
        let mut result = sys::spawn_image(&image, slots);
        if let Err(StartError { step: StartStep::Cgroup, source: error }) = &result
            && !kill_scope.is_limited()
        {
            tracing::warn!(%error, "can't start a process in its cgroup: its descendants are identified by their parents");
            (image.cgroup, kill_scope) = (None, KillScope::ByParents);
            result = sys::spawn_image(&image, slots);
        }
        shared.end_start(mark, result.as_ref().ok().map(|child| child.pid));
        // From now on only the child has its descriptors.
        drop(image);
        let main = result.map(|child| MainProcess::new(shared, child, mark, kill_scope, Kinship::Descends));
        // If the caller no longer waits, this drops the process and so kills it.
        drop(reply.send(main));
    }
}

/// The processes that are killed with a main process, and the way in which they are identified.
#[derive(Debug)]
pub(super) enum KillScope {
    /// No others.
    MainOnly,
    /// The descendants, by their parents, and by their mark among those that descend from this program.
    ByParents,
    /// The descendants, by their cgroup; as above if they have left it.
    WholeCgroup(Arc<RunCgroup>),
}

impl KillScope {
    pub(super) fn from_process(
        process: &Process,
        mark: ProcessMark,
        host: Option<&HostCgroup>,
    ) -> Result<Self, CgroupLimitError> {
        let settings = process.limits.cgroup_settings();
        let (cgroup, setting) = match (settings.first(), process.kill_mode, host) {
            (None, KillMode::Process, _) => return Ok(Self::MainOnly),
            (None, _, None) => return Ok(Self::ByParents),
            (Some(setting), KillMode::Process, _) => {
                // The kernel kills a cgroup with all its processes, among them those that must survive.
                return Err(CgroupLimitError::KillMode { setting: setting.file });
            }
            (Some(setting), _, None) => {
                let source = None;
                return Err(CgroupLimitError::NoCgroup { setting: setting.file, source });
            }
            (setting, _, Some(host)) => (host, setting),
        };
        match (cgroup.create_run_cgroup(mark), setting) {
            (Ok(run), None) => Ok(Self::WholeCgroup(Arc::new(run))),
            (Ok(mut run), Some(_)) => {
                cgroup.set_limits(&mut run, &settings)?;
                Ok(Self::WholeCgroup(Arc::new(run)))
            }
            (Err(error), None) => {
                tracing::warn!(%error, "can't create a cgroup for a process: its descendants are identified by their parents");
                Ok(Self::ByParents)
            }
            (Err(error), Some(setting)) => {
                // Without its cgroup it would run without its limits.
                Err(CgroupLimitError::NoCgroup { setting: setting.file, source: Some(error) })
            }
        }
    }

    /// Returns whether the process may run only in its cgroup.
    fn is_limited(&self) -> bool {
        matches!(self, Self::WholeCgroup(cgroup) if cgroup.is_limited)
    }

    /// The processes in the cgroup that the kernel has killed because memory ran out.
    fn oom_kill(&self) -> Option<OomKill> {
        match self {
            Self::WholeCgroup(cgroup) => cgroup.oom_kill(),
            _ => None,
        }
    }

    pub(super) fn cgroup_path(&self) -> Option<&Path> {
        match self {
            Self::WholeCgroup(cgroup) => Some(cgroup.dir()),
            _ => None,
        }
    }

    /// The directory of the cgroup in which the main process starts. Called once, before the start.
    pub(super) fn take_cgroup_dir(&mut self) -> Option<OwnedFd> {
        match self {
            Self::WholeCgroup(cgroup) => {
                Arc::get_mut(cgroup).expect("nothing else refers to it before the start").start_dir.take()
            }
            _ => None,
        }
    }
}

/// A main process that its owner has to reap. If it is dropped before, it is killed and becomes an orphan.
#[derive(Debug)]
pub(super) struct MainProcess {
    pub(super) shared: Arc<HostState>,
    pub(super) mark: ProcessMark,
    pub(super) pid: i32,
    pub(super) pidfd: Arc<OwnedFd>,
    pub(super) kill_scope: KillScope,
    kinship: Kinship,
    reaped: bool,
    /// It runs on if this is dropped: its adoption is not complete.
    pub(super) is_left_alone: bool,
}

impl MainProcess {
    /// The process is in the registry of the host.
    pub(super) fn new(
        shared: Arc<HostState>,
        child: StartedChild,
        mark: ProcessMark,
        kill_scope: KillScope,
        kinship: Kinship,
    ) -> Self {
        let StartedChild { pid, pidfd } = child;
        Self {
            shared,
            mark,
            kill_scope,
            kinship,
            pid,
            pidfd: Arc::new(pidfd),
            reaped: false,
            is_left_alone: false,
        }
    }

    /// The cgroup of its own, with all that has not left it.
    pub(super) fn cgroup(&self) -> Option<Arc<RunCgroup>> {
        match &self.kill_scope {
            KillScope::WholeCgroup(cgroup) => Some(Arc::clone(cgroup)),
            _ => None,
        }
    }

    /// Records that it was reaped: the pid may refer to another process from now on.
    pub(super) fn mark_reaped(&mut self) {
        if !std::mem::replace(&mut self.reaped, true) {
            self.shared.forget_main(self.pid);
        }
    }

    pub(super) fn send_signal(&self, signal: Signal) -> io::Result<()> {
        sys::send_signal(self.pidfd.as_fd(), signal.as_number())
    }

    /// Kills it, and its descendants if they are in scope, without waiting for the exits.
    pub(super) fn kill(&self) {
        match self.descendants() {
            Some(mut descendants) => descendants.kill_all(&self.shared.snapshots),
            // It may have exited.
            None => drop(self.send_signal(Signal::KILL)),
        }
    }

    /// The processes that the kernel has killed because memory ran out.
    pub(super) fn oom_kill(&self) -> Option<OomKill> {
        self.kill_scope.oom_kill()
    }

    /// The descendants in its kill scope; `None` if only the process itself is in it.
    pub(super) fn descendants(&self) -> Option<DescendantSet> {
        if let KillScope::MainOnly = self.kill_scope {
            return None;
        }
        let pidfd = Arc::clone(&self.pidfd);
        Some(DescendantSet::new(self.mark, self.kinship, self.pid, pidfd, self.cgroup()))
    }
}

impl Drop for MainProcess {
    fn drop(&mut self) {
        if !self.reaped {
            if !self.is_left_alone {
                self.kill();
            }
            self.shared.forget_main(self.pid);
        }
    }
}

/// The ends of a process' standard output and error.
#[derive(Debug)]
pub(super) struct OutputEnds {
    pub(super) readers: [OwnedFd; 2],
    pub(super) writers: [OwnedFd; 2],
}

pub(super) fn open_pipes() -> io::Result<OutputEnds> {
    let (stdout, child_stdout) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, child_stderr) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    Ok(OutputEnds { readers: [stdout, stderr], writers: [child_stdout, child_stderr] })
}

/// Prepares everything that can be prepared before there is a process.
pub(super) fn build_image(
    process: &Process,
    mark: ProcessMark,
    notify_env: &[(OsString, OsString)],
    output: [OwnedFd; 2],
) -> io::Result<ExecImage> {
    if process.uid.is_some() && process.gid.is_none() {
        let hint = "uid is set without gid: set a gid too, or the process would keep this program's group";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, hint));
    }
    let [stdout, stderr] = output;
    let [stdin, stdout, stderr] = [process.stdin.open()?, stdout, stderr].map(move_above_stdio);
    let args =
        std::iter::once(process.program_path.as_os_str()).chain(process.args.iter().map(OsString::as_os_str));
    Ok(ExecImage {
        programs: candidate_paths(process)?,
        args: args.map(c_string).collect::<io::Result<_>>()?,
        env: process
            .env
            .iter()
            .chain(notify_env.iter().map(|(key, value)| (key, value)))
            .map(|(key, value)| env_entry(key, value))
            .collect::<io::Result<_>>()?,
        dir: working_dir(process)?,
        stdio: [stdin?, stdout?, stderr?],
        uid: process.uid,
        gid: process.gid,
        setup: child_setup::build_setup(process)?,
        locks: mark.as_limit(),
        cgroup: None,
        dies_with_parent: true,
    })
}

/// The directory that the child enters. With read-only paths it enters this program's anew: the one that it
/// inherits is on the mount below them, to which it can write.
#[allow(clippy::disallowed_methods, reason = "the child inherits this directory, and enters it by its path")]
fn working_dir(process: &Process) -> io::Result<Option<CString>> {
    let dir = match &process.current_dir {
        Some(dir) if dir.is_absolute() => Some(dir.clone()),
        dir if process.privileges.read_only_paths.is_empty() => dir.clone(),
        dir => Some(std::env::current_dir()?.join(dir.as_deref().unwrap_or(Path::new("")))),
    };
    dir.map(|dir| c_string(dir.as_os_str())).transpose()
}

/// Moves a descriptor above 0, 1 and 2, in case this program has closed one of those.
fn move_above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    if fd.as_raw_fd() > 2 { Ok(fd) } else { Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?) }
}

/// The candidate paths of the program, in search order.
fn candidate_paths(process: &Process) -> io::Result<Vec<CString>> {
    let program = process.program_path.as_os_str();
    if program.as_bytes().contains(&b'/') {
        return Ok(vec![c_string(program)?]);
    }
    let path = process.env.get(OsStr::new("PATH")).map_or(DEFAULT_PATH, |path| path.as_bytes());
    // As in execvp(3), an empty part of the path is the working directory.
    path.split(|&byte| byte == b':')
        .map(|dir| c_string(Path::new(OsStr::from_bytes(dir)).join(program).as_os_str()))
        .collect()
}

fn env_entry(key: &OsStr, value: &OsStr) -> io::Result<CString> {
    if key.is_empty() || key.as_bytes().contains(&b'=') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("invalid variable name {key:?}")));
    }
    let mut pair = key.as_bytes().to_vec();
    pair.push(b'=');
    pair.extend_from_slice(value.as_bytes());
    c_string(OsStr::from_bytes(&pair))
}

pub(super) fn c_string(text: &OsStr) -> io::Result<CString> {
    let nul =
        |_| io::Error::new(io::ErrorKind::InvalidInput, format!("{} contains a NUL byte", text.display()));
    CString::new(text.as_bytes()).map_err(nul)
}
