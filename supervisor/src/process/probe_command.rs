//! A program that acts on another one: probes whether it is ready or alive, or makes it reload.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::error::ProcessError;
use super::host::ProcessHost;
use super::output::OutputTarget;
use super::probe::CommandRunner;
use super::running_process::{RunningProcess, StopDeadline};
use super::settings::Process;
use crate::failure::Failure;
use crate::process_exit::Signal;

/// Runs commands on this host.
///
/// A command runs in a separate task, which continues until all its descendants have exited even if the future is
/// dropped, also during the start. A shutdown waits for that task.
pub(super) fn command_runner(host: &Arc<ProcessHost>) -> CommandRunner {
    let host = Arc::clone(host);
    Arc::new(move |command| {
        let host = Arc::clone(&host);
        Box::pin(async move {
            // Dropping this future cancels the token, and the task then kills the command.
            let given_up = CancellationToken::new();
            let _guard = given_up.clone().drop_guard();
            host.reap_tasks.spawn(run_command(Arc::clone(&host), command, given_up)).await?
        })
    })
}

async fn run_command(
    host: Arc<ProcessHost>,
    command: Arc<Process>,
    given_up: CancellationToken,
) -> Result<(), Failure> {
    let turn = tokio::select! {
        turn = host.spawner.wait_turn() => turn,
        () = given_up.cancelled() => return Ok(()),
    };
    let mut running =
        RunningProcess::start(Arc::clone(&host), &command, turn, OutputTarget::Nowhere, None).await?;
    tokio::select! {
        ended = running.wait_exit() => ended.map_err(ProcessError::Watch)?,
        () = given_up.cancelled() => {}
    }
    // The descendants end with it, also after its own exit.
    running
        .stop(Signal::KILL, StopDeadline::new(Duration::ZERO, Duration::ZERO), |_, _| ())
        .await
        .map_err(ProcessError::Watch)?;
    let exit = running.into_exit().await;
    match exit.tail.last() {
        _ if exit.is_success() => Ok(()),
        Some(line) => Err(Failure::new(format!("{exit}: {line}"))),
        None => Err(ProcessError::Exited(exit).into()),
    }
}
