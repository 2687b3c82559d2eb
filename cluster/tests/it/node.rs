//! A tree with one member in it.

use std::path::PathBuf;
use std::time::Duration;

use nodekeel_cluster::consensus::{Consensus, Running, Start, Status, StatusWatch};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::time::timeout;

/// Longer than anything here takes, unless it hangs.
pub(crate) const HANG: Duration = Duration::from_secs(30);

pub(crate) struct Node {
    pub(crate) supervisor: Supervisor,
    pub(crate) status: StatusWatch,
    /// Where its output is.
    pub(crate) log: Option<PathBuf>,
}

impl Node {
    /// Runs a member as `root.consensus`.
    pub(crate) fn start(consensus: &dyn Consensus, start: Start) -> Node {
        Node::start_with(consensus, start, Supervisor::builder())
    }

    pub(crate) fn start_with(
        consensus: &dyn Consensus,
        start: Start,
        builder: nodekeel_supervisor::Builder,
    ) -> Node {
        let started = consensus.start(start);
        let supervisor = builder.start(move |ctx: Context| {
            let service = started.service.clone();
            async move {
                ctx.run("consensus", service)?;
                ctx.ready()?;
                Err::<(), Failure>(ctx.cancelled().await.into())
            }
        });
        Node { supervisor, status: started.status, log: None }
    }

    pub(crate) async fn running(&mut self) -> Running {
        let running = timeout(HANG, self.status.running()).await;
        running
            .unwrap_or_else(|_| panic!("it does not run: {:?}\n{}", self.status.now(), self.last()))
            .unwrap()
    }

    /// The last lines of its output.
    fn last(&self) -> String {
        let log = self.log.as_ref().and_then(|log| std::fs::read_to_string(log).ok()).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// Why the first run failed.
    pub(crate) async fn failure(&mut self) -> String {
        let failed = async {
            loop {
                if let Status::Ended { failure: Some(failure) } = self.status.changed().await.unwrap() {
                    return failure.to_string();
                }
            }
        };
        timeout(HANG, failed).await.expect("it fails in time")
    }

    pub(crate) async fn stop(self) -> StatusWatch {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        self.status
    }
}
