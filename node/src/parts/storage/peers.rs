//! The other nodes of the cluster, which give the node its other half of the volume's key when it starts cold.

use std::sync::{Arc, Weak};

use super::unlock::{ClusterKeySource, ClusterKeysFuture, UnlockStatus, VolumeUnlock};
use crate::blocking::run_blocking;
use crate::health::{HealthCondition, HealthSource, NodeSnapshot};
use crate::parts::api::Api;
use crate::running::RunningNode;

/// Asks the other nodes by their APIs.
#[derive(Debug)]
pub(super) struct PeerKeySource {
    pub(super) api: Arc<Api>,
    pub(super) unlock: Arc<VolumeUnlock>,
}

impl ClusterKeySource for PeerKeySource {
    fn cluster_keys(&self) -> ClusterKeysFuture<'_> {
        Box::pin(async {
            let volume = self.unlock.encrypted_volume().ok_or("the data volume is not encrypted")?;
            let status = run_blocking(move || volume.encryption_status()).await?;
            Ok(self.api.ask_unlock_keys(&status.volume).await?)
        })
    }
}

/// The warning that no other node would open the volume at the next start.
pub(super) fn peers_health(unlock: Arc<VolumeUnlock>, node: Weak<RunningNode>) -> impl HealthSource {
    move |_: &NodeSnapshot| {
        // That of the present configuration: a reload may have replaced it.
        let api = node.upgrade().and_then(|node| node.extension::<Arc<Api>>());
        let is_open = matches!(unlock.status(), UnlockStatus::Open { .. });
        let is_alone = is_open && api.is_none_or(|api| !api.has_peers());
        let problem = "has no other node that would open it at the next start: none of its cluster has [api]";
        let warning = HealthCondition::warning("data volume", problem);
        let hint = "set api.address in the configurations of the other nodes, or add a node; `nodectl status root.api.peers`";
        is_alone.then(|| warning.hint(hint)).into_iter().collect::<Vec<_>>()
    }
}
