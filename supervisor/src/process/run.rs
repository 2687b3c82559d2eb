//! A process as a runnable: from its start to the result of its run.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Process;
use super::error::ProcessError;
use super::running_process::RunningProcess;
use super::status::ForcedKill;
use crate::context::Context;
use crate::output::OutputStream;
use crate::runnable::{CanceledError, RunFuture, Runnable};

/// How much longer than its grace period a stop may take before the supervisor gives up on it. A process that
/// is left then can't be killed.
const STOP_MARGIN: Duration = Duration::from_secs(5);

impl Runnable for Process {
    fn run(&self, ctx: Context) -> RunFuture {
        let process = self.clone();
        Box::pin(async move { Ok(process.run_once(&ctx).await?) })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        Some(self.grace_period + STOP_MARGIN)
    }
}

/// Why a running process needs handling.
enum StopReason {
    /// It has exited by itself.
    Exited,
    Canceled(CanceledError),
    NotReady(Duration, String),
    Failed(ProcessError),
}

impl Process {
    async fn run_once(mut self, ctx: &Context) -> Result<(), ProcessError> {
        let host = ctx.process_host().map_err(ProcessError::Prepare)?;
        self.readiness = self.readiness.with_command_probe(&host);
        let sinks = [ctx.open_output(OutputStream::Stdout), ctx.open_output(OutputStream::Stderr)];
        let mut running = RunningProcess::start(Arc::clone(&host), &self, sinks).await?;
        let turn = self.wait_for_stop_reason(&mut running, ctx).await;
        ctx.mark_ending();
        let deadline = Instant::now() + self.grace_period;
        let report_kill = |main_process| {
            let (stop_signal, grace_period) = (self.stop_signal, self.grace_period);
            ctx.report_kill(ForcedKill { stop_signal, grace_period, main_process });
        };
        match &turn {
            StopReason::Exited => {
                running.stop_descendants(self.stop_signal, deadline, report_kill).await;
            }
            _ => {
                let stopped = running.stop(self.stop_signal, deadline, report_kill).await;
                stopped.map_err(ProcessError::Watch)?;
            }
        }
        let exit = running.into_exit().await;
        match turn {
            StopReason::Exited if !exit.is_success() => Err(ProcessError::Exited(exit)),
            StopReason::Exited if self.readiness.on_exit => {
                ctx.signal_ready().and_then(|()| ctx.signal_done()).map_err(ProcessError::Signal)
            }
            StopReason::Exited => {
                // The policy decides whether this is a failure.
                ctx.record_process_exit(exit);
                Ok(())
            }
            StopReason::Canceled(canceled) => {
                // It is reported if the stop needed SIGKILL.
                ctx.record_process_exit(exit);
                Err(ProcessError::Canceled(canceled))
            }
            StopReason::NotReady(timeout, missing) => Err(ProcessError::NotReady { timeout, missing, exit }),
            StopReason::Failed(error) => Err(error),
        }
    }

    /// Signals ready when the process is, and returns when the process has exited or has to stop.
    async fn wait_for_stop_reason(&self, running: &mut RunningProcess, ctx: &Context) -> StopReason {
        let notify = running.listener.as_ref().map(|listener| listener.state.clone());
        let ready = tokio::select! {
            biased;
            canceled = ctx.canceled() => return StopReason::Canceled(canceled),
            ended = running.wait_exit() => return ended.map_or_else(|error| StopReason::Failed(ProcessError::Watch(error)), |()| StopReason::Exited),
            ready = self.readiness.wait_ready(notify) => ready,
        };
        if let Err((timeout, missing)) = ready {
            return StopReason::NotReady(timeout, missing);
        }
        if let Err(error) = ctx.signal_ready() {
            return StopReason::Failed(ProcessError::Signal(error));
        }
        tokio::select! {
            biased;
            canceled = ctx.canceled() => StopReason::Canceled(canceled),
            ended = running.wait_exit() => ended.map_or_else(|error| StopReason::Failed(ProcessError::Watch(error)), |()| StopReason::Exited),
        }
    }
}
