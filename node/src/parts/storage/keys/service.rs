//! `root.cluster.keys`: stores the cluster's half of the data volume's key in the cluster.

use std::convert::Infallible;
use std::sync::Arc;

use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};

use super::VolumeKeys;

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
    keys.settle(cluster).await?;
    ctx.signal_ready()?;
    loop {
        keys.wait_unsettled().await;
        keys.settle(cluster).await?;
    }
}
