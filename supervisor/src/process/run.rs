//! A process as a runnable: from its start to the result that the tree gets.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Process;
use super::error::ProcessError;
use super::running::Running;
use crate::context::Context;
use crate::output::Stream;
use crate::runnable::{Cancelled, RunFuture, Runnable};

/// How much longer than its grace a stop may take before the supervisor gives up on it. What is left then can't even be
/// killed.
const STOP_MARGIN: Duration = Duration::from_secs(5);

impl Runnable for Process {
    fn run(&self, ctx: Context) -> RunFuture {
        let process = self.clone();
        Box::pin(async move { Ok(process.run_once(&ctx).await?) })
    }

    fn stop_within(&self) -> Option<Duration> {
        Some(self.grace + STOP_MARGIN)
    }
}

/// Why the process is not simply left running.
enum Turn {
    /// It has ended by itself.
    Ended,
    Cancelled(Cancelled),
    NotReady(Duration, String),
    Broken(ProcessError),
}

impl Process {
    async fn run_once(mut self, ctx: &Context) -> Result<(), ProcessError> {
        let host = ctx.processes().map_err(ProcessError::Prepare)?;
        self.readiness = self.readiness.on(&host);
        let sinks = [ctx.output(Stream::Stdout), ctx.output(Stream::Stderr)];
        let mut running = Running::start(Arc::clone(&host), &self, sinks).await?;
        let turn = self.watch(&mut running, ctx).await;
        ctx.ending();
        let deadline = Instant::now() + self.grace;
        match &turn {
            Turn::Ended => running.end_rest(self.stop_signal, deadline).await,
            _ => running.stop(self.stop_signal, deadline).await.map_err(ProcessError::Watch)?,
        }
        let exit = running.exit().await;
        match turn {
            Turn::Ended if !exit.is_success() => Err(ProcessError::Exited(exit)),
            Turn::Ended if self.readiness.exit => {
                ctx.ready().and_then(|()| ctx.done()).map_err(ProcessError::Signal)
            }
            Turn::Ended => {
                // Whether that is a failure is the policy's to say.
                ctx.process_ended(exit);
                Ok(())
            }
            Turn::Cancelled(cancelled) => Err(ProcessError::Cancelled(cancelled)),
            Turn::NotReady(within, missing) => Err(ProcessError::NotReady { within, missing, exit }),
            Turn::Broken(error) => Err(error),
        }
    }

    /// Tells when the process is ready, and returns when something has to be done about it.
    async fn watch(&self, running: &mut Running, ctx: &Context) -> Turn {
        let said = running.listener.as_ref().map(|listener| listener.said.clone());
        let ready = tokio::select! {
            biased;
            cancelled = ctx.cancelled() => return Turn::Cancelled(cancelled),
            ended = running.wait() => return ended.map_or_else(|error| Turn::Broken(ProcessError::Watch(error)), |()| Turn::Ended),
            ready = self.readiness.wait(said) => ready,
        };
        if let Err((within, missing)) = ready {
            return Turn::NotReady(within, missing);
        }
        if let Err(error) = ctx.ready() {
            return Turn::Broken(ProcessError::Signal(error));
        }
        tokio::select! {
            biased;
            cancelled = ctx.cancelled() => Turn::Cancelled(cancelled),
            ended = running.wait() => ended.map_or_else(|error| Turn::Broken(ProcessError::Watch(error)), |()| Turn::Ended),
        }
    }
}
