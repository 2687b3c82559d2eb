//! A program that asks whether another one works.

use std::io;
use std::sync::Arc;

use tokio::time::Instant;

use super::Process;
use super::error::ProcessError;
use super::host::Host;
use super::output::Sink;
use super::running::Running;
use super::status::Signal;
use crate::runnable::Failure;

/// Runs it once, with all that it forks: what is left of that when it has ended, or when this is dropped, is killed.
pub(super) async fn ask(host: Arc<Host>, command: Arc<Process>) -> Result<(), Failure> {
    let nowhere: [Sink; 2] = [Box::new(io::sink()), Box::new(io::sink())];
    let mut running = Running::start(host, &command, nowhere).await?;
    running.wait().await.map_err(ProcessError::Watch)?;
    running.end_rest(Signal::KILL, Instant::now()).await;
    let exit = running.exit().await;
    match exit.tail.last() {
        _ if exit.is_success() => Ok(()),
        Some(said) => Err(Failure::new(format!("{exit}: {said}"))),
        None => Err(ProcessError::Exited(exit).into()),
    }
}
