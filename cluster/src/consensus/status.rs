//! The status of a member.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::ClusterAccess;

/// The status of this node's member.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum MemberStatus {
    /// The tree has not run it yet.
    #[default]
    NotStarted,
    /// It is starting: it has not connected to the others yet, or is a learner.
    Starting,
    /// It takes part.
    Running(ClusterAccess),
    /// It has exited. The tree may restart it.
    Exited {
        /// Why, with all causes; `None` if it was stopped.
        failure: Option<Arc<str>>,
    },
}

impl MemberStatus {
    /// The running member, if it takes part.
    pub fn cluster_access(&self) -> Option<&ClusterAccess> {
        match self {
            MemberStatus::Running(running) => Some(running),
            _ => None,
        }
    }
}

/// Watches the status of a member: the newest value only.
#[derive(Clone, Debug)]
pub struct StatusWatch(watch::Receiver<MemberStatus>);

impl StatusWatch {
    /// A watch of this channel.
    pub fn from_receiver(receiver: watch::Receiver<MemberStatus>) -> StatusWatch {
        StatusWatch(receiver)
    }

    /// The status now.
    pub fn current_status(&self) -> MemberStatus {
        self.0.borrow().clone()
    }

    /// Waits for a status that this watch has not seen yet; `None` once no other can follow, since the
    /// member's service is gone.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn next_status(&mut self) -> Option<MemberStatus> {
        self.0.changed().await.ok()?;
        Some(self.0.borrow_and_update().clone())
    }

    /// Waits until the member takes part; `None` if it never will, since its service is gone.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn wait_running(&mut self) -> Option<ClusterAccess> {
        let status = self.0.wait_for(|status| status.cluster_access().is_some()).await.ok()?;
        status.cluster_access().cloned()
    }
}

/// A member that is ready to run.
#[derive(Debug)]
pub struct PreparedMember {
    /// The runnable for the tree. Its children are the member's parts.
    pub service: MemberService,
    /// The member's status.
    pub status: StatusWatch,
}

/// A type-erased runnable.
#[derive(Clone)]
pub struct MemberService(Arc<dyn Runnable>);

impl MemberService {
    /// Wraps a runnable.
    pub fn from_runnable(runnable: impl Runnable) -> MemberService {
        MemberService(Arc::new(runnable))
    }
}

impl Runnable for MemberService {
    fn run(&self, ctx: Context) -> RunFuture {
        self.0.run(ctx)
    }

    fn stop_timeout(&self) -> Option<Duration> {
        self.0.stop_timeout()
    }
}

impl fmt::Debug for MemberService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberService").finish_non_exhaustive()
    }
}

/// Reports the status of one run of a member to its watchers.
pub(crate) struct StatusReporter<'a> {
    sender: &'a watch::Sender<MemberStatus>,
    stop_token: CancellationToken,
}

impl<'a> StatusReporter<'a> {
    pub(crate) fn report_starting(sender: &'a watch::Sender<MemberStatus>) -> StatusReporter<'a> {
        sender.send_replace(MemberStatus::Starting);
        StatusReporter { sender, stop_token: CancellationToken::new() }
    }

    /// Cancelled when the run ends: handles that were given out are unusable then.
    pub(crate) fn stop_token(&self) -> CancellationToken {
        self.stop_token.clone()
    }

    pub(crate) fn report_running(&self, running: ClusterAccess) {
        self.sender.send_replace(MemberStatus::Running(running));
    }

    /// Reports the exit, and returns the result unchanged.
    pub(crate) fn report_exit(self, result: Result<(), Failure>) -> Result<(), Failure> {
        self.stop_token.cancel();
        let failure = result.as_ref().err().filter(|failure| !failure.is_canceled());
        self.sender.send_replace(MemberStatus::Exited {
            failure: failure.map(|failure| failure.to_string().into()),
        });
        result
    }
}

/// A run that was dropped has exited, too.
impl Drop for StatusReporter<'_> {
    fn drop(&mut self) {
        self.stop_token.cancel();
        self.sender.send_if_modified(|status| {
            let is_reported = matches!(status, MemberStatus::Exited { .. });
            if !is_reported {
                *status = MemberStatus::Exited { failure: None };
            }
            !is_reported
        });
    }
}
