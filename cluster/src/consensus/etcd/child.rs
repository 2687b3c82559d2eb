//! etcd as a child whose failures are heard of.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::process::Process;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::sync::watch;

/// How many ends in a row, each before it was ready, are enough once it was ready: a process that is killed while it comes
/// back is no reason to give up on it.
const ENOUGH: u32 = 3;
/// How often it may end with code 0. etcd does that when it was told to, or when it finds that its cluster has removed it:
/// then each time, and it says that it is ready before it has looked.
const QUITS: u32 = 2;

/// How the process has fared since the member's run began.
#[derive(Clone, Debug, Default)]
struct Record {
    was_ready: bool,
    /// Ends in a row, each before it was ready.
    premature: u32,
    /// Ends with code 0 that nobody here has asked for.
    quits: u32,
    last: Option<Arc<str>>,
}

impl Record {
    /// It has ended, and nobody here has asked for that.
    fn ended(&mut self, result: &Result<(), Failure>) {
        self.premature += 1;
        self.last = Some(match result {
            Err(failure) => failure.to_string().into(),
            Ok(()) => {
                self.quits += 1;
                "exited with code 0, as it does when its cluster has removed it".into()
            }
        });
    }

    /// Why it is of no use to go on with it, if so: it has never worked, or does no more.
    fn hopeless(&self) -> Option<&Arc<str>> {
        let enough = if self.was_ready { ENOUGH } else { 1 };
        self.last.as_ref().filter(|_| self.premature >= enough || self.quits >= QUITS)
    }
}

/// The process, and word of its failures. The tree starts it again by itself; that it will not work, whatever is tried,
/// is for the member to tell.
#[derive(Debug)]
pub(super) struct Child {
    process: Process,
    record: watch::Sender<Record>,
}

/// What tells that the process doesn't work.
#[derive(Debug)]
pub(super) struct Trouble(watch::Receiver<Record>);

impl Child {
    pub(super) fn new(process: Process) -> (Child, Trouble) {
        let (record, trouble) = watch::channel(Record::default());
        (Child { process, record }, Trouble(trouble))
    }
}

impl Trouble {
    /// Resolves when the process doesn't work, with how it ended last. Never while it comes back.
    pub(super) async fn hopeless(&mut self) -> Arc<str> {
        let found = self.0.wait_for(|record| record.hopeless().is_some()).await;
        match found.ok().and_then(|record| record.hopeless().cloned()) {
            Some(failure) => failure,
            None => std::future::pending().await,
        }
    }
}

impl Runnable for Child {
    fn run(&self, ctx: Context) -> RunFuture {
        let (running, record) = (self.process.run(ctx.clone()), self.record.clone());
        Box::pin(async move {
            let ready = async {
                if ctx.wait_ready(ctx.dn()).await.is_ok() {
                    record.send_modify(|record| (record.was_ready, record.premature) = (true, 0));
                }
                std::future::pending().await
            };
            let result: Result<(), Failure> = tokio::select! {
                biased;
                result = running => result,
                () = ready => Ok(()),
            };
            if !ctx.is_cancelled() {
                record.send_modify(|record| record.ended(&result));
            }
            result
        })
    }

    fn stop_within(&self) -> Option<Duration> {
        self.process.stop_within()
    }
}
