//! The service: what it needs, what can be chosen, and its run.

use std::convert::Infallible;
use std::fmt;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use nodekeel_supervisor::{Backoff, Cancelled, Context, Failure, RunFuture, Runnable};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::apply::{Applier, ClientDebug};
use crate::controller;
use crate::event::Recorder;
use crate::guard::VolumeGuard;
use crate::locks::Locks;
use crate::meter::Meter;
use crate::plan::Identity;
use crate::step::{Hook, Steps};
use crate::store::VolumeStore;

/// What a provisioner works with.
#[derive(Clone)]
pub struct Deps {
    /// The API server. To mock it: `Client::new(tower_service, "default")`.
    pub client: Client,
    /// Where volumes are made.
    pub store: Arc<dyn VolumeStore>,
    /// What counts; `Arc::new(())` counts nothing.
    pub meter: Arc<dyn Meter>,
    /// Which volumes are in use, and so can't be destroyed. `None` where nobody mounts volumes.
    pub guard: Option<Arc<dyn VolumeGuard>>,
    /// Whether the kubelet knows the driver: readiness waits until it does. `None` where nobody serves CSI.
    pub registered: Option<watch::Receiver<bool>>,
    /// Hears of each step; for tests.
    pub hook: Option<Arc<dyn Hook>>,
}

/// What can be chosen.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Whose claims and volumes these are.
    pub identity: Identity,
    /// How many claims, and how many volumes beside them, are worked on at the same time. Default 16: most of the time goes
    /// by waiting for the API server.
    pub concurrency: NonZeroU16,
    /// When what has failed is tried again, for each claim and volume by itself. Default 1 s, doubled up to 5 min, give or
    /// take a tenth.
    pub backoff: Backoff,
    /// Where no node is selected, each node waits for a random part of this before it takes the claim, so that not all of
    /// them ask at once. Default 2 s; zero where there is one node.
    pub take_within: Duration,
    /// How many times in a row there may be no room for a volume before its claim is given up, so that another node is
    /// selected. Default 1.
    pub give_up_after: u32,
}

impl Config {
    /// The defaults.
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            concurrency: NonZeroU16::MIN.saturating_add(15),
            backoff: Backoff {
                initial: Duration::from_secs(1),
                factor: 2.0,
                max: Duration::from_secs(300),
                jitter: 0.1,
            },
            take_within: Duration::from_secs(2),
            give_up_after: 1,
        }
    }
}

/// Why a provisioner ended before it was cancelled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// It was cancelled: what was begun is done or will be done by the next run.
    #[error("cancelled")]
    Cancelled,
    /// A watch on the API server ended, which it never does by itself. Run it again.
    #[error("the watch of the API server ended")]
    WatchEnded,
}

/// Fulfils the claims of one node, and destroys its released volumes. It is a [`Runnable`].
#[derive(Debug, Clone)]
pub struct Provisioner {
    pub(crate) config: Config,
    pub(crate) applier: Arc<Applier>,
    pub(crate) registered: Option<watch::Receiver<bool>>,
}

impl Provisioner {
    /// A provisioner that has not begun.
    pub fn new(config: Config, deps: Deps) -> Self {
        let steps = Steps::new(deps.hook);
        let me = config.identity.clone();
        let applier = Applier {
            recorder: Recorder::new(deps.client.clone(), &me, steps.clone()),
            client: ClientDebug(deps.client),
            store: deps.store,
            guard: deps.guard,
            meter: deps.meter,
            locks: Locks::default(),
            steps,
            me,
        };
        Self { config, applier: Arc::new(applier), registered: deps.registered }
    }

    /// Works until it is cancelled. `ready` is called once, when the first lists are complete and the kubelet knows the driver.
    ///
    /// # Errors
    /// It always ends by one: [`RunError::Cancelled`] after the token is cancelled and what is under way has come to an end,
    /// else [`RunError::WatchEnded`].
    ///
    /// # Cancel safety
    /// A dropped run leaves what a crash would leave, which the next one takes up.
    pub async fn run_until(
        &self,
        token: CancellationToken,
        ready: impl FnOnce() + Send,
    ) -> Result<Infallible, RunError> {
        controller::run(self, &token, ready).await;
        match token.is_cancelled() {
            true => Err(RunError::Cancelled),
            false => Err(RunError::WatchEnded),
        }
    }
}

impl Runnable for Provisioner {
    fn run(&self, ctx: Context) -> RunFuture {
        let provisioner = self.clone();
        Box::pin(async move {
            let ready = || {
                // Stale only if this run has ended, and then nobody asks.
                let _ = ctx.ready();
            };
            match provisioner.run_until(ctx.token(), ready).await {
                Err(RunError::Cancelled) => Err(Cancelled.into()),
                Err(error) => Err(Failure::new(error)),
            }
        })
    }
}

impl fmt::Debug for Deps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deps").field("store", &self.store).field("meter", &self.meter).finish_non_exhaustive()
    }
}
