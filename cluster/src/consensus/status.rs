//! The status of a member.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, RunFuture, Runnable};
use tokio::sync::watch;

use super::{ClusterAccess, DataTransfer, JoinRefusal, MemberRecovery};

/// The status of this node's member.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum MemberStatus {
    /// The tree has not run it yet.
    #[default]
    NotStarted,
    /// Starting: it has not connected to the others yet, or is a learner.
    Starting,
    /// Not able to start yet; it tries again.
    Waiting {
        /// The condition that it waits for.
        reason: Arc<str>,
    },
    /// Receiving the cluster's data, before it starts to take part. Each such status has more of it than the one before.
    Receiving(DataTransfer),
    /// Not admitted by its cluster, and exited: nothing was started. The tree may run it again.
    Refused(JoinRefusal),
    /// Taking part.
    Running(ClusterAccess),
    /// Not able to take part at present, although it has before: calls may fail. It goes on by itself once the reason is gone.
    Impaired {
        /// The access that it has given out, which works again later.
        access: ClusterAccess,
        /// The condition that keeps it from taking part, and the remedy.
        reason: Arc<str>,
    },
    /// Exited. The tree may restart it.
    Exited {
        /// The cause, with all causes of it; `None` if it was stopped.
        failure: Option<Arc<str>>,
    },
}

impl MemberStatus {
    /// The running member, if it takes part, or did and is impaired.
    pub fn cluster_access(&self) -> Option<&ClusterAccess> {
        match self {
            MemberStatus::Running(access) | MemberStatus::Impaired { access, .. } => Some(access),
            _ => None,
        }
    }

    /// The condition that keeps the member from taking part at present, as far as it is known.
    pub fn obstacle(&self) -> Option<Arc<str>> {
        match self {
            MemberStatus::Waiting { reason } | MemberStatus::Impaired { reason, .. } => {
                Some(Arc::clone(reason))
            }
            MemberStatus::Receiving(transfer) => Some(transfer.to_string().into()),
            MemberStatus::Refused(refusal) => Some(refusal.to_string().into()),
            MemberStatus::Exited { failure: Some(failure) } => {
                Some(format!("the member failed: {failure}").into())
            }
            MemberStatus::Exited { failure: None } => Some("the member has exited".into()),
            MemberStatus::NotStarted | MemberStatus::Starting | MemberStatus::Running(_) => None,
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

    /// Waits until the member takes part, impaired or not; `None` if it never will, since its service is gone.
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
    /// The recovery of its cluster from this member; `None` if the implementation has none.
    pub recovery: Option<Arc<dyn MemberRecovery>>,
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
