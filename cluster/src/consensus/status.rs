//! The status of a member.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure, LifecycleSignalError, RunFuture, Runnable};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{ClusterAccess, JoinRefusal, MemberCondition};

/// The status of this node's member.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum MemberStatus {
    /// The tree has not run it yet.
    #[default]
    NotStarted,
    /// It is starting: it has not connected to the others yet, or is a learner.
    Starting,
    /// It can't start yet, and tries again.
    Waiting {
        /// What it waits for.
        reason: Arc<str>,
    },
    /// Its cluster does not admit it, and it has exited: nothing was started. The tree may run it again.
    Refused(JoinRefusal),
    /// It takes part.
    Running(ClusterAccess),
    /// It has taken part, and can't at present: calls may fail. It goes on by itself once the reason is gone.
    Impaired {
        /// What it has given out, which works again later.
        access: ClusterAccess,
        /// What keeps it from taking part, and what to do.
        reason: Arc<str>,
    },
    /// It has exited. The tree may restart it.
    Exited {
        /// Why, with all causes; `None` if it was stopped.
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

    /// What keeps the member from taking part at present, as far as it is known.
    pub fn obstacle(&self) -> Option<Arc<str>> {
        match self {
            MemberStatus::Waiting { reason } | MemberStatus::Impaired { reason, .. } => {
                Some(Arc::clone(reason))
            }
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

    /// Reports that the cluster does not admit the member, which exits now.
    pub(crate) fn report_refused(&self, refusal: &JoinRefusal) {
        self.sender.send_replace(MemberStatus::Refused(refusal.clone()));
    }

    /// Reports the exit, and returns the result unchanged.
    pub(crate) fn report_exit(self, result: Result<(), Failure>) -> Result<(), Failure> {
        self.stop_token.cancel();
        let failure = result.as_ref().err().filter(|failure| !failure.is_canceled());
        let failure = failure.map(|failure| failure.to_string().into());
        self.sender.send_if_modified(|status| {
            let is_refused = matches!(status, MemberStatus::Refused(_));
            if !is_refused {
                *status = MemberStatus::Exited { failure };
            }
            !is_refused
        });
        result
    }
}

/// What a member in memory never reports.
#[cfg_attr(
    not(feature = "etcd"),
    expect(dead_code, reason = "only etcd's member waits, is impaired and starts again")
)]
impl StatusReporter<'_> {
    /// Keeps the readiness of the member's runnable equal to its status, until this future is dropped.
    pub(crate) async fn signal_readiness(&self, ctx: &Context) -> Result<Infallible, LifecycleSignalError> {
        let mut watch = StatusWatch::from_receiver(self.sender.subscribe());
        let (mut status, mut is_ready) = (watch.current_status(), false);
        loop {
            if let Some(reason) = status.obstacle() {
                ctx.signal_not_ready(reason)?;
                is_ready = false;
            } else if !is_ready && matches!(status, MemberStatus::Running(_)) {
                ctx.signal_ready()?;
                is_ready = true;
            }
            match watch.next_status().await {
                Some(next) => status = next,
                // The sender exists as long as this reporter.
                None => return std::future::pending().await,
            }
        }
    }

    /// Whether the member has taken part in this run.
    pub(crate) fn is_serving(&self) -> bool {
        self.sender.borrow().cluster_access().is_some()
    }

    /// Reports what keeps the member from taking part at present; `None` when nothing is known to.
    pub(crate) fn report_condition(&self, condition: Option<&MemberCondition>) {
        let reason: Option<Arc<str>> = condition.map(|condition| condition.to_string().into());
        self.sender.send_if_modified(|status| {
            if status.obstacle() == reason {
                return false;
            }
            *status = match (status.cluster_access().cloned(), reason) {
                (Some(access), Some(reason)) => MemberStatus::Impaired { access, reason },
                (Some(access), None) => MemberStatus::Running(access),
                (None, Some(reason)) => MemberStatus::Waiting { reason },
                (None, None) => MemberStatus::Starting,
            };
            true
        });
    }

    /// Reports what the member waits for before it can start.
    pub(crate) fn report_waiting(&self, reason: &str) {
        self.sender.send_if_modified(|status| {
            let is_known = matches!(status, MemberStatus::Waiting { reason: known } if **known == *reason);
            if !is_known {
                *status = MemberStatus::Waiting { reason: reason.into() };
            }
            !is_known
        });
    }

    /// Reports that the member starts now.
    pub(crate) fn report_starting_again(&self) {
        self.sender.send_replace(MemberStatus::Starting);
    }
}

/// A run that was dropped has exited, too.
impl Drop for StatusReporter<'_> {
    fn drop(&mut self) {
        self.stop_token.cancel();
        self.sender.send_if_modified(|status| {
            let is_reported = matches!(status, MemberStatus::Exited { .. } | MemberStatus::Refused(_));
            if !is_reported {
                *status = MemberStatus::Exited { failure: None };
            }
            !is_reported
        });
    }
}
