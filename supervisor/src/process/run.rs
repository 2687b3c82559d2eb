//! A process as a runnable: from its start to the result of its run.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::error::ProcessError;
use super::host::ProcessHost;
use super::kept::KeptProcess;
use super::leftovers;
use super::liveness::{LivenessFailure, WatchedProcess};
use super::notify::{NotifyListener, NotifyState};
use super::output::OutputTarget;
use super::probe::{CommandRunner, ProbeFailure};
use super::probe_command;
use super::procfs;
use super::readiness::NotReady;
use super::running_process::{RunningProcess, StopDeadline};
use super::settings::Process;
use crate::context::Context;
use crate::failure::CanceledError;
use crate::output::OutputStream;
use crate::process_exit::{AdoptedProcess, ForcedKill, Signal};
use crate::runnable::{RunFuture, Runnable};

/// The time beyond its grace period that a stop may take before the supervisor gives up on it. A process that
/// is left then can't be killed.
const STOP_MARGIN: Duration = Duration::from_secs(5);

impl Runnable for Process {
    fn run(&self, ctx: Context) -> RunFuture {
        let process = self.clone();
        Box::pin(async move { Ok(process.run_once(&ctx).await?) })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(self.grace_period.max(self.max_grace_period) + STOP_MARGIN)
    }
}

/// The end of the time in which a process is left alone.
enum StopReason {
    /// The process has exited by itself.
    Exited,
    /// The process has reported that it is about to exit.
    Stopping,
    Canceled(CanceledError),
    /// The process was kept, and its definition has changed.
    Replaced,
    NotReady(NotReady),
    /// The watchdog has expired, or it asked for that.
    Watchdog {
        triggered: bool,
    },
    NotAlive(LivenessFailure),
    Failed(ProcessError),
}

fn open_sinks(ctx: &Context, process: &Process) -> OutputTarget {
    let copy = |stream| process.output_copy.as_ref().map(|copy| ctx.open_writer(&**copy, stream));
    let open = |stream| [ctx.open_sink(stream)].into_iter().chain(copy(stream)).collect();
    OutputTarget::Sinks([OutputStream::Stdout, OutputStream::Stderr].map(open))
}

impl StopReason {
    fn from_exit(exited: io::Result<()>) -> Self {
        exited.map_or_else(|error| Self::Failed(ProcessError::Watch(error)), |()| Self::Exited)
    }
}

impl Process {
    async fn run_once(mut self, ctx: &Context) -> Result<(), ProcessError> {
        let host = ctx.process_host().map_err(ProcessError::Prepare)?;
        let run_command = probe_command::command_runner(&host);
        self.readiness = self.readiness.with_command_probe(&run_command);
        // The start: of a new process, unless an earlier program has kept one.
        let mut running = match self.adopt_or_end_kept(ctx, &host).await? {
            Some(running) => running,
            None => {
                ctx.wait_deferred_dependencies().await.map_err(ProcessError::Canceled)?;
                let turn = tokio::select! {
                    biased;
                    canceled = ctx.canceled() => return Err(ProcessError::Canceled(canceled)),
                    // A canceled start leaves the queue, so that nothing is started only to be killed.
                    turn = host.spawner.wait_turn() => turn,
                };
                let keep_for = self.keep.then(|| ctx.dn());
                RunningProcess::start(Arc::clone(&host), &self, turn, open_sinks(ctx, &self), keep_for)
                    .await?
            }
        };
        let _attached =
            self.handle.as_ref().map(|handle| handle.attach(running.target(&self), Arc::clone(&run_command)));
        // Its life, until it exits or has to stop. From then on it no longer counts as ready.
        let reason = self.wait_for_stop_reason(&mut running, ctx, &run_command).await;
        ctx.mark_ending();
        self.end_processes(&mut running, ctx, &reason).await?;
        // The result. The exit is recorded for every result: the tree adds it to the reason.
        let exit = running.into_exit().await;
        ctx.record_process_exit(exit.clone());
        match reason {
            // The cancellation came while it was stopping by itself: its exit code no longer matters.
            StopReason::Stopping if ctx.is_canceled() => Err(ProcessError::Canceled(CanceledError)),
            StopReason::Exited | StopReason::Stopping if !exit.is_success() => {
                Err(ProcessError::Exited(exit))
            }
            StopReason::Exited | StopReason::Stopping if self.readiness.on_exit => {
                ctx.signal_ready().and_then(|()| ctx.signal_done()).map_err(ProcessError::Signal)
            }
            // The policy decides whether this is a failure.
            StopReason::Exited | StopReason::Stopping | StopReason::Replaced => Ok(()),
            StopReason::Canceled(canceled) => Err(ProcessError::Canceled(canceled)),
            StopReason::NotReady(NotReady { timeout, missing }) => {
                Err(ProcessError::NotReady { timeout, missing, exit })
            }
            StopReason::Watchdog { triggered } => {
                let interval = self.watchdog.unwrap_or_default();
                Err(ProcessError::Watchdog { interval, triggered, exit })
            }
            StopReason::NotAlive(LivenessFailure { failures, last }) => {
                Err(ProcessError::NotAlive { failures, last, exit })
            }
            StopReason::Failed(error) => Err(error),
        }
    }

    /// Adopts the process of this DN that an earlier program has kept. Ends it if its definition was another.
    ///
    /// # Errors
    /// It is running, and can't be adopted at present.
    async fn adopt_or_end_kept(
        &self,
        ctx: &Context,
        host: &Arc<ProcessHost>,
    ) -> Result<Option<RunningProcess>, ProcessError> {
        let Some(records) = &host.records else { return Ok(None) };
        // Only the first run of this DN finds it: a restart starts a new process.
        let Some(record) = records.claim(ctx.dn()) else { return Ok(None) };
        // Its record stays until it has ended: this program may be killed before.
        let kept = Arc::new(KeptProcess::adopt(records, record.clone()));
        match RunningProcess::adopt(Arc::clone(host), self, Arc::clone(&kept), open_sinks(ctx, self)) {
            Ok(Some(running)) if kept.has_definition(self) => {
                ctx.report_adoption(AdoptedProcess { pid: running.pid(), since: running.since() });
                return Ok(Some(running));
            }
            Ok(Some(mut running)) => {
                let pid = running.pid();
                tracing::info!(pid, "the kept process has an earlier definition: restarting it");
                if let Err(error) = self.end_processes(&mut running, ctx, &StopReason::Replaced).await {
                    tracing::error!(%error, "can't watch the exit of the kept process");
                }
            }
            Ok(None) => {
                tracing::info!("the kept process has exited: ending what is left of it");
                if !leftovers::end_kept(records, &record) {
                    kept.leave();
                }
            }
            Err(error) => {
                kept.leave();
                return Err(ProcessError::Adopt(error));
            }
        }
        Ok(None)
    }

    /// Stops what is left of the process and its descendants.
    async fn end_processes(
        &self,
        running: &mut RunningProcess,
        ctx: &Context,
        reason: &StopReason,
    ) -> Result<(), ProcessError> {
        // A process that hangs handles no polite signal; this one leaves a core dump of where it hangs.
        let stop_signal = match reason {
            StopReason::Watchdog { .. } => {
                running.keep_lines_before_abort();
                Signal::ABRT
            }
            _ => self.stop_signal,
        };
        let new_deadline = || StopDeadline::new(self.grace_period, self.max_grace_period);
        let report_kill = |grace_period, main_process| {
            ctx.report_kill(ForcedKill { stop_signal, grace_period, main_process });
        };
        let has_exited = match reason {
            StopReason::Exited => true,
            // It stops by itself, in the time of a stop. A cancellation sends the signal after all.
            StopReason::Stopping => {
                let mut deadline = new_deadline();
                tokio::select! {
                    biased;
                    exited = running.wait_exit_until(&mut deadline) => exited.map_err(ProcessError::Watch)?,
                    _ = ctx.canceled() => false,
                }
            }
            _ => false,
        };
        if has_exited {
            running.stop_descendants(stop_signal, new_deadline(), report_kill).await;
            return Ok(());
        }
        running.stop(stop_signal, new_deadline(), report_kill).await.map_err(ProcessError::Watch)
    }

    /// The user to which a process that should have reported has changed by itself. Its socket is that of the user as
    /// which it was started.
    fn user_without_socket(&self, running: &RunningProcess) -> Option<u32> {
        let listener = running.listener.as_ref().filter(|_| self.readiness.on_notify)?;
        let user = procfs::only_user(running.pid().try_into().ok()?).ok()??;
        let started_as = self.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
        (!listener.reports().last().ready && user != started_as && user != 0).then_some(user)
    }

    /// Signals ready when the process is, and returns when the process has exited or has to stop.
    async fn wait_for_stop_reason(
        &self,
        running: &mut RunningProcess,
        ctx: &Context,
        run_command: &CommandRunner,
    ) -> StopReason {
        let reports = running.listener.as_ref().map(NotifyListener::reports);
        let report_unasked = |unasked: Option<&ProbeFailure>| {
            if let Some(handle) = &self.handle {
                handle.set_probe_problem(unasked);
            }
        };
        // In this order: a cancellation explains an exit at the same time, and an exit explains a failed probe.
        let ready = tokio::select! {
            biased;
            canceled = ctx.canceled() => return StopReason::Canceled(canceled),
            exited = running.wait_exit() => return StopReason::from_exit(exited),
            () = NotifyState::wait_stopping(reports.clone()) => return StopReason::Stopping,
            ready = self.readiness.wait_ready(reports.clone(), &report_unasked) => ready,
        };
        if let Err(mut not_ready) = ready {
            if let Some(user) = self.user_without_socket(running) {
                not_ready.missing += &format!(
                    "; it runs as user {user} now, who can't send to its NOTIFY_SOCKET: have it started as that user"
                );
            }
            return StopReason::NotReady(not_ready);
        }
        // They were for the start.
        running.ignore_extensions_so_far();
        // Its liveness is asked first, also of an adopted process, which may have hung since.
        if self.liveness.is_none()
            && let Err(error) = ctx.signal_ready()
        {
            return StopReason::Failed(ProcessError::Signal(error));
        }
        let pid = running.pid();
        let watched = WatchedProcess {
            report_unasked: &report_unasked,
            // A signal fails only when the run has ended, and with it this wait.
            report_ready: &|unready| match unready {
                Some(reason) => _ = ctx.signal_not_ready(reason),
                None => _ = ctx.signal_ready(),
            },
            waits_in_kernel: &|| procfs::waits_in_kernel(pid),
        };
        tokio::select! {
            biased;
            canceled = ctx.canceled() => StopReason::Canceled(canceled),
            exited = running.wait_exit() => StopReason::from_exit(exited),
            () = NotifyState::wait_stopping(reports.clone()) => StopReason::Stopping,
            triggered = NotifyState::wait_watchdog(reports, self.watchdog) => StopReason::Watchdog { triggered },
            failure = async {
                match &self.liveness {
                    Some(liveness) => liveness.wait_failure(run_command, watched).await,
                    None => std::future::pending().await,
                }
            } => StopReason::NotAlive(failure),
        }
    }
}
