//! The snapshots that the API server knows of a node.

use std::collections::BTreeSet;

use kube::api::ListParams;
use kube::{Api, Client};

use crate::api::call::status_code;
use crate::api::timeout::with_timeout;
use crate::identity::ProvisionerIdentity;
use crate::snapshot::decide::ready_snapshot;
use crate::snapshot::{MANAGED_BY_LABEL, SnapshotId, VolumeSnapshotContent};

const PAGE_SIZE: u32 = 500;

/// The snapshots of a node that were taken and are not being removed: those of its ready VolumeSnapshotContents. None
/// without the snapshot API, or without the permission to list them: then the node has never served any.
pub(crate) async fn list_ready_snapshots(
    client: &Client,
    identity: &ProvisionerIdentity,
) -> Result<BTreeSet<SnapshotId>, kube::Error> {
    let contents: Api<VolumeSnapshotContent> = Api::all(client.clone());
    let label = format!("{MANAGED_BY_LABEL}={}", identity.node);
    let mut params = ListParams::default().labels(&label).limit(PAGE_SIZE);
    let mut ready = BTreeSet::new();
    loop {
        let page = match with_timeout(contents.list(&params)).await {
            Ok(page) => page,
            Err(error) if matches!(status_code(&error), Some(403 | 404)) => return Ok(BTreeSet::new()),
            Err(error) => return Err(error),
        };
        ready.extend(page.items.iter().filter_map(|content| ready_snapshot(identity, content)));
        // The API server marks the last page by a missing or an empty token.
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(ready),
        }
    }
}
