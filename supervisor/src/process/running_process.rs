//! A running process: waits for its exit, and stops it.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions};
use tokio::time::{Instant, sleep_until};

use super::cgroup_limits;
use super::child_setup;
use super::descendants::{DescendantSet, has_exited, is_gone};
use super::error::ProcessError;
use super::handle::HandleTarget;
use super::host::ProcessHost;
use super::kept::KeptProcess;
use super::notify::{MessageSenders, NotifyListener, NotifyReports};
use super::notify_socket::NotifySocket;
use super::output::{OutputReaders, OutputTarget};
use super::settings::{KillMode, Process};
use super::spawn::{self, KillScope, MainProcess, OutputEnds, PreparedStart, StartTurn};
use crate::process_exit::{ExitStatus, ProcessExit, Signal};
use crate::sys::{ReadableFd, StartError, StartStep};

/// When the processes of a start are killed.
#[derive(Debug, Clone, Copy)]
pub(super) struct StopDeadline {
    started: Instant,
    at: Instant,
    /// The time to which the process can extend it.
    latest: Instant,
}

impl StopDeadline {
    /// The deadline of a stop that starts now.
    pub(super) fn new(grace_period: Duration, max_grace_period: Duration) -> Self {
        let now = Instant::now();
        Self { started: now, at: now + grace_period, latest: now + max_grace_period.max(grace_period) }
    }

    fn extend_to(&mut self, time: Instant) {
        self.at = self.at.max(time.min(self.latest));
    }

    /// The time that the processes have, in milliseconds.
    fn grace_period(&self) -> Duration {
        let millis = (self.at - self.started).as_millis();
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    }
}

/// The next time to which the process extends its timeout, which may be earlier than that of its start; without a
/// listener, never.
async fn next_extension(reports: &mut Option<NotifyReports>, known: Option<Instant>) -> Instant {
    let Some(reports) = reports else { return std::future::pending().await };
    let mut state = reports.last();
    loop {
        match state.extended_deadline {
            Some(extended) if Some(extended) != known => return extended,
            _ => state = reports.next().await,
        }
    }
}

/// One start of a process. If it is dropped before the exit, everything that must stop with the process is
/// killed.
#[derive(Debug)]
pub(super) struct RunningProcess {
    host: Arc<ProcessHost>,
    /// The main process and its exit notification. `None` only in `drop`.
    main_process: Option<(MainProcess, ReadableFd)>,
    since: std::time::Instant,
    status: Option<ExitStatus>,
    /// An earlier program is, or was, its parent.
    is_adopted: bool,
    output: Option<OutputReaders>,
    /// The last lines before it was aborted; empty if it was not, or has written nothing before.
    lines_before_abort: Vec<String>,
    pub(super) listener: Option<NotifyListener>,
    /// The extension of its timeout that has no effect on the stop.
    ignored_extension: Option<Instant>,
    /// True if everything that must stop with the process has exited.
    all_ended: bool,
    /// The record, if it is kept.
    kept: Option<Arc<KeptProcess>>,
}

/// The channels between a process and this program.
struct Channels {
    readers: [OwnedFd; 2],
    target: OutputTarget,
    socket: Option<NotifySocket>,
}

impl RunningProcess {
    /// Starts a process, and keeps it if `keep_for` names a DN; its program is running when this returns.
    pub(super) async fn start(
        host: Arc<ProcessHost>,
        process: &Process,
        turn: StartTurn,
        target: OutputTarget,
        keep_for: Option<&str>,
    ) -> Result<Self, ProcessError> {
        // Its identity: the mark that its descendants inherit, and its cgroup.
        let survives = keep_for.is_some() || process.kill_mode == KillMode::Process;
        let mark = host.shared.marks.next_mark(survives);
        let kill_scope = KillScope::from_process(process, mark, host.cgroup.as_ref());
        let mut kill_scope = kill_scope.map_err(ProcessError::Limit)?;
        // Before there is a process: a program that is killed right after the start must find the record.
        if let (Some(records), Some(uid)) = (&host.records, process.uid)
            && let Err(error) = records.add_user(uid)
        {
            tracing::warn!(%error, "can't record the user {uid}: what is left of this process by a kill of this program may run on");
        }
        let kept = keep_for.map(|dn| host.create_kept(dn, process, mark, kill_scope.cgroup_path()));
        let kept = kept.transpose().map_err(ProcessError::Keep)?;
        // Its channels to this program. Those of a kept process have names, by which it is found again.
        let prepare =
            |source| child_setup::start_error(process, StartError { step: StartStep::Setup, source });
        let socket = process.needs_notify_socket().then(|| host.bind_notify_socket(mark, process));
        let socket = socket.transpose().map_err(ProcessError::Notify)?;
        let output = kept.as_ref().map_or_else(spawn::open_pipes, |kept| kept.create_fifos());
        let OutputEnds { readers, writers } = output.map_err(prepare)?;
        // The start.
        let notify_env =
            socket.as_ref().map(|socket| socket.environment(process.watchdog)).unwrap_or_default();
        let mut image = spawn::build_image(process, mark, &notify_env, writers).map_err(prepare)?;
        image.setup.resource_limits.extend(child_setup::default_limits(process, &host.child_limits));
        image.cgroup = kill_scope.take_cgroup_dir();
        // A kept process must outlive the thread that creates it.
        image.dies_with_parent = kept.is_none();
        let start = PreparedStart { image, mark, kill_scope };
        let started = host.spawner.spawn(turn, start, &host.shared).await;
        let main = started.map_err(|error| child_setup::start_error(process, error))?;
        if let Some(kept) = &kept {
            // A program that is killed before this leaves a record without a pid. The next one ends the process by
            // its mark.
            kept.record_start(main.pid).map_err(ProcessError::Keep)?;
        }
        let running = Self::watch(host, main, kept, Channels { readers, target, socket });
        let running = running.map_err(ProcessError::Watch)?;
        if let Some(cgroup) = &running.host.cgroup {
            cgroup.prepare_next();
        }
        Ok(running)
    }

    /// Takes over a process that an earlier program has kept. `None` if it has exited.
    ///
    /// # Errors
    /// Its FIFOs can't be opened, or a limit can't be set again. It runs on.
    pub(super) fn adopt(
        host: Arc<ProcessHost>,
        process: &Process,
        kept: Arc<KeptProcess>,
        target: OutputTarget,
    ) -> io::Result<Option<Self>> {
        let main = match kept.open_main(&host.shared) {
            Err(error) if is_gone(&error) => return Ok(None),
            main => main?,
        };
        let since = kept.started_at()?;
        let readers = kept.open_fifos()?;
        let needs_socket = process.needs_notify_socket();
        let socket = needs_socket.then(|| host.bind_notify_socket(kept.mark(), process)).transpose();
        // It is well without, as far as anybody can tell.
        let socket = socket.unwrap_or_else(|error| {
            tracing::warn!(%error, "can't bind the notification socket of the kept process again: its reports are lost, and its watchdog is not enforced");
            None
        });
        // With another definition it ends, in its own time, within the limits that it has.
        if kept.has_definition(process)
            && let Some(dir) = main.kill_scope.cgroup_path()
        {
            cgroup_limits::renew_limits(dir, &process.limits).map_err(io::Error::other)?;
        }
        let mut running = Self::watch(host, main, Some(kept), Channels { readers, target, socket })?;
        if let Some((main, _)) = &mut running.main_process {
            main.is_left_alone = false;
        }
        (running.is_adopted, running.since) = (true, since);
        Ok(Some(running))
    }

    /// Reads its output and its notifications from now on.
    fn watch(
        host: Arc<ProcessHost>,
        main: MainProcess,
        kept: Option<Arc<KeptProcess>>,
        channels: Channels,
    ) -> io::Result<Self> {
        let ended = ReadableFd::new(Arc::clone(&main.pidfd))?;
        let output = OutputReaders::start(channels.readers, channels.target)?;
        let listener = channels.socket.map(|socket| {
            let main_pidfd = Arc::clone(&main.pidfd);
            let senders = MessageSenders { main: main.pid, main_pidfd, cgroup: main.cgroup() };
            // The record of a kept process remembers its READY=1 for the next supervisor.
            let was_ready = kept.as_ref().is_some_and(|kept| kept.is_ready());
            let kept = kept.clone();
            NotifyListener::start(socket, senders, was_ready, move || {
                kept.iter().for_each(|kept| kept.record_ready());
            })
        });
        let listener = listener.transpose()?;
        Ok(Self {
            host,
            main_process: Some((main, ended)),
            since: std::time::Instant::now(),
            status: None,
            is_adopted: false,
            output: Some(output),
            lines_before_abort: Vec::new(),
            listener,
            ignored_extension: None,
            all_ended: false,
            kept,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.main_process().pid.unsigned_abs()
    }

    pub(super) fn since(&self) -> std::time::Instant {
        self.since
    }

    /// The process on which a handle acts.
    pub(super) fn target(&self, process: &Process) -> HandleTarget {
        let main = self.main_process();
        HandleTarget {
            pid: main.pid,
            pidfd: Arc::clone(&main.pidfd),
            since: self.since,
            reload: process.reload.clone(),
        }
    }

    /// Waits until the main process has exited. It can be dropped and called again at any time.
    pub(super) async fn wait_exit(&mut self) -> io::Result<()> {
        let (main, ended) = self.main_process.as_mut().expect("only drop takes it");
        while self.status.is_none() {
            let mut readable = ended.wait_readable().await?;
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            self.status = match rustix::process::waitid(WaitId::PidFd(ended.fd()), options) {
                // waitid(2) waits only for children. The pidfd of an adopted process shows its exit, not its status.
                Err(Errno::CHILD) if self.is_adopted => has_exited(ended.fd()).then_some(ExitStatus::Unknown),
                status => status?.map(ExitStatus::Known),
            };
            readable.clear_ready();
        }
        main.mark_reaped();
        Ok(())
    }

    /// The process is about to be aborted. Its output from then on, such as its registers, is not among the last
    /// lines of its exit.
    pub(super) fn keep_lines_before_abort(&mut self) {
        self.lines_before_abort = self.output.as_ref().map(OutputReaders::last_lines).unwrap_or_default();
    }

    /// Extensions so far, such as of its start, have no effect on its stop.
    pub(super) fn ignore_extensions_so_far(&mut self) {
        self.ignored_extension =
            self.listener.as_ref().and_then(|listener| listener.reports().last().extended_deadline);
    }

    /// Waits for the exit of the main process until the deadline, which the process can extend until then.
    /// Returns whether it has exited.
    pub(super) async fn wait_exit_until(&mut self, deadline: &mut StopDeadline) -> io::Result<bool> {
        let mut reports = self.listener.as_ref().map(NotifyListener::reports);
        let mut known = self.ignored_extension;
        loop {
            tokio::select! {
                biased;
                exited = self.wait_exit() => return exited.map(|()| true),
                extended = next_extension(&mut reports, known) => {
                    known = Some(extended);
                    deadline.extend_to(extended);
                }
                () = sleep_until(deadline.at) => {
                    // It may be queued.
                    let last = reports.as_mut().and_then(|reports| reports.read_all().extended_deadline);
                    match last {
                        Some(extended) if last != known => {
                            known = last;
                            deadline.extend_to(extended);
                        }
                        _ => return Ok(false),
                    }
                }
            }
        }
    }

    /// Sends the stop signal to every process, and kills them at the deadline, which the main process can extend.
    /// If that is necessary, it calls `report_kill` with the time that they had, and whether the main process is still
    /// running.
    pub(super) async fn stop(
        &mut self,
        signal: Signal,
        mut deadline: StopDeadline,
        report_kill: impl Fn(Duration, bool) + Sync,
    ) -> io::Result<()> {
        // Before the signal: the process may answer it at once.
        self.ignore_extensions_so_far();
        let mut descendants =
            self.main_process().descendants().map(|descendants| descendants.with_term_deadline(deadline.at));
        let host = Arc::clone(&self.host);
        match &mut descendants {
            Some(descendants) => {
                let snapshots = &host.shared.snapshots;
                descendants.request_stop(snapshots, signal, || self.request_stop(signal)).await;
            }
            None => self.request_stop(signal),
        }
        // Its descendants have the time that the main process has, extensions included.
        let mut is_reported = false;
        let has_exited_in_time = self.wait_exit_until(&mut deadline).await?;
        let (deadline, grace_period) = (deadline.at, deadline.grace_period());
        descendants = descendants.map(|descendants| descendants.with_term_deadline(deadline));
        if !has_exited_in_time {
            // It may have exited at the deadline: then the kill is for the others, and is reported with them.
            is_reported = !has_exited(self.main_process().pidfd.as_fd());
            if is_reported {
                report_kill(grace_period, true);
            }
            if descendants.is_none()
                && let Err(error) = self.main_process().send_signal(Signal::KILL)
            {
                tracing::warn!(pid = self.main_process().pid, %error, "can't kill a process");
            }
            tokio::join!(
                self.wait_exit(),
                terminate_descendants(descendants.as_mut(), &host, signal, deadline)
            )
            .0?;
        }
        // Also what the main process forked while it was being killed.
        terminate_descendants(descendants.as_mut(), &host, signal, deadline).await;
        self.all_ended = true;
        if !is_reported && descendants.is_some_and(|descendants| descendants.needed_kill()) {
            report_kill(grace_period, false);
        }
        Ok(())
    }

    /// Stops the descendants that the main process has left behind, if they must stop with it.
    /// If any of them had to be killed, it calls `report_kill` with the time that they had, and false.
    pub(super) async fn stop_descendants(
        &mut self,
        signal: Signal,
        deadline: StopDeadline,
        report_kill: impl Fn(Duration, bool) + Sync,
    ) {
        let mut descendants =
            self.main_process().descendants().map(|descendants| descendants.with_term_deadline(deadline.at));
        terminate_descendants(descendants.as_mut(), &self.host, signal, deadline.at).await;
        self.all_ended = true;
        if descendants.is_some_and(|descendants| descendants.needed_kill()) {
            report_kill(deadline.grace_period(), false);
        }
    }

    /// The exit to report, after all output that was written before it.
    pub(super) async fn into_exit(mut self) -> ProcessExit {
        let (tail, output_problem) = match self.output.take() {
            Some(readers) => readers.finish().await,
            None => (Vec::new(), None),
        };
        let before_abort = std::mem::take(&mut self.lines_before_abort);
        let tail = if before_abort.is_empty() { tail } else { before_abort };
        let status = self.status.as_ref().expect("called only after the exit");
        let main = self.main_process();
        let exit =
            ProcessExit { output_problem, ..ProcessExit::new(main.pid, status, main.oom_kill(), tail) };
        // The removal of the cgroup need not delay the next start, which has another one. But that of a kept process
        // precedes the removal of its record, by which the next program would find it.
        if self.kept.is_none() {
            let ended = self.main_process.take();
            self.host.reap_tasks.spawn(async move { drop(ended) });
        }
        exit
    }

    /// Sends the stop signal, then SIGCONT: a stopped process handles a signal only after it is continued.
    fn request_stop(&self, signal: Signal) {
        if self.status.is_some() {
            return;
        }
        for signal in [signal, Signal::CONT] {
            if let Err(error) = self.main_process().send_signal(signal) {
                tracing::warn!(pid = self.main_process().pid, %error, "can't send {signal} to a process");
            }
        }
    }

    fn main_process(&self) -> &MainProcess {
        let (main, _ended) = self.main_process.as_ref().expect("only drop takes it");
        main
    }
}

impl Drop for RunningProcess {
    /// A separate task waits for the killed processes, and keeps the host until then.
    fn drop(&mut self) {
        let Some((main, ended)) = self.main_process.take().filter(|_| !self.all_ended) else { return };
        main.kill();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let reap = reap_killed(Arc::clone(&self.host), main, self.kept.take(), ended);
            self.host.reap_tasks.spawn_on(reap, &runtime);
        }
    }
}

async fn terminate_descendants(
    descendants: Option<&mut DescendantSet>,
    host: &ProcessHost,
    signal: Signal,
    deadline: Instant,
) {
    if let Some(descendants) = descendants {
        descendants.terminate_all(&host.shared, signal, deadline).await;
    }
}

/// Waits until a killed process and its descendants have exited, and drops its record then.
async fn reap_killed(
    host: Arc<ProcessHost>,
    mut main: MainProcess,
    _kept: Option<Arc<KeptProcess>>,
    ended: ReadableFd,
) {
    drop(ended.wait_readable().await);
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    if let Ok(Some(_)) = rustix::process::waitid(WaitId::PidFd(ended.fd()), options) {
        main.mark_reaped();
    }
    terminate_descendants(main.descendants().as_mut(), &host, Signal::KILL, Instant::now()).await;
}
