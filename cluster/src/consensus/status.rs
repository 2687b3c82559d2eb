//! What is known of a member that was started.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Running;

/// How it is with this node's member.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Status {
    /// The tree has not run it yet.
    #[default]
    New,
    /// It starts: as a member that has yet to hear of the others, or as a learner.
    Starting,
    /// It takes part.
    Running(Running),
    /// It has ended. The tree may start it again.
    Ended {
        /// Why, with all causes; none where it was told to stop.
        failure: Option<Arc<str>>,
    },
}

impl Status {
    /// What can be done with a member that takes part.
    pub fn running(&self) -> Option<&Running> {
        match self {
            Status::Running(running) => Some(running),
            _ => None,
        }
    }
}

/// The status of a member, as it is and as it changes: the newest one only.
#[derive(Clone, Debug)]
pub struct StatusWatch(watch::Receiver<Status>);

impl StatusWatch {
    /// A watch of what is sent.
    pub fn new(receiver: watch::Receiver<Status>) -> StatusWatch {
        StatusWatch(receiver)
    }

    /// The status now.
    pub fn now(&self) -> Status {
        self.0.borrow().clone()
    }

    /// Waits for another status than the one that was seen last through this watch; none once there will be no other,
    /// since whoever runs the member is gone.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn changed(&mut self) -> Option<Status> {
        self.0.changed().await.ok()?;
        Some(self.0.borrow_and_update().clone())
    }

    /// Waits until the member takes part; none once it never will, since whoever runs it is gone.
    ///
    /// # Cancel safety
    /// It can be dropped and called again.
    pub async fn running(&mut self) -> Option<Running> {
        let status = self.0.wait_for(|status| status.running().is_some()).await.ok()?;
        status.running().cloned()
    }
}

/// A member that was prepared.
#[derive(Debug)]
pub struct Started {
    /// What the tree has to run. Its children are the member's parts.
    pub service: Service,
    /// How it is with it.
    pub status: StatusWatch,
}

/// A runnable that has been wrapped, so that it can be handed on whatever it is.
#[derive(Clone)]
pub struct Service(Arc<dyn Runnable>);

impl Service {
    /// Wraps a runnable.
    pub fn new(runnable: impl Runnable) -> Service {
        Service(Arc::new(runnable))
    }
}

impl Runnable for Service {
    fn run(&self, ctx: Context) -> RunFuture {
        self.0.run(ctx)
    }

    fn stop_within(&self) -> Option<Duration> {
        self.0.stop_within()
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").finish_non_exhaustive()
    }
}

/// One run of a member, as it is told to those who watch.
pub(crate) struct Turn<'a> {
    sender: &'a watch::Sender<Status>,
    stopped: CancellationToken,
}

impl<'a> Turn<'a> {
    pub(crate) fn begin(sender: &'a watch::Sender<Status>) -> Turn<'a> {
        sender.send_replace(Status::Starting);
        Turn { sender, stopped: CancellationToken::new() }
    }

    /// Cancelled when the run ends: what was handed out is of no use then.
    pub(crate) fn stopped(&self) -> CancellationToken {
        self.stopped.clone()
    }

    pub(crate) fn running(&self, running: Running) {
        self.sender.send_replace(Status::Running(running));
    }

    /// Tells the end, and hands on how it was.
    pub(crate) fn end(self, result: Result<(), Failure>) -> Result<(), Failure> {
        self.stopped.cancel();
        let failure = result.as_ref().err().filter(|failure| !failure.is_cancelled());
        self.sender
            .send_replace(Status::Ended { failure: failure.map(|failure| failure.to_string().into()) });
        result
    }
}

/// A run that was given up on has ended, too.
impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.stopped.cancel();
        self.sender.send_if_modified(|status| {
            let is_told = matches!(status, Status::Ended { .. });
            if !is_told {
                *status = Status::Ended { failure: None };
            }
            !is_told
        });
    }
}
