//! A supervision tree with one member in it.

use std::path::PathBuf;
use std::time::Duration;

use nodekeel_cluster::consensus::{ClusterAccess, Consensus, MemberStatus, StartOptions, StatusWatch};
use nodekeel_supervisor::{Context, Failure, Supervisor};
use tokio::time::timeout;

/// Longer than anything here takes, unless it hangs.
pub(crate) const HANG: Duration = Duration::from_secs(90);

pub(crate) struct MemberRun {
    pub(crate) supervisor: Supervisor,
    pub(crate) status: StatusWatch,
    /// The file with its output.
    pub(crate) log: Option<PathBuf>,
    /// Of etcd's notification socket.
    _sockets: tempfile::TempDir,
}

impl MemberRun {
    /// Runs a member as `root.consensus`.
    pub(crate) fn start(consensus: &dyn Consensus, start: StartOptions) -> MemberRun {
        MemberRun::start_with(consensus, start, Supervisor::builder())
    }

    pub(crate) fn start_with(
        consensus: &dyn Consensus,
        start: StartOptions,
        builder: nodekeel_supervisor::SupervisorBuilder,
    ) -> MemberRun {
        let started = consensus.prepare_member(start);
        let sockets = tempfile::tempdir().unwrap();
        let supervisor = builder.notify_directory(sockets.path()).start(move |ctx: Context| {
            let service = started.service.clone();
            async move {
                ctx.run_child("consensus", service)?;
                ctx.signal_ready()?;
                Err::<(), Failure>(ctx.canceled().await.into())
            }
        });
        MemberRun { supervisor, status: started.status, log: None, _sockets: sockets }
    }

    pub(crate) async fn wait_running(&mut self) -> ClusterAccess {
        let running = timeout(HANG, self.status.wait_running()).await;
        running
            .unwrap_or_else(|_| {
                panic!("it does not run: {:?}\n{}", self.status.current_status(), self.last_log_lines())
            })
            .unwrap()
    }

    /// The last lines of its output.
    fn last_log_lines(&self) -> String {
        let log = self.log.as_ref().and_then(|log| std::fs::read_to_string(log).ok()).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(12)..].join("\n")
    }

    /// Waits until it waits for this.
    pub(crate) async fn wait_condition(&mut self, condition: &str) {
        let waiting = async {
            loop {
                match self.status.current_status() {
                    MemberStatus::Waiting { reason } if &*reason == condition => return,
                    _ => drop(self.status.next_status().await.unwrap()),
                }
            }
        };
        timeout(HANG, waiting).await.expect("it waits for it");
    }

    /// Why the first run failed.
    pub(crate) async fn wait_failure(&mut self) -> String {
        let failed = async {
            loop {
                match self.status.next_status().await.unwrap() {
                    MemberStatus::Exited { failure: Some(failure) } => return failure.to_string(),
                    MemberStatus::Refused(refusal) => return refusal.to_string(),
                    _ => {}
                }
            }
        };
        timeout(HANG, failed).await.expect("a failure in time")
    }

    pub(crate) async fn stop(self) -> StatusWatch {
        let report = self.supervisor.shutdown().await;
        assert!(report.stragglers.is_empty(), "{report:?}");
        self.status
    }
}
