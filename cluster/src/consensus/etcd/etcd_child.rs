//! etcd as a supervised child that reports repeated failures.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_localstorage::tree::LayoutDir;
use nodekeel_supervisor::process::{Process, ProcessHandle};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::fault::{EtcdFault, FaultLog};
use super::local_member::CLIENT_SOCKET;

/// After the process was ready once: the number of consecutive exits before readiness that count as broken. A
/// process that is killed while it restarts is not broken.
const MAX_EARLY_EXITS: u32 = 3;
/// The number of times that it may exit with code 0. etcd does so when asked to stop, or when it finds that its cluster has
/// removed it: then every time, and it signals ready before it has checked.
const MAX_CLEAN_EXITS: u32 = 2;

/// The exits of the process since the member's run started.
#[derive(Clone, Debug, Default)]
struct ExitRecord {
    was_ready: bool,
    /// Consecutive exits before readiness.
    early_exits: u32,
    /// Exits with code 0 that nothing here has requested.
    clean_exits: u32,
    /// True from an exit until it is ready again.
    is_down: bool,
    last_exit: Option<Arc<str>>,
    /// True once it has found that its cluster has removed it.
    is_removed: bool,
}

impl ExitRecord {
    /// Records an exit that nothing here has requested, with the fault that etcd has logged before.
    fn record_exit(&mut self, result: &Result<(), Failure>, fault: Option<EtcdFault>) {
        self.early_exits += 1;
        self.is_down = true;
        self.is_removed |= fault == Some(EtcdFault::Removed);
        self.last_exit = Some(match (result, fault) {
            (Err(failure), Some(fault)) => format!("{failure}: {fault}").into(),
            (Err(failure), None) => failure.to_string().into(),
            (Ok(()), fault) => {
                self.clean_exits += 1;
                format!("exited with code 0: {}", fault.unwrap_or(EtcdFault::Removed)).into()
            }
        });
    }

    fn record_ready(&mut self) {
        (self.was_ready, self.is_down, self.early_exits) = (true, false, 0);
    }

    /// The last exit of the process, if it is broken: it has never worked, or no longer does.
    fn broken_reason(&self) -> Option<&Arc<str>> {
        // A process that has never worked is reported at its first exit; one that has may just have been
        // killed.
        let enough = if self.was_ready { MAX_EARLY_EXITS } else { 1 };
        let is_broken = self.is_removed || self.early_exits >= enough || self.clean_exits >= MAX_CLEAN_EXITS;
        self.last_exit.as_ref().filter(|_| is_broken)
    }
}

/// The process, with a record of its exits. The supervisor restarts the process itself; the member reports a
/// process that does not work after all retries.
#[derive(Debug)]
pub(super) struct EtcdChild {
    process: Process,
    /// The directory with its socket.
    client_dir: LayoutDir,
    faults: FaultLog,
    exits: watch::Sender<ExitRecord>,
}

/// What is known of the process without asking it.
#[derive(Clone, Debug)]
pub(super) struct ExitWatch {
    exits: watch::Receiver<ExitRecord>,
    faults: FaultLog,
    process: ProcessHandle,
}

impl EtcdChild {
    pub(super) fn new(process: Process, client_dir: LayoutDir) -> (EtcdChild, ExitWatch) {
        let (record, exits) = watch::channel(ExitRecord::default());
        let (faults, handle) = (FaultLog::default(), ProcessHandle::default());
        let process = process.copy_output(faults.clone()).handle(&handle);
        let child = EtcdChild { process, client_dir, faults: faults.clone(), exits: record };
        (child, ExitWatch { exits, faults, process: handle })
    }
}

impl ExitWatch {
    /// Completes when the process is broken, with its last exit. Never completes while the process may
    /// recover.
    pub(super) async fn wait_broken(&mut self) -> Arc<str> {
        let found = self.exits.wait_for(|record| record.broken_reason().is_some()).await;
        match found.ok().and_then(|record| record.broken_reason().cloned()) {
            Some(failure) => failure,
            None => std::future::pending().await,
        }
    }

    /// Returns whether the process has exited since its cluster has removed it.
    pub(super) fn is_removed(&self) -> bool {
        self.exits.borrow().is_removed
    }

    /// Waits until the process exits, or is ready again. Never completes once it can do neither.
    pub(super) async fn changed(&mut self) {
        if self.exits.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The last exit of a process that is not ready again yet.
    pub(super) fn last_exit(&self) -> Option<Arc<str>> {
        let record = self.exits.borrow();
        record.last_exit.clone().filter(|_| record.is_down)
    }

    /// Returns whether a thread of the process waits in the kernel, as for a disk that does not answer.
    pub(super) fn waits_in_kernel(&self) -> bool {
        self.process.waits_in_kernel()
    }

    /// The reason for which the process reaches no other member, if it has reported one since.
    pub(super) fn connection_fault(&self, since: Instant) -> Option<EtcdFault> {
        self.faults.connection_fault(since)
    }
}

impl Runnable for EtcdChild {
    fn run(&self, ctx: Context) -> RunFuture {
        let (running, record) = (self.process.run(ctx.clone()), self.exits.clone());
        let (faults, client_dir) = (self.faults.clone(), self.client_dir.clone());
        Box::pin(async move {
            // Before 3.5, etcd does not start if one that was killed has left its socket.
            spawn_blocking(move || client_dir.open()?.remove_file(CLIENT_SOCKET)).await??;
            let ready = async {
                if ctx.wait_ready(ctx.dn()).await.is_ok() {
                    record.send_modify(ExitRecord::record_ready);
                }
                // Only the exit of the process ends this run.
                std::future::pending().await
            };
            let result: Result<(), Failure> = tokio::select! {
                biased;
                result = running => result,
                () = ready => Ok(()),
            };
            // An exit that was requested is not counted.
            if !ctx.is_canceled() {
                record.send_modify(|record| record.record_exit(&result, faults.exit_fault()));
            }
            result
        })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.process.stop_timeout()
    }
}
