//! A program that asks whether another one works.

use std::io;
use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Process;
use super::error::ProcessError;
use super::host::Host;
use super::output::Sink;
use super::running::Running;
use super::status::Signal;
use crate::runnable::Failure;

/// Runs it once, with all that it forks: what is left of that when it has ended, or when this is dropped, is killed.
///
/// It runs in a task of its own, which goes on to the end of all of them when this is dropped, even in the midst of the
/// start; a shutdown waits for that.
pub(super) async fn ask(host: Arc<Host>, command: Arc<Process>) -> Result<(), Failure> {
    let given_up = CancellationToken::new();
    let _guard = given_up.clone().drop_guard();
    host.burials.spawn(run(Arc::clone(&host), command, given_up)).await?
}

async fn run(host: Arc<Host>, command: Arc<Process>, given_up: CancellationToken) -> Result<(), Failure> {
    let nowhere: [Sink; 2] = [Box::new(io::sink()), Box::new(io::sink())];
    let mut running = Running::start(host, &command, nowhere).await?;
    tokio::select! {
        ended = running.wait() => ended.map_err(ProcessError::Watch)?,
        () = given_up.cancelled() => {}
    }
    running.stop(Signal::KILL, Instant::now()).await.map_err(ProcessError::Watch)?;
    let exit = running.exit().await;
    match exit.tail.last() {
        _ if exit.is_success() => Ok(()),
        Some(said) => Err(Failure::new(format!("{exit}: {said}"))),
        None => Err(ProcessError::Exited(exit).into()),
    }
}
