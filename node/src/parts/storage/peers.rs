//! The other nodes of the cluster, which give the node its other half of the volume's key when it starts cold.

use std::sync::Arc;

use super::unlock::{ClusterKeySource, ClusterKeysFuture, VolumeUnlock};
use crate::blocking::run_blocking;
use crate::parts::api::Api;

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
