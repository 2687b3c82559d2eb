//! The birth of a main process.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use rustix::pipe::PipeFlags;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::cgroup::{Cgroup, Home};
use super::descendants::Family;
use super::error::ProcessError;
use super::host::Shared;
use super::status::Signal;
use super::tag::Tag;
use super::{KillMode, Process, Stdin};
use crate::sys::{self, Image, Step};

/// Where a program without a slash is looked for when the process has no `PATH`.
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

/// When a start that no thread has begun with gets a thread of its own.
const BUSY: Duration = Duration::from_millis(100);

/// The threads on which all processes of a host are born.
///
/// A parent-death signal comes when the thread ends that has forked, not when its program does. So they live as long as
/// the host. It is one, unless the kernel takes long over a program, on a mount that does not answer, say: the thread
/// stands still until it runs, and the others must not wait for that.
#[derive(Debug)]
pub(super) struct Spawner {
    jobs: mpsc::Sender<Job>,
    waiting: Arc<Mutex<mpsc::Receiver<Job>>>,
    thread: i32,
}

#[derive(Debug)]
struct Job {
    image: Image,
    tag: Tag,
    reach: Reach,
    shared: Arc<Shared>,
    begun: oneshot::Sender<()>,
    born: oneshot::Sender<Result<Main, (Step, io::Error)>>,
}

impl Spawner {
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, waiting) = mpsc::channel();
        let waiting = Arc::new(Mutex::new(waiting));
        let thread = add_thread(&waiting)?;
        Ok(Self { jobs, waiting, thread })
    }

    /// The id of the first thread.
    pub(super) fn thread(&self) -> i32 {
        self.thread
    }

    /// Starts an image. If this is dropped meanwhile, the process is killed.
    pub(super) async fn spawn(
        &self,
        image: Image,
        tag: Tag,
        reach: Reach,
        shared: &Arc<Shared>,
    ) -> Result<Main, (Step, io::Error)> {
        let ((begun, has_begun), (born, result)) = (oneshot::channel(), oneshot::channel());
        let job = Job { image, tag, reach, shared: Arc::clone(shared), begun, born };
        let gone = || (Step::Fork, io::Error::other("the thread that starts processes has ended"));
        self.jobs.send(job).map_err(|_| gone())?;
        if timeout(BUSY, has_begun).await.is_err()
            && let Err(error) = add_thread(&self.waiting)
        {
            tracing::warn!(%error, "a process waits for one that takes long to start: no thread for it");
        }
        result.await.unwrap_or_else(|_| Err(gone()))
    }
}

/// Adds a thread that takes jobs until there is nobody left to give any. Returns its id.
fn add_thread(waiting: &Arc<Mutex<mpsc::Receiver<Job>>>) -> io::Result<i32> {
    let (started, thread) = mpsc::sync_channel(1);
    let waiting = Arc::clone(waiting);
    let next = move || waiting.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
    let run = move || {
        // The receiver waits below.
        let _ = started.send(rustix::thread::gettid());
        std::iter::from_fn(next).for_each(Job::run);
    };
    thread::Builder::new().name("process-spawner".to_owned()).spawn(run)?;
    Ok(thread.recv().map_err(io::Error::other)?.as_raw_nonzero().get())
}

impl Job {
    fn run(self) {
        let Self { mut image, tag, mut reach, shared, begun, born } = self;
        // Who no longer waits for it needs no answer.
        let _ = begun.send(());
        shared.begin_start(tag);
        let mut result = sys::spawn(&image);
        if let Err((Step::Cgroup, error)) = &result {
            tracing::warn!(%error, "a process can't be born into its cgroup: its descendants are known by their mark");
            (image.cgroup, reach) = (None, Reach::Marked);
            result = sys::spawn(&image);
        }
        shared.end_start(tag, result.as_ref().ok().map(|(pid, _)| *pid));
        // Its descriptors are the child's alone from now on.
        drop(image);
        let main = result.map(|(pid, pidfd)| Main {
            shared,
            tag,
            reach,
            pid,
            pidfd: Arc::new(pidfd),
            waited: false,
        });
        // Who no longer waits for it drops it, and so kills it.
        drop(born.send(main));
    }
}

/// What goes with a main process, and how it is known.
#[derive(Debug)]
pub(super) enum Reach {
    /// Nobody.
    Main,
    /// Its descendants, by their mark.
    Marked,
    /// Its descendants, by their cgroup; by their mark where they have left that.
    Cgroup(Arc<Cgroup>),
}

impl Reach {
    pub(super) fn of(kill: KillMode, tag: Tag, home: Option<&Home>) -> Self {
        if kill == KillMode::Process {
            return Self::Main;
        }
        match home.map(|home| home.add(tag)) {
            None => Self::Marked,
            Some(Ok(cgroup)) => Self::Cgroup(Arc::new(cgroup)),
            Some(Err(error)) => {
                tracing::warn!(%error, "no cgroup for a process: its descendants are known by their mark");
                Self::Marked
            }
        }
    }

    /// Where the main process is to be born.
    pub(super) fn directory(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::Cgroup(cgroup) => cgroup.directory().map(Some),
            _ => Ok(None),
        }
    }
}

/// A main process that somebody has to wait for. Dropped before, it is killed, and becomes an orphan.
#[derive(Debug)]
pub(super) struct Main {
    pub(super) shared: Arc<Shared>,
    pub(super) tag: Tag,
    pub(super) pid: i32,
    pub(super) pidfd: Arc<OwnedFd>,
    reach: Reach,
    waited: bool,
}

impl Main {
    /// Its status has been taken: the pid may mean another process from now on.
    pub(super) fn waited(&mut self) {
        if !std::mem::replace(&mut self.waited, true) {
            self.shared.forget(self.pid);
        }
    }

    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        sys::send_signal(self.pidfd.as_fd(), signal.number())
    }

    /// Kills it, and its descendants where they go with it, without waiting for it.
    pub(super) fn kill(&self) {
        match self.family() {
            Some(mut family) => family.kill(&self.shared.snapshots),
            // It may have ended.
            None => drop(self.signal(Signal::KILL)),
        }
    }

    /// Those that go with it.
    pub(super) fn family(&self) -> Option<Family> {
        let cgroup = match &self.reach {
            Reach::Main => return None,
            Reach::Marked => None,
            Reach::Cgroup(cgroup) => Some(Arc::clone(cgroup)),
        };
        Some(Family::new(self.tag, (self.pid, Arc::clone(&self.pidfd)), cgroup))
    }
}

impl Drop for Main {
    fn drop(&mut self) {
        if !self.waited {
            self.kill();
            self.shared.forget(self.pid);
        }
    }
}

/// This program's ends of a process' pipes.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

/// Prepares everything that can be prepared before there is a process.
pub(super) fn image(process: &Process, tag: Tag, notify_socket: Option<String>) -> io::Result<(Image, Ends)> {
    if process.uid.is_some() && process.gid.is_none() {
        let advice = "a user without a group would keep this program's group: give it a gid too";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, advice));
    }
    let (stdout, child_stdout) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, child_stderr) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let stdio = [stdin(&process.stdin)?, child_stdout, child_stderr];
    let [stdin, child_stdout, child_stderr] = stdio.map(above_stdio);
    let notify_socket = notify_socket.map(|socket| (OsString::from("NOTIFY_SOCKET"), OsString::from(socket)));
    let args =
        std::iter::once(process.program.as_os_str()).chain(process.args.iter().map(OsString::as_os_str));
    let image = Image {
        programs: programs(process)?,
        args: args.map(c_string).collect::<io::Result<_>>()?,
        env: process
            .env
            .iter()
            .chain(notify_socket.iter().map(|(k, v)| (k, v)))
            .map(variable)
            .collect::<io::Result<_>>()?,
        dir: process.current_dir.as_ref().map(|dir| c_string(dir.as_os_str())).transpose()?,
        stdio: [stdin?, child_stdout?, child_stderr?],
        uid: process.uid,
        gid: process.gid,
        locks: tag.limit(),
        cgroup: None,
    };
    Ok((image, Ends { stdout, stderr }))
}

fn stdin(stdin: &Stdin) -> io::Result<OwnedFd> {
    match stdin {
        Stdin::Null => Ok(File::open("/dev/null")?.into()),
        Stdin::File(file) => file.try_clone(),
        // A file in memory rather than a pipe: nobody has to feed it.
        Stdin::Bytes(bytes) => {
            let file = rustix::fs::memfd_create("stdin", MemfdFlags::CLOEXEC)?;
            let mut written = 0;
            while written < bytes.len() {
                // At a position, so that the child begins at the start.
                written += rustix::io::pwrite(&file, &bytes[written..], written as u64)?;
            }
            Ok(file)
        }
    }
}

/// Moved out of the way of 0, 1 and 2, should this program have closed one of those.
fn above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    if fd.as_raw_fd() > 2 { Ok(fd) } else { Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?) }
}

/// The paths where the program may be.
fn programs(process: &Process) -> io::Result<Vec<CString>> {
    let program = process.program.as_os_str();
    if program.as_bytes().contains(&b'/') {
        return Ok(vec![c_string(program)?]);
    }
    let path = process.env.get(OsStr::new("PATH")).map_or(DEFAULT_PATH, |path| path.as_bytes());
    path.split(|&byte| byte == b':')
        .map(|dir| c_string(Path::new(OsStr::from_bytes(dir)).join(program).as_os_str()))
        .collect()
}

fn variable((key, value): (&OsString, &OsString)) -> io::Result<CString> {
    if key.is_empty() || key.as_bytes().contains(&b'=') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{key:?} can't name a variable")));
    }
    let mut pair = key.clone().into_vec();
    pair.push(b'=');
    pair.extend_from_slice(value.as_bytes());
    c_string(OsStr::from_bytes(&pair))
}

fn c_string(text: &OsStr) -> io::Result<CString> {
    let nul =
        |_| io::Error::new(io::ErrorKind::InvalidInput, format!("{} has a NUL byte in it", text.display()));
    CString::new(text.as_bytes()).map_err(nul)
}

/// The error that tells who could not be started, and what to do.
pub(super) fn failed(process: &Process, step: Step, source: io::Error) -> ProcessError {
    ProcessError::Start { program: process.program.clone(), advice: advice(process, step, &source), source }
}

fn advice(process: &Process, step: Step, error: &io::Error) -> String {
    let program = &process.program;
    let is_path = program.as_os_str().as_bytes().contains(&b'/');
    match (step, error.raw_os_error()) {
        (Step::Fork, Some(libc::EAGAIN)) => {
            "no more processes may be made: raise `ulimit -u` or the cgroup's pids.max".into()
        }
        (Step::Setup, Some(libc::EINVAL)) => {
            "raise the hard limit of file locks, `ulimit -Hx unlimited`".into()
        }
        (Step::Setup, Some(libc::EMFILE | libc::ENFILE)) => {
            "no more files may be open: raise `ulimit -n`".into()
        }
        (Step::Setup, _) => "it could not be prepared".into(),
        (Step::Identity, _) => "its user or group can't be taken on: only root may".into(),
        (Step::Directory, _) => {
            let dir = process.current_dir.as_deref().unwrap_or(Path::new("."));
            format!("its working directory {} can't be entered: create it or give another", dir.display())
        }
        (Step::Exec, Some(libc::ENOENT)) if !is_path => {
            "it is not in the PATH it is given: install it or give its full path".into()
        }
        (Step::Exec, Some(libc::ENOENT)) if program.exists() => {
            "its interpreter or its loader is missing: see its #! line, or `ldd`".into()
        }
        (Step::Exec, Some(libc::ENOENT | libc::ENOTDIR)) => {
            "there is no such file: install it or correct the path".into()
        }
        (Step::Exec, Some(libc::EACCES)) => {
            "it may not be executed: check its mode, its directories' and the mount's noexec".into()
        }
        (Step::Exec, Some(libc::ENOEXEC)) => {
            "it is no program of this machine, nor a script with a #! line".into()
        }
        (Step::Exec, Some(libc::E2BIG)) => "its arguments and environment are too long".into(),
        (Step::Fork | Step::Exec | Step::Cgroup, _) => "the kernel refused".into(),
    }
}
