//! Layers into file systems, one upon the other.

use containerd_client::services::v1::ApplyRequest;
use containerd_client::services::v1::diff_client::DiffClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest, StatSnapshotRequest,
};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::import::Lease;
use super::{failed, is, to_wire};
use crate::Digest;
use crate::image::{Labels, Layer};
use crate::store::StoreError;

/// Unpacks what isn't unpacked yet. The label that is returned keeps the last file system, and so all below it.
pub(super) async fn unpack(lease: &Lease, layers: &[Layer]) -> Result<Labels, StoreError> {
    let mut chain: Option<Digest> = None;
    for layer in layers {
        let next = chained(chain, layer.diff_id);
        let wrong = |source| StoreError::Unpack { digest: layer.blob.digest, source };
        let done = one(lease, layer, chain, next).await;
        done.map_err(|status| failed(status, &layer.blob.digest.to_string(), wrong))?;
        chain = Some(next);
    }
    let key = format!("containerd.io/gc.ref.snapshot.{}", lease.images.snapshotter);
    Ok(chain.map(|chain| (key, chain.to_string())).into_iter().collect())
}

/// What a layer is called upon those below it.
///
/// *Source:* OCI image specification, config.md, "Layer ChainID".
fn chained(below: Option<Digest>, diff_id: Digest) -> Digest {
    match below {
        None => diff_id,
        Some(below) => Digest::of(format!("{below} {diff_id}").as_bytes()),
    }
}

async fn one(lease: &Lease, layer: &Layer, below: Option<Digest>, name: Digest) -> Result<(), Status> {
    let mut snapshots = SnapshotsClient::new(lease.images.channel.clone());
    let snapshotter = lease.images.snapshotter.clone();
    let stat = StatSnapshotRequest { snapshotter: snapshotter.clone(), key: name.to_string() };
    match snapshots.stat(lease.request(stat)).await {
        Err(status) if is(&status, Code::NotFound) => {}
        found => return found.map(drop),
    }
    let key = lease.unique("unpack");
    let prepare = PrepareSnapshotRequest {
        snapshotter: snapshotter.clone(),
        key: key.clone(),
        parent: below.map(|below| below.to_string()).unwrap_or_default(),
        labels: Default::default(),
    };
    let mounts = snapshots.prepare(lease.request(prepare)).await?.into_inner().mounts;
    let applied = apply(lease, layer, mounts).await;
    let commit = CommitSnapshotRequest {
        snapshotter: snapshotter.clone(),
        name: name.to_string(),
        key: key.clone(),
        labels: Default::default(),
    };
    let committed = match applied {
        Ok(()) => snapshots.commit(lease.request(commit)).await.map(drop),
        Err(status) => Err(status),
    };
    if committed.is_err() {
        let remove = RemoveSnapshotRequest { snapshotter, key };
        // The lease's end removes what this doesn't.
        drop(snapshots.remove(lease.request(remove)).await);
    }
    match committed {
        // Somebody else was faster.
        Err(status) if is(&status, Code::AlreadyExists) => Ok(()),
        done => done,
    }
}

async fn apply(
    lease: &Lease,
    layer: &Layer,
    mounts: Vec<containerd_client::types::Mount>,
) -> Result<(), Status> {
    let mut differ: DiffClient<Channel> = DiffClient::new(lease.images.channel.clone());
    let asked = ApplyRequest {
        diff: Some(to_wire(&layer.blob)),
        mounts,
        payloads: Default::default(),
        // 2.0 and later: durable before it is committed. Older ones pass over it.
        sync_fs: true,
    };
    let applied = differ.apply(lease.request(asked)).await?.into_inner().applied.unwrap_or_default();
    match applied.digest == layer.diff_id.to_string() {
        true => Ok(()),
        false => {
            Err(Status::data_loss(format!("it unpacks to {} instead of {}", applied.digest, layer.diff_id)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// *Source:* the definition, by hand with `printf | sha256sum`.
    #[test]
    fn a_chain_begins_with_its_first_layer() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        assert_eq!(chained(None, a), a);
        assert_eq!(
            chained(Some(a), b),
            Digest::of(format!("sha256:{} sha256:{}", a.hex(), b.hex()).as_bytes())
        );
    }
}
