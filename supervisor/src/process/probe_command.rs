//! A program that acts on another one: probes whether it is ready or alive, or makes it reload.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::Process;
use super::error::ProcessError;
use super::host::ProcessHost;
use super::output::StreamSink;
use super::running_process::{RunningProcess, StopDeadline};
use crate::failure::Failure;
use crate::process_exit::Signal;

/// Runs the command once, with everything that it forks. When it has exited, or when this future is dropped,
/// the remaining descendants are killed.
///
/// It runs in a separate task, which continues until all of them have exited even if this future is dropped,
/// also during the start. A shutdown waits for that task.
pub(super) async fn run_probe(host: Arc<ProcessHost>, command: Arc<Process>) -> Result<(), Failure> {
    let given_up = CancellationToken::new();
    let _guard = given_up.clone().drop_guard();
    host.reap_tasks.spawn(run_command(Arc::clone(&host), command, given_up)).await?
}

async fn run_command(
    host: Arc<ProcessHost>,
    command: Arc<Process>,
    given_up: CancellationToken,
) -> Result<(), Failure> {
    let nowhere: [StreamSink; 2] = [Box::new(io::sink()), Box::new(io::sink())];
    let turn = tokio::select! {
        turn = host.spawner.wait_turn() => turn,
        () = given_up.cancelled() => return Ok(()),
    };
    let mut running = RunningProcess::start(Arc::clone(&host), (&command, turn), nowhere, None).await?;
    tokio::select! {
        ended = running.wait_exit() => ended.map_err(ProcessError::Watch)?,
        () = given_up.cancelled() => {}
    }
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
