//! Child processes as they are: those that behave, and those that do everything to stay.

mod beside;
mod cgroup;
mod descendants;
mod end;
mod load;
mod output;
mod readiness;
mod rounds;
mod start;

use std::fs;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_supervisor::process::{Cgroups, Process, ProcessExit};
use nodekeel_supervisor::testing::Recorder;
use nodekeel_supervisor::{
    Backoff, Change, Child, Context, Event, Exit, Failure, Origin, Policy, Restart, State, Supervisor,
};
use tokio::sync::Notify;

/// What a stop may take on top of the grace.
const MARGIN: Duration = Duration::from_millis(50);

/// After which something that is awaited is taken for something that never comes.
const PATIENCE: Duration = Duration::from_secs(30);

/// Held by a test that measures, and by those that take all the machine has.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// In cgroups where they can be had: `NODEKEEL_CGROUPS=none` tests the other way of knowing descendants.
fn cgroups() -> Cgroups {
    match std::env::var("NODEKEEL_CGROUPS") {
        Ok(none) if none == "none" => Cgroups::None,
        Ok(parent) => Cgroups::Below(parent.into()),
        Err(_) => Cgroups::Own,
    }
}

/// A shell that runs a script, with the tools of the base system.
fn sh(script: &str) -> Process {
    Process::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
}

/// A program in the Perl of the base system.
fn perl(script: &str) -> Process {
    Process::new("/usr/bin/perl").args(["-e", script])
}

/// A supervisor whose root has one process, `root.p`.
struct Bed {
    supervisor: Supervisor,
    recorder: Recorder,
    output: Output,
}

impl Bed {
    /// One that is not started again.
    fn once(process: Process) -> Self {
        Self::with(process, Restart::Never, None)
    }

    /// One that is started again at once.
    fn always(process: Process) -> Self {
        Self::with(process, Restart::Always, None)
    }

    /// One that the supervisor gives up on before its grace is over.
    fn within(process: Process, stop_within: Duration) -> Self {
        Self::with(process, Restart::Never, Some(stop_within))
    }

    /// One that is started once, with its cgroup there.
    fn below(process: Process, cgroups: Cgroups) -> Self {
        Self::build(process, (Restart::Never, None), cgroups)
    }

    fn with(process: Process, restart: Restart, stop_within: Option<Duration>) -> Self {
        Self::build(process, (restart, stop_within), cgroups())
    }

    fn build(process: Process, how: (Restart, Option<Duration>), cgroups: Cgroups) -> Self {
        let (restart, stop_within) = how;
        let (recorder, output) = (Recorder::default(), Output::default());
        let backoff = Backoff { initial: Duration::ZERO, ..Backoff::default() };
        let policy = Policy { restart, backoff, ..Policy::default() };
        let builder = Supervisor::builder().cgroups(cgroups).hook(recorder.clone());
        let supervisor = builder.output(output.clone().sink()).start(move |ctx: Context| {
            let process = process.clone();
            async move {
                let child = Child::new("p", process).policy(policy);
                ctx.run_group([match stop_within {
                    Some(time) => child.stop_within(time),
                    None => child,
                }])?;
                ctx.ready()?;
                Err::<(), Failure>(ctx.cancelled().await.into())
            }
        });
        Self { supervisor, recorder, output }
    }

    /// The next event that brings the process into a state.
    async fn until(&self, state: State) -> Event {
        self.recorder.until("root.p", state).await
    }

    /// How the process' next run to end has ended.
    async fn ended(&self) -> (State, Exit) {
        let event = tokio::select! {
            event = self.until(State::Dead) => event,
            event = self.until(State::Done) => event,
            event = self.until(State::Canceled) => event,
        };
        match event.change {
            Change::Exited { state, exit } => (state, exit),
            other => panic!("{other:?} is no end"),
        }
    }

    /// How it failed.
    async fn failed(&self) -> (String, ProcessExit) {
        match self.ended().await {
            (State::Dead, Exit::Failed { error, process: Some(process) }) => (error, (*process).clone()),
            other => panic!("{other:?}"),
        }
    }

    async fn shutdown(self) {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
    }
}

/// What the process has written.
#[derive(Clone, Default)]
struct Output(Arc<Written>);

#[derive(Default)]
struct Written {
    text: Mutex<Vec<u8>>,
    more: Notify,
}

struct Writer(Output);

impl Output {
    fn sink(self) -> impl Fn(Origin<'_>) -> Writer + Send + Sync + 'static {
        move |_| Writer(self.clone())
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.text.lock().expect("no panic holds it")).into_owned()
    }

    fn len(&self) -> usize {
        self.0.text.lock().expect("no panic holds it").len()
    }

    /// Waits for a line that starts so, and gives the rest of it.
    async fn line(&self, start: &str) -> String {
        loop {
            let mut more = std::pin::pin!(self.0.more.notified());
            more.as_mut().enable();
            let text = self.text();
            let complete = text.rfind('\n').map_or("", |end| &text[..end]);
            if let Some(rest) = complete.lines().find_map(|line| line.strip_prefix(start)) {
                return rest.trim().to_owned();
            }
            let waited = tokio::time::timeout(PATIENCE, more).await;
            waited.unwrap_or_else(|_| panic!("no line {start:?} in {:?}", self.text()));
        }
    }

    /// The pid after `pid ` in the output.
    async fn pid(&self) -> i32 {
        self.line("pid ").await.parse().expect("a pid")
    }
}

impl io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.0.text.lock().expect("no panic holds it").extend_from_slice(bytes);
        self.0.0.more.notify_waiters();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The mark that a process and all its descendants carry. Reading it here, from the outside, is the point: a test that
/// asked the supervisor who is left would believe what it tests.
fn mark_of(pid: i32) -> String {
    read_mark(pid).unwrap_or_else(|| panic!("process {pid} is gone"))
}

fn read_mark(pid: i32) -> Option<String> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max file locks"))?;
    line.split_whitespace().next().map(str::to_owned)
}

fn pids() -> Vec<i32> {
    let entries = fs::read_dir("/proc").expect("proc is mounted");
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Who carries a mark, zombies included: pid, state, name.
fn marked(mark: &str) -> Vec<String> {
    let carries = |pid: &i32| read_mark(*pid).as_deref() == Some(mark);
    pids().into_iter().filter(carries).map(describe).collect()
}

fn describe(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/stat")).map_or_else(
        |_| pid.to_string(),
        |stat| stat.split_whitespace().take(4).collect::<Vec<_>>().join(" "),
    )
}

/// Waits until a process is gone for good. Nothing tells an outsider when somebody has waited for a zombie.
fn until_gone(pid: i32) {
    let gone = || match read_mark(pid) {
        Some(_) => Err(anyhow::anyhow!("{} is there", describe(pid))),
        None => Ok(()),
    };
    testbed::wait_until(Duration::from_secs(5), "the process to be gone", gone).expect("it is reaped");
}
