//! The reports of a run of a member: for the implementations.

#[cfg(feature = "etcd")]
use std::convert::Infallible;
#[cfg(feature = "etcd")]
use std::sync::{Arc, Mutex, PoisonError};

use nodekeel_supervisor::Failure;
#[cfg(feature = "etcd")]
use nodekeel_supervisor::{Context, LifecycleSignalError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{ClusterAccess, JoinRefusal, MemberStatus};
#[cfg(feature = "etcd")]
use super::{MemberCondition, StatusWatch};

/// Reports the status of one run of a member to its watchers.
pub(crate) struct StatusReporter<'a> {
    sender: &'a watch::Sender<MemberStatus>,
    stop_token: CancellationToken,
    /// What keeps the member from taking part when nothing else does.
    #[cfg(feature = "etcd")]
    held: Mutex<Option<Arc<str>>>,
}

impl<'a> StatusReporter<'a> {
    pub(crate) fn report_starting(sender: &'a watch::Sender<MemberStatus>) -> StatusReporter<'a> {
        sender.send_replace(MemberStatus::Starting);
        StatusReporter {
            sender,
            stop_token: CancellationToken::new(),
            #[cfg(feature = "etcd")]
            held: Mutex::default(),
        }
    }

    /// Cancelled when the run ends: handles that were given out are unusable then.
    pub(crate) fn stop_token(&self) -> CancellationToken {
        self.stop_token.clone()
    }

    #[cfg(feature = "memory")]
    pub(crate) fn report_running(&self, running: ClusterAccess) {
        self.sender.send_replace(MemberStatus::Running(running));
    }

    /// Reports a member that serves, and what keeps it from taking part, if anything is known to.
    #[cfg(feature = "etcd")]
    pub(crate) fn report_serving(&self, access: ClusterAccess, condition: Option<&MemberCondition>) {
        self.sender.send_replace(match condition {
            None => MemberStatus::Running(access),
            Some(condition) => MemberStatus::Impaired { access, reason: condition.to_string().into() },
        });
    }

    /// Reports that the cluster does not admit the member, which exits now.
    pub(crate) fn report_refused(&self, refusal: &JoinRefusal) {
        self.sender.send_replace(MemberStatus::Refused(refusal.clone()));
    }

    /// Reports the exit, and returns the result unchanged.
    pub(crate) fn report_exit(self, result: Result<(), Failure>) -> Result<(), Failure> {
        // First: handles stop working before any watcher can learn of the exit.
        self.stop_token.cancel();
        let failure = result.as_ref().err().filter(|failure| !failure.is_canceled());
        let failure = failure.map(|failure| failure.to_string().into());
        self.sender.send_if_modified(|status| {
            // A refusal stays the status: it tells an operator more than the exit that follows.
            let is_refused = matches!(status, MemberStatus::Refused(_));
            if !is_refused {
                *status = MemberStatus::Exited { failure };
            }
            !is_refused
        });
        result
    }
}

/// The reports of a member that waits, is impaired and starts again: a member in memory does not.
#[cfg(feature = "etcd")]
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

    /// Returns whether the member has taken part in this run.
    pub(crate) fn is_serving(&self) -> bool {
        self.sender.borrow().cluster_access().is_some()
    }

    /// Reports what keeps the member from taking part at present; `None` when nothing is known to.
    pub(crate) fn report_condition(&self, condition: Option<&MemberCondition>) {
        let held = || self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let reason: Option<Arc<str>> = condition.map(|condition| condition.to_string().into()).or_else(held);
        self.sender.send_if_modified(|status| {
            // Watchers wake up, and log, only for another condition.
            if status.obstacle() == reason {
                return false;
            }
            *status = match (status.cluster_access().cloned(), reason) {
                (Some(access), Some(reason)) => MemberStatus::Impaired { access, reason },
                (Some(access), None) => MemberStatus::Running(access),
                (None, Some(reason)) => match condition {
                    Some(MemberCondition::Receiving(transfer)) => MemberStatus::Receiving(*transfer),
                    _ => MemberStatus::Waiting { reason },
                },
                (None, None) => MemberStatus::Starting,
            };
            true
        });
    }

    /// Reports what a member that does not serve yet waits for, until it is `None`; other conditions come first.
    pub(crate) fn hold(&self, reason: Option<&str>) {
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = reason.map(Into::into);
        match reason {
            Some(reason) => self.report_waiting(reason),
            None => self.report_starting_again(),
        }
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
            // A run that has reported its end itself has the better reason.
            let is_reported = matches!(status, MemberStatus::Exited { .. } | MemberStatus::Refused(_));
            if !is_reported {
                *status = MemberStatus::Exited { failure: None };
            }
            !is_reported
        });
    }
}
