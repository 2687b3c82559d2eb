//! Real child processes: obedient ones, and ones that try to survive.

mod cgroup;
mod descendants;
mod exit;
mod handle;
mod limits;
mod liveness;
mod load;
mod mass_stop;
mod other_children;
mod output;
mod privileges;
mod readiness;
mod records;
mod rounds;
mod start;
mod watchdog;

use std::fs;
use std::io::{self, BufRead as _, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_supervisor::process::{CgroupParent, Process, ProcessExit};
use nodekeel_supervisor::testing::EventRecorder;
use nodekeel_supervisor::{
    Backoff, ChildPolicy, ChildSpec, Event, ExitReason, OutputOrigin, RestartPolicy, RunnableChange,
    RunnableState, Supervisor, SupervisorBuilder,
};
use tokio::sync::Notify;

use crate::harness::parent_of;

/// The maximum duration of a stop beyond the grace period.
const STOP_MARGIN: Duration = Duration::from_millis(50);

/// The timeout for output that is expected at once.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(30);

/// Held by a test that measures, and by tests that load the whole host.
static EXCLUSIVE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// In cgroups if possible; `NODEKEEL_CGROUPS=none` tests identification by parents.
fn configured_cgroups() -> CgroupParent {
    match std::env::var("NODEKEEL_CGROUPS") {
        Ok(none) if none == "none" => CgroupParent::Disabled,
        Ok(parent) => CgroupParent::Path(parent.into()),
        Err(_) => CgroupParent::Current,
    }
}

/// A shell that runs a script, with the tools of the base system.
fn sh(script: &str) -> Process {
    Process::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
}

/// Sends a signal, named as in `kill -s`. The shell's own `kill` is on every machine.
fn send_signal(signal: &str, pid: i32) {
    let kill = ["-c", "kill -s $0 $1", signal, &pid.to_string()];
    let status = Command::new("/bin/sh").args(kill).status().expect("a shell runs");
    assert!(status.success(), "no signal {signal} for {pid}");
}

/// A program in the Perl of the base system.
fn perl(script: &str) -> Process {
    Process::new("/usr/bin/perl").args(["-e", script])
}

/// A supervisor of processes. Most tests have one, `root.p`.
struct ProcessFixture {
    supervisor: Supervisor,
    recorder: EventRecorder,
    output: OutputBuffer,
    /// Of notification sockets, unless the test has one.
    _sockets: Option<tempfile::TempDir>,
}

impl ProcessFixture {
    /// A process that is not restarted.
    fn run_once(process: Process) -> Self {
        Self::with_cgroups(process, configured_cgroups())
    }

    /// A process that restarts at once.
    fn restart_always(process: Process) -> Self {
        let builder = Supervisor::builder().cgroup_parent(configured_cgroups());
        Self::start(builder, RestartPolicy::Always, None, vec![("p", process)])
    }

    /// A process whose stop timeout is shorter than its grace period.
    fn with_stop_timeout(process: Process, stop_within: Duration) -> Self {
        let builder = Supervisor::builder().cgroup_parent(configured_cgroups());
        Self::start(builder, RestartPolicy::Never, Some(stop_within), vec![("p", process)])
    }

    /// A process that is not restarted, with this parent of its cgroup.
    fn with_cgroups(process: Process, cgroups: CgroupParent) -> Self {
        let builder = Supervisor::builder().cgroup_parent(cgroups);
        Self::start(builder, RestartPolicy::Never, None, vec![("p", process)])
    }

    fn start(
        builder: SupervisorBuilder,
        restart: RestartPolicy,
        stop_within: Option<Duration>,
        processes: Vec<(&'static str, Process)>,
    ) -> Self {
        let sockets = tempfile::tempdir().expect("a directory");
        let builder = builder.notify_directory(sockets.path());
        Self { _sockets: Some(sockets), ..Self::start_built(builder, restart, stop_within, processes) }
    }

    /// With a directory of notification sockets of its own.
    fn start_built(
        builder: SupervisorBuilder,
        restart: RestartPolicy,
        stop_within: Option<Duration>,
        processes: Vec<(&'static str, Process)>,
    ) -> Self {
        let (recorder, output) = (EventRecorder::default(), OutputBuffer::default());
        let backoff = Backoff { initial: Duration::ZERO, ..Backoff::default() };
        let policy = ChildPolicy { restart, backoff, ..ChildPolicy::default() };
        let root = parent_of(move |ctx| {
            processes.iter().try_for_each(|(name, process)| {
                let child = ChildSpec::new(*name, process.clone()).policy(policy);
                ctx.run_group([match stop_within {
                    Some(time) => child.stop_timeout(time),
                    None => child,
                }])
            })
        });
        let builder = builder.event_hook(recorder.clone()).output_sink(output.clone().sink());
        Self { supervisor: builder.start(root), recorder, output, _sockets: None }
    }

    /// Waits for the next event that brings the process into a state.
    async fn wait_for_state(&self, state: RunnableState) -> Event {
        self.recorder.wait_for_state("root.p", state).await
    }

    /// Waits for the process' next exit.
    async fn wait_exit(&self) -> (RunnableState, ExitReason) {
        let event = tokio::select! {
            event = self.wait_for_state(RunnableState::Dead) => event,
            event = self.wait_for_state(RunnableState::Done) => event,
            event = self.wait_for_state(RunnableState::Canceled) => event,
        };
        match event.change {
            RunnableChange::Exited { state, exit } => (state, exit),
            other => panic!("{other:?} is not an exit"),
        }
    }

    /// Waits for the process' next exit, which must be a failure.
    async fn wait_failure(&self) -> (String, ProcessExit) {
        match self.wait_exit().await {
            (RunnableState::Dead, ExitReason::Failed { error, process: Some(process) }) => {
                (error, (*process).clone())
            }
            other => panic!("{other:?}"),
        }
    }

    /// Stops the process, and waits until it has stopped.
    async fn stop(&self) {
        self.supervisor.stop_runnable("root.p").expect("the DN exists");
        self.wait_for_state(RunnableState::Canceled).await;
    }

    async fn shutdown(self) {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
    }
}

/// The output of the process.
#[derive(Clone, Default)]
struct OutputBuffer(Arc<OutputText>);

#[derive(Default)]
struct OutputText {
    text: Mutex<Vec<u8>>,
    more: Notify,
}

struct BufferWriter(OutputBuffer);

impl OutputBuffer {
    fn sink(self) -> impl Fn(OutputOrigin<'_>) -> BufferWriter + Send + Sync + 'static {
        move |_| BufferWriter(self.clone())
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.text.lock().expect("no panic holds it")).into_owned()
    }

    fn len(&self) -> usize {
        self.0.text.lock().expect("no panic holds it").len()
    }

    /// Waits for a line with this prefix, and returns the rest of it.
    async fn wait_line(&self, start: &str) -> String {
        let find_line = |text: &str| {
            let complete = text.rfind('\n').map_or("", |end| &text[..end]);
            complete.lines().find_map(|line| line.strip_prefix(start)).map(|rest| rest.trim().to_owned())
        };
        self.wait_for(&format!("line {start:?}"), find_line).await
    }

    /// Waits until this text has been written so often.
    async fn wait_count(&self, text: &str, count: usize) {
        let find_all = |output: &str| (output.matches(text).count() >= count).then_some(());
        self.wait_for(&format!("{count} times {text:?}"), find_all).await;
    }

    async fn wait_for<T>(&self, what: &str, find: impl Fn(&str) -> Option<T>) -> T {
        loop {
            let mut more = std::pin::pin!(self.0.more.notified());
            more.as_mut().enable();
            if let Some(found) = find(&self.text()) {
                return found;
            }
            let waited = tokio::time::timeout(OUTPUT_TIMEOUT, more).await;
            waited.unwrap_or_else(|_| panic!("no {what} in {:?}", self.text()));
        }
    }

    /// The pid after `pid ` in the output.
    async fn wait_pid(&self) -> i32 {
        self.wait_line("pid ").await.parse().expect("a pid")
    }
}

impl io::Write for BufferWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.0.text.lock().expect("no panic holds it").extend_from_slice(bytes);
        self.0.0.more.notify_waiters();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The mark that a process and all its descendants carry. It is read here from outside on purpose: a test
/// that asked the supervisor for survivors would trust the code that it tests.
fn mark_of(pid: i32) -> String {
    read_mark(pid).unwrap_or_else(|| panic!("process {pid} is gone"))
}

fn read_mark(pid: i32) -> Option<String> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max file locks"))?;
    line.split_whitespace().next().map(str::to_owned)
}

fn list_pids() -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("proc is mounted");
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// The processes with a mark, including zombies: pid, name, state and parent.
fn marked_processes(mark: &str) -> Vec<String> {
    let carries = |pid: &i32| read_mark(*pid).as_deref() == Some(mark);
    list_pids().into_iter().filter(carries).map(describe).collect()
}

fn describe(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or_else(
        |_| pid.to_string(),
        |stat| stat.split_whitespace().take(4).collect::<Vec<_>>().join(" "),
    )
}

/// Waits until a process has been reaped. An outsider gets no notification of that.
fn wait_gone(pid: i32) {
    let gone = || match read_mark(pid) {
        Some(_) => Err(anyhow::anyhow!("{} is there", describe(pid))),
        None => Ok(()),
    };
    testbed::wait_until(Duration::from_secs(5), "the process to be gone", gone).expect("it is reaped");
}

/// This program again, with only this test of this module.
fn rerun_test(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("it has a path"));
    command.args(["--exact", &format!("process::{test}"), "--include-ignored", "--nocapture"]);
    command
}

/// A program with a supervisor, to be killed: a test again, in another process.
struct KilledProgram {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl KilledProgram {
    /// Starts it. It finds `value` in this variable of its environment.
    fn start(test: &str, variable: &str, value: &Path) -> Self {
        let mut child =
            rerun_test(test).env(variable, value).stdout(Stdio::piped()).spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        Self { child, lines }
    }

    /// The pid after this prefix in its next line with that.
    fn read_pid(&mut self, start: &str) -> i32 {
        let found = self.lines.find_map(|line| line.ok()?.strip_prefix(start)?.trim().parse().ok());
        found.unwrap_or_else(|| panic!("no {start}"))
    }

    fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it has ended");
    }
}
