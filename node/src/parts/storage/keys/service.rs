//! `root.cluster.keys` and `root.storage.keys`: store the cluster's half of the data volume's key in the cluster, or with
//! Tang servers.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase};
use nodekeel_supervisor::{Backoff, Context, Failure, RunFuture, Runnable};
use tokio::time::timeout;

use super::{ClusterKeyState, VolumeKeys};
use crate::error_chain::error_chain;
use crate::health::HealthChanges;
use crate::parts::storage::unlock::random_fraction;

/// The time until Tang servers are asked again whether they would open the volume: they announce neither an outage nor new
/// keys, and an operator removes the old ones some day.
const CHECK_PERIOD: Duration = Duration::from_secs(3600);

/// Completes changes of the volume's keys once the node is in its cluster. The supervisor repeats a step that fails.
pub(crate) struct KeyService {
    keys: Arc<VolumeKeys>,
    cluster: ClusterNode,
}

impl KeyService {
    pub(crate) fn new(keys: Arc<VolumeKeys>, cluster: ClusterNode) -> Self {
        Self { keys, cluster }
    }
}

impl Runnable for KeyService {
    fn run(&self, ctx: Context) -> RunFuture {
        let (keys, cluster) = (Arc::clone(&self.keys), self.cluster.clone());
        Box::pin(async move {
            tokio::select! {
                // A stop comes first: no further step starts.
                biased;
                canceled = ctx.canceled() => Err(canceled.into()),
                failed = keep_settled(&keys, &cluster, &ctx) => failed.map(|never| match never {}),
            }
        })
    }
}

async fn keep_settled(
    keys: &VolumeKeys,
    cluster: &ClusterNode,
    ctx: &Context,
) -> Result<Infallible, Failure> {
    // The state of the run before is replaced when this one starts.
    while cluster.wait_finished().await.is_err() {
        cluster.wait_phase_left(EnrolmentPhase::Failed).await;
    }
    keys.settle(Some(cluster)).await?;
    ctx.signal_ready()?;
    loop {
        keys.wait_unsettled().await;
        keys.settle(Some(cluster)).await?;
    }
}

/// The time until a server is asked again of which another one is enough: each check opens a key slot, which costs a second of
/// a processor.
const INCOMPLETE_PERIOD: Duration = Duration::from_secs(600);

/// Keeps the other half of the volume's key with Tang servers, and asks them now and then whether they would give it back; or of a
/// worker with the voters of its cluster. The volume is open: a server that does not answer is a warning, and no failure of the
/// runnable.
pub(crate) struct RemoteKeyService {
    keys: Arc<VolumeKeys>,
    health: HealthChanges,
}

impl RemoteKeyService {
    pub(crate) fn new(keys: Arc<VolumeKeys>, health: HealthChanges) -> Self {
        Self { keys, health }
    }
}

impl Runnable for RemoteKeyService {
    fn run(&self, ctx: Context) -> RunFuture {
        let (keys, health) = (Arc::clone(&self.keys), self.health.clone());
        Box::pin(async move {
            ctx.signal_ready()?;
            tokio::select! {
                biased;
                canceled = ctx.canceled() => Err(canceled.into()),
                never = keep_remotely(&keys, &health) => match never {},
            }
        })
    }
}

async fn keep_remotely(keys: &VolumeKeys, health: &HealthChanges) -> Infallible {
    let mut joined = keys.kept_by_voters().and_then(|api| api.worker_joined.clone());
    if let Some(joined) = &mut joined {
        // Its end is that of a configuration, and of this.
        let _ = joined.wait_for(|joined| *joined).await;
    }
    let mut failures = 0;
    loop {
        let before = keys.cluster_key_state();
        if let Err(error) = keys.settle(None).await {
            tracing::debug!("{}", error_chain(&error));
        }
        let state = keys.cluster_key_state();
        if state != before {
            match &state {
                ClusterKeyState::Pending(why) | ClusterKeyState::Incomplete(why) => tracing::warn!("{why}"),
                ClusterKeyState::Lost => {
                    tracing::warn!(
                        "no keeper of the other half of its key has one that opens the data volume"
                    )
                }
                _ => {}
            }
            health.announce();
        }
        let pause = match state {
            ClusterKeyState::Pending(_) | ClusterKeyState::Lost => {
                failures += 1;
                Backoff::default().jittered_delay(failures, random_fraction())
            }
            ClusterKeyState::Incomplete(_) => INCOMPLETE_PERIOD,
            ClusterKeyState::Stored | ClusterKeyState::Unknown => {
                failures = 0;
                // A cluster loses nothing that it has acknowledged.
                if joined.is_some() {
                    keys.wait_unsettled().await;
                    continue;
                }
                CHECK_PERIOD
            }
        };
        // A change of the keys, or the end of the pause.
        let _ = timeout(pause, keys.wait_unsettled()).await;
    }
}
