//! etcd as a supervised child that reports repeated failures.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::process::Process;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::sync::watch;

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
    last_exit: Option<Arc<str>>,
}

impl ExitRecord {
    /// Records an exit that nothing here has requested.
    fn record_exit(&mut self, result: &Result<(), Failure>) {
        self.early_exits += 1;
        self.last_exit = Some(match result {
            Err(failure) => failure.to_string().into(),
            Ok(()) => {
                self.clean_exits += 1;
                "exited with code 0, as etcd does when its cluster has removed it".into()
            }
        });
    }

    /// The last exit of the process, if it is broken: it has never worked, or no longer does.
    fn broken_reason(&self) -> Option<&Arc<str>> {
        // A process that has never worked is reported at its first exit; one that has may just have been
        // killed.
        let enough = if self.was_ready { MAX_EARLY_EXITS } else { 1 };
        self.last_exit.as_ref().filter(|_| self.early_exits >= enough || self.clean_exits >= MAX_CLEAN_EXITS)
    }
}

/// The process, with a record of its exits. The supervisor restarts the process itself; the member reports a
/// process that does not work after all retries.
#[derive(Debug)]
pub(super) struct EtcdChild {
    process: Process,
    exits: watch::Sender<ExitRecord>,
}

/// Reports that the process is broken.
#[derive(Debug)]
pub(super) struct ExitWatch(watch::Receiver<ExitRecord>);

impl EtcdChild {
    pub(super) fn new(process: Process) -> (EtcdChild, ExitWatch) {
        let (record, exits) = watch::channel(ExitRecord::default());
        (EtcdChild { process, exits: record }, ExitWatch(exits))
    }
}

impl ExitWatch {
    /// Completes when the process is broken, with its last exit. Never completes while the process may
    /// recover.
    pub(super) async fn wait_broken(&mut self) -> Arc<str> {
        let found = self.0.wait_for(|record| record.broken_reason().is_some()).await;
        match found.ok().and_then(|record| record.broken_reason().cloned()) {
            Some(failure) => failure,
            None => std::future::pending().await,
        }
    }
}

impl Runnable for EtcdChild {
    fn run(&self, ctx: Context) -> RunFuture {
        let (running, record) = (self.process.run(ctx.clone()), self.exits.clone());
        Box::pin(async move {
            let ready = async {
                if ctx.wait_ready(ctx.dn()).await.is_ok() {
                    record.send_modify(|record| (record.was_ready, record.early_exits) = (true, 0));
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
                record.send_modify(|record| record.record_exit(&result));
            }
            result
        })
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.process.stop_timeout()
    }
}
