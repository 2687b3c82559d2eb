//! The condition of a published volume, as CSI reports it.

use tonic::Status;

use super::mounter::TargetMountError;
use super::node::{NodeService, run_blocking, store_status};
use super::proto::csi::{NodeGetVolumeStatsResponse, VolumeCondition};
use super::request::StatsRequest;
use super::stats::usage_rows;
use crate::error_chain::format_chain;
use crate::store::VolumeStoreError;

/// What the kubelet reports of a volume without problems.
const NORMAL_MESSAGE: &str = "the volume can be used";

impl NodeService {
    /// The usage of a published volume; if the store can't tell, because it or the volume is lost, only why the volume is
    /// abnormal. The kubelet must learn that the pod's volume is lost, and not that it was never there.
    pub(super) async fn volume_stats(
        &self,
        wanted: StatsRequest,
    ) -> Result<NodeGetVolumeStatsResponse, Status> {
        let volumes = self.node_volumes();
        match self.deps.store.usage(&wanted.id).await {
            Ok(volume) => {
                let space = run_blocking(move || volumes.published_space(&wanted)).await?;
                let normal = VolumeCondition { abnormal: false, message: NORMAL_MESSAGE.to_owned() };
                let usage = usage_rows(&volume, &space);
                Ok(NodeGetVolumeStatsResponse { usage, volume_condition: Some(normal) })
            }
            Err(error) => {
                let is_missing = matches!(error, VolumeStoreError::NotFound { .. });
                let is_published = run_blocking(move || Ok(volumes.is_occupied(&wanted, is_missing))).await?;
                if !is_published {
                    return Err(store_status(&error));
                }
                let message = match error {
                    VolumeStoreError::NotFound { id } => {
                        format!(
                            "volume {id} is missing in its store: restore it from a backup, or delete the claim"
                        )
                    }
                    error => format_chain(&error),
                };
                let abnormal = VolumeCondition { abnormal: true, message };
                Ok(NodeGetVolumeStatsResponse { usage: Vec::new(), volume_condition: Some(abnormal) })
            }
        }
    }
}

impl super::node::NodeVolumes {
    /// Whether the volume is mounted at the target, as far as the kernel tells of a disk that fails. What is mounted can't be
    /// compared with a missing directory: then the kubelet's path names the volume.
    fn is_occupied(&self, wanted: &StatsRequest, is_missing: bool) -> bool {
        let mut names = wanted.target.relative_path().iter();
        if is_missing && !names.any(|name| name == wanted.id.as_str()) {
            return false;
        }
        match self.mounter.find_mount(&wanted.target) {
            Ok(mounted) => mounted.is_some(),
            Err(TargetMountError::NotDirectory { .. }) => false,
            Err(_) => true,
        }
    }
}
