//! Child processes, compared with runit and s6: the time from a kill to the restart, and the delay of a stop
//! that has to kill.
//!
//! `cargo xtask bench supervisor-process`

use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child as StdChild, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nodekeel_supervisor::process::{CgroupParent, Process, StdinSource};
use nodekeel_supervisor::{Backoff, ChildPolicy, Context, Failure, OutputOrigin, Supervisor};
use rustix::fs::inotify;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use testbed::bench::{BenchRow, median, percentile};
use tokio::sync::Notify;

const SAMPLES: usize = 200;
/// s6-supervise pauses for a second after each exit, whatever its configuration, so it is measured only in
/// each fifth pass.
const S6_INTERVAL: usize = 5;
/// runsv pauses for a second after a run shorter than that, so each run lasts longer: the restart is
/// measured, not the pause.
const SERVICE_LIFETIME: Duration = Duration::from_millis(1100);
/// The maximum ratio of a restart's duration to runit's.
const RUNIT_RATIO: f64 = 1.1;
/// The supervisor without cgroups, which identifies descendants by their mark alone.
const WITHOUT_CGROUPS: &str = "nodekeel-without-cgroups";
const EVENT_TIMEOUT: Duration = Duration::from_secs(10);

const STOPS: usize = 20;
const GRACE: Duration = Duration::from_millis(300);
/// The last of them has forked twice, is in a new session and ignores TERM.
const STUBBORN_SCRIPT: &str = r#"(setsid sh -c 'trap "" TERM; echo up; exec sleep 100' &); exec sleep 100"#;

fn main() -> Result<()> {
    let mut args = std::env::args();
    // The peers start it with its path or with its bare name.
    if args.next().is_some_and(|name| Path::new(&name).ends_with("run")) {
        return run_service();
    }
    // A separate process, like the peers.
    if args.next().as_deref() == Some("supervise") {
        let program = PathBuf::from(args.next().context("the program to supervise")?);
        return supervise(&program, args.next().is_some());
    }
    let dir = tempfile::tempdir()?;
    let start_ours = |name: &'static str| {
        Contender::start(dir.path(), name, |service| {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("supervise").arg(service.join("run"));
            command.args((name == WITHOUT_CGROUPS).then_some(name));
            Ok(command)
        })
    };
    let (mut ours, mut marked) = (start_ours("nodekeel")?, start_ours(WITHOUT_CGROUPS)?);
    let mut runit = start_peer(dir.path(), "runit", "runsv");
    let mut s6 = start_peer(dir.path(), "s6", "s6-supervise");
    let mut bare = Vec::with_capacity(SAMPLES);
    for round in 0..SAMPLES {
        wait_lifetime();
        // In turn, so that a host that becomes slower in between slows all of them; and each as often the first,
        // because after the wait the caches are cold and the processors sleep.
        let mut contenders: Vec<_> =
            [Some(&mut ours), Some(&mut marked), runit.as_mut()].into_iter().flatten().collect();
        let first = round % contenders.len();
        contenders.rotate_left(first);
        contenders.into_iter().try_for_each(Contender::sample)?;
        bare.push(time_bare_start()?);
        if let Some(s6) = s6.as_mut().filter(|_| round % S6_INTERVAL == 0) {
            s6.sample()?;
        }
    }
    let mut rows = restart_rows(&ours, runit.as_ref(), s6.as_ref(), &bare);
    let work = "the same without cgroups: the difference is what a dedicated cgroup of each start costs, p50";
    rows.push(BenchRow::new("restart-p50-marked", work, "ms", median(&marked.samples)).limit(median(&bare)));
    drop((ours, marked, runit, s6));
    rows.push(stop_row()?);
    testbed::bench::write_rows("supervisor-process", &rows)?;
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "that time goes by is the event")]
fn wait_lifetime() {
    std::thread::sleep(SERVICE_LIFETIME);
}

fn restart_rows(
    ours: &Contender,
    runit: Option<&Contender>,
    s6: Option<&Contender>,
    bare: &[f64],
) -> Vec<BenchRow> {
    let mut rows = Vec::new();
    for (percent, goal) in [(50.0, 1.5), (99.0, 5.0)] {
        for (name, peer, pause) in [("runit", runit, ""), ("s6", s6, ", which pauses for a second")] {
            let goal = match peer {
                Some(runit) if name == "runit" => RUNIT_RATIO * percentile(&runit.samples, percent),
                _ => goal,
            };
            let row = BenchRow::new(
                format!("restart-p{percent}-{name}"),
                format!("kill -9 of a supervised child to the exec of the next, no backoff, p{percent}, compared with {name}{pause}; limit: fork, exec and wait of /bin/true"),
                "ms",
                percentile(&ours.samples, percent),
            )
            .limit(percentile(bare, percent))
            .goal_at_most(goal);
            rows.push(match peer {
                Some(peer) => row.peer(peer.name, &peer.version, percentile(&peer.samples, percent)),
                None => row,
            });
        }
    }
    rows
}

/// The service: runs until its input ends. It is a program of this bench, because s6-supervise passes
/// arguments.
fn run_service() -> Result<()> {
    io::copy(&mut io::stdin(), &mut io::sink())?;
    Ok(())
}

/// A supervisor of one service, which is a copy of this program that reads from an idle pipe.
struct Contender {
    name: &'static str,
    version: String,
    supervisor: StdChild,
    /// Reports the exec of the service.
    opened: OwnedFd,
    service: PathBuf,
    child: Pid,
    /// Milliseconds.
    samples: Vec<f64>,
    /// Keeps the service's input open.
    _stdin: io::PipeWriter,
}

impl Contender {
    fn start(dir: &Path, name: &'static str, command: impl FnOnce(&Path) -> Result<Command>) -> Result<Self> {
        let service = dir.join(name);
        fs::create_dir(&service)?;
        fs::copy(std::env::current_exe()?, service.join("run"))?;
        // Every exec opens its file, and nothing else opens this one.
        let opened = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK)?;
        inotify::add_watch(&opened, service.join("run"), inotify::WatchFlags::OPEN)?;
        let (reader, writer) = io::pipe()?;
        let supervisor = command(&service)?
            .stdin(Stdio::from(reader))
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let version = package_version(name);
        let mut contender = Self {
            name,
            version,
            supervisor,
            opened,
            service,
            child: Pid::INIT,
            samples: Vec::with_capacity(SAMPLES),
            _stdin: writer,
        };
        contender.wait_opened()?;
        contender.child = contender.find_child()?;
        Ok(contender)
    }

    fn sample(&mut self) -> Result<()> {
        self.forget_opened()?;
        let started = Instant::now();
        rustix::process::kill_process(self.child, Signal::KILL)?;
        self.wait_opened()?;
        self.samples.push(started.elapsed().as_secs_f64() * 1e3);
        self.child = self.find_child()?;
        Ok(())
    }

    fn wait_opened(&self) -> Result<()> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut fds = [PollFd::new(&self.opened, PollFlags::IN)];
        let within = Timespec { tv_sec: i64::try_from(EVENT_TIMEOUT.as_secs())?, tv_nsec: 0 };
        anyhow::ensure!(poll(&mut fds, Some(&within))? == 1, "{} starts nothing", self.name);
        Ok(())
    }

    /// Discards events of the previous start.
    fn forget_opened(&self) -> Result<()> {
        let mut events = [MaybeUninit::uninit(); 1024];
        let mut reader = inotify::Reader::new(&self.opened, &mut events);
        loop {
            match reader.next() {
                Ok(_) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The new child, which may not have completed its exec. This is not measured.
    fn find_child(&self) -> Result<Pid> {
        let runs = |pid: &i32| {
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == self.service.join("run"))
        };
        let is_other = |pid: &i32| *pid != self.child.as_raw_nonzero().get();
        testbed::wait_until(EVENT_TIMEOUT, "the next run to be there", || {
            let found = children(self.supervisor.id())?.into_iter().filter(is_other).find(runs);
            found.and_then(Pid::from_raw).context("it is not")
        })
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        // Each of them stops its service when it is stop_signal to stop.
        if let Some(pid) = i32::try_from(self.supervisor.id()).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        let _ = self.supervisor.wait();
    }
}

/// `None` if the peer is not installed.
fn start_peer(dir: &Path, name: &'static str, program: &str) -> Option<Contender> {
    let started = Contender::start(dir, name, |service| {
        let mut command = Command::new(program);
        command.arg(service);
        Ok(command)
    });
    started.map_err(|error| println!("without the peer {name}: {error:#}")).ok()
}

/// The version of the package: neither program prints its own.
fn package_version(package: &str) -> String {
    let output =
        Command::new("dpkg-query").args(["-W", "-f=${Version}", package]).stderr(Stdio::null()).output();
    let version = output.ok().filter(|output| output.status.success());
    version
        .map_or_else(|| "unknown".to_owned(), |output| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The children of all threads of a program.
fn children(pid: u32) -> Result<Vec<i32>> {
    let mut children = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may have exited in between.
        let text = fs::read_to_string(thread?.path().join("children")).unwrap_or_default();
        children.extend(text.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    Ok(children)
}

/// The lower bound of a restart: fork, exec and wait.
fn time_bare_start() -> Result<f64> {
    let started = Instant::now();
    let status = Command::new("/bin/true").status()?;
    anyhow::ensure!(status.success(), "/bin/true: {status}");
    Ok(started.elapsed().as_secs_f64() * 1e3)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn supervise(program: &Path, without_cgroups: bool) -> Result<()> {
    let stdin = StdinSource::from(File::open("/dev/stdin")?);
    let process = Process::new(program).stdin(stdin);
    let policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
    let mut stop_signal = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let cgroups = if without_cgroups { CgroupParent::Disabled } else { CgroupParent::Current };
    let builder = Supervisor::builder().default_policy(policy).cgroup_parent(cgroups);
    let supervisor = builder.start(root(process));
    stop_signal.recv().await;
    supervisor.shutdown().await;
    Ok(())
}

fn root(process: Process) -> impl nodekeel_supervisor::Runnable {
    move |ctx: Context| {
        let process = process.clone();
        async move {
            ctx.run_child("p", process)?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        }
    }
}

/// The time beyond its grace period that a stop takes if a descendant has to be found and killed.
#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn stop_row() -> Result<BenchRow> {
    let mut samples = Vec::with_capacity(STOPS);
    for _ in 0..STOPS {
        let up = Arc::new(Notify::new());
        let notify = Arc::clone(&up);
        let process = Process::new("/bin/sh")
            .args(["-c", STUBBORN_SCRIPT])
            .env("PATH", "/usr/bin:/bin")
            .grace_period(GRACE);
        let supervisor = Supervisor::builder()
            .output_sink(move |_: OutputOrigin<'_>| NotifyOnWrite(Arc::clone(&notify)))
            .start(root(process));
        tokio::time::timeout(EVENT_TIMEOUT, up.notified()).await.context("the process comes up")?;
        let started = Instant::now();
        let report = supervisor.shutdown().await;
        samples.push((started.elapsed().as_secs_f64() - GRACE.as_secs_f64()) * 1e3);
        anyhow::ensure!(report.stragglers.is_empty(), "{report:?}");
    }
    let work = format!(
        "stop of a process with a descendant that has forked twice, runs in a new session and ignores TERM: time over its grace period of {GRACE:?}, p50"
    );
    Ok(BenchRow::new("stop-over-grace", work, "ms", median(&samples)).goal_at_most(50.0))
}

/// Notifies that something was written.
struct NotifyOnWrite(Arc<Notify>);

impl io::Write for NotifyOnWrite {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.notify_one();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
