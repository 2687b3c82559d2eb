//! Unpacks layers into snapshots, each on top of the previous one.

use std::convert::Infallible;
use std::io::{self, Read};

use containerd_client::services::v1::diff_client::DiffClient;
use containerd_client::services::v1::snapshots::snapshots_client::SnapshotsClient;
use containerd_client::services::v1::snapshots::{
    CommitSnapshotRequest, PrepareSnapshotRequest, RemoveSnapshotRequest, StatSnapshotRequest, UsageRequest,
};
use containerd_client::services::v1::{ApplyRequest, ReadContentRequest, ReadContentResponse};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::import::ImportLease;
use super::{ContainerdImages, descriptor_to_proto, has_code, namespaced_request, store_error};
use crate::archive::measure_layer;
use crate::disk_space::UNPACKED_USAGE;
use crate::image::{ImageLayer, Labels};
use crate::import::bridge::wait_for_store;
use crate::store::{ErrorSource, ImageStoreError};
use crate::{Digest, DiskUsage, ImportLimits, Namespace};

/// Unpacks the layers without a snapshot. The returned label keeps the last snapshot, and so its parents.
pub(super) async fn unpack_layers(
    lease: &ImportLease,
    layers: &[ImageLayer],
) -> Result<Labels, ImageStoreError> {
    let mut chain: Option<Digest> = None;
    for (number, (layer, next)) in layers.iter().zip(chain_ids(layers)).enumerate() {
        // Unpacked before, for this image or for another with the same layers up to here.
        if has_snapshot(lease, next).await.map_err(|status| unpack_error(layer, status))? {
            chain = Some(next);
            continue;
        }
        // Before the snapshotter gets the layer: what it has unpacked may have filled the disk.
        check_disk_space(lease, layer, chain).await?;
        let mut done = unpack_layer(lease, layer, chain, next).await;
        if done.as_ref().is_err_and(|status| has_code(status, Code::AlreadyExists)) {
            // After an older copy of containerd's database was put back, it knows snapshots that the snapshotter does not have, or
            // the other way round: their rows are removed, and then the others are garbage.
            discard_unpacked(&lease.images, &lease.namespace, layers, number).await?;
            lease.images.collect_garbage(&lease.namespace).await?;
            done = unpack_layer(lease, layer, chain, next).await;
        }
        done.map_err(|status| unpack_error(layer, status))?;
        chain = Some(next);
    }
    // The garbage collector follows this label from content to a snapshot, and from there to its parents.
    let key = format!("containerd.io/gc.ref.snapshot.{}", lease.images.snapshotter_name);
    Ok(chain.map(|chain| (key, chain.to_string())).into_iter().collect())
}

/// Returns whether the last of these layers has a snapshot, and so all of them.
pub(super) async fn is_unpacked(
    images: &ContainerdImages,
    namespace: &Namespace,
    layers: &[ImageLayer],
) -> Result<bool, ImageStoreError> {
    let (Some(chain), Some(last)) = (chain_ids(layers).pop(), layers.last()) else { return Ok(true) };
    let stat = StatSnapshotRequest { snapshotter: images.snapshotter_name.clone(), key: chain.to_string() };
    let mut snapshots = SnapshotsClient::new(images.channel.clone());
    match snapshots.stat(namespaced_request(stat, namespace, None)).await {
        Ok(_) => Ok(true),
        Err(status) if has_code(&status, Code::NotFound) => Ok(false),
        Err(status) => Err(unpack_error(last, status)),
    }
}

/// Removes the snapshots from this layer on, the last one first; returns false where one is in use.
pub(super) async fn discard_unpacked(
    images: &ContainerdImages,
    namespace: &Namespace,
    layers: &[ImageLayer],
    from: usize,
) -> Result<bool, ImageStoreError> {
    let mut snapshots = SnapshotsClient::new(images.channel.clone());
    let chain: Vec<_> = layers.iter().zip(chain_ids(layers)).skip(from).collect();
    for (layer, name) in chain.into_iter().rev() {
        let request =
            RemoveSnapshotRequest { snapshotter: images.snapshotter_name.clone(), key: name.to_string() };
        match snapshots.remove(namespaced_request(request, namespace, None)).await {
            Err(status) if has_code(&status, Code::NotFound) => {}
            Err(status) if has_code(&status, Code::FailedPrecondition) => return Ok(false),
            removed => drop(removed.map_err(|status| unpack_error(layer, status))?),
        }
    }
    Ok(true)
}

pub(super) fn unpack_error(layer: &ImageLayer, status: Status) -> ImageStoreError {
    let digest = layer.blob.digest;
    store_error(status, &digest.to_string(), |source| ImageStoreError::UnpackLayer { digest, source })
}

/// The chain ID of each layer, which is the name of its snapshot.
pub(super) fn chain_ids(layers: &[ImageLayer]) -> Vec<Digest> {
    let mut chain = None;
    let next = |layer: &ImageLayer| {
        let id = chain_id(chain, layer.diff_id);
        chain = Some(id);
        id
    };
    layers.iter().map(next).collect()
}

/// The chain ID of a layer on top of those below it.
///
/// *Source:* OCI image specification, config.md, "Layer ChainID".
fn chain_id(below: Option<Digest>, diff_id: Digest) -> Digest {
    match below {
        None => diff_id,
        Some(below) => Digest::of_content(format!("{below} {diff_id}").as_bytes()),
    }
}

async fn unpack_layer(
    lease: &ImportLease,
    layer: &ImageLayer,
    below: Option<Digest>,
    name: Digest,
) -> Result<(), Status> {
    let mut snapshots = SnapshotsClient::new(lease.images.channel.clone());
    let snapshotter = lease.images.snapshotter_name.clone();
    // A new key: an active snapshot of a killed import may still exist.
    let key = lease.unique_key("unpack");
    let prepare = PrepareSnapshotRequest {
        snapshotter: snapshotter.clone(),
        key: key.clone(),
        parent: below.map(|below| below.to_string()).unwrap_or_default(),
        labels: Default::default(),
    };
    let mounts = snapshots.prepare(lease.leased_request(prepare)).await?.into_inner().mounts;
    let applied = apply_layer(lease, layer, mounts).await;
    let commit = CommitSnapshotRequest {
        snapshotter: snapshotter.clone(),
        name: name.to_string(),
        key: key.clone(),
        labels: Default::default(),
    };
    let committed = match applied {
        Ok(()) => snapshots.commit(lease.leased_request(commit)).await.map(drop),
        Err(status) => Err(status),
    };
    if committed.is_err() {
        let remove = RemoveSnapshotRequest { snapshotter, key };
        // Deleting the lease removes what remains if this fails.
        drop(snapshots.remove(lease.leased_request(remove)).await);
    }
    match committed {
        // Another client was faster.
        Err(status) if has_code(&status, Code::AlreadyExists) && has_snapshot(lease, name).await? => Ok(()),
        done => done,
    }
}

/// Returns whether there is a snapshot with this name; the lease keeps it.
pub(super) async fn has_snapshot(lease: &ImportLease, name: Digest) -> Result<bool, Status> {
    let stat =
        StatSnapshotRequest { snapshotter: lease.images.snapshotter_name.clone(), key: name.to_string() };
    match SnapshotsClient::new(lease.images.channel.clone()).stat(lease.leased_request(stat)).await {
        Err(status) if has_code(&status, Code::NotFound) => Ok(false),
        found => found.map(|_| true),
    }
}

/// Checks that the layer fits, by what its files take at most: it is read, and decompressed, to its end for that.
pub(super) async fn check_disk_space(
    lease: &ImportLease,
    layer: &ImageLayer,
    below: Option<Digest>,
) -> Result<(), ImageStoreError> {
    let Some(space) = lease.images.read_disk_space()? else { return Ok(()) };
    let copied = match below {
        Some(below) if lease.images.copies_layers_below() => {
            snapshot_usage(lease, below).await.map_err(|status| unpack_error(layer, status))?
        }
        _ => DiskUsage::default(),
    };
    let files = match layer.unpacked {
        Some(usage) => usage,
        None => measure_content(lease, layer, space.available).await?,
    };
    space.check_fits(UNPACKED_USAGE + copied + files, "its unpacked layer")
}

async fn snapshot_usage(lease: &ImportLease, name: Digest) -> Result<DiskUsage, Status> {
    let snapshotter = lease.images.snapshotter_name.clone();
    let request = lease.leased_request(UsageRequest { snapshotter, key: name.to_string() });
    let used = SnapshotsClient::new(lease.images.channel.clone()).usage(request).await?.into_inner();
    let number = |number: i64| number.try_into().unwrap_or_default();
    Ok(DiskUsage { bytes: number(used.size), inodes: number(used.inodes) })
}

/// What the files of a layer in the content store take, or more than `room`.
async fn measure_content(
    lease: &ImportLease,
    layer: &ImageLayer,
    room: DiskUsage,
) -> Result<DiskUsage, ImageStoreError> {
    let digest = layer.blob.digest;
    // containerd returns an error for reading empty content.
    if layer.blob.size == 0 {
        return Ok(DiskUsage::default());
    }
    let request = ReadContentRequest { digest: digest.to_string(), ..ReadContentRequest::default() };
    let answer = lease.images.content_client().read(lease.leased_request(request)).await;
    let to_error = |source: ErrorSource| ImageStoreError::ReadContent { digest, source };
    let parts = answer.map_err(|status| to_error(status.into()))?.into_inner();
    // Dropped with this future, which ends the thread's next wait for containerd.
    let (_keep_reading, stopped) = oneshot::channel();
    let content = ContentReader { runtime: Handle::current(), stopped, parts, part: Vec::new(), at: 0 };
    let measured = spawn_blocking(move || measure_layer(content, &ImportLimits::default(), room)).await;
    let measured = measured.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
    measured.map_err(|error| ImageStoreError::UnpackLayer { digest, source: error.into() })
}

/// Reads content on a blocking thread.
struct ContentReader {
    runtime: Handle,
    stopped: oneshot::Receiver<Infallible>,
    parts: Streaming<ReadContentResponse>,
    part: Vec<u8>,
    /// The bytes of the part that are read.
    at: usize,
}

impl Read for ContentReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.part.len() {
            let Self { runtime, stopped, parts, .. } = self;
            let next =
                async { parts.message().await.map_err(|status| ImageStoreError::BeginImport(status.into())) };
            match wait_for_store(runtime, stopped, next).map_err(io::Error::other)? {
                Some(part) => (self.part, self.at) = (part.data, 0),
                None => return Ok(0),
            }
        }
        let read = (&self.part[self.at..]).read(buffer)?;
        self.at += read;
        Ok(read)
    }
}

pub(super) async fn apply_layer(
    lease: &ImportLease,
    layer: &ImageLayer,
    mounts: Vec<containerd_client::types::Mount>,
) -> Result<(), Status> {
    let mut differ: DiffClient<Channel> = DiffClient::new(lease.images.channel.clone());
    let request = ApplyRequest {
        diff: Some(descriptor_to_proto(&layer.blob)),
        mounts,
        payloads: Default::default(),
        // 2.0 and later: durable before it is committed. Older releases ignore it.
        sync_fs: true,
    };
    let applied = differ.apply(lease.leased_request(request)).await?.into_inner().applied.unwrap_or_default();
    // The blob's digest covers its compressed bytes; the configuration has the digest of the tar in it.
    match applied.digest == layer.diff_id.to_string() {
        true => Ok(()),
        false => {
            Err(Status::data_loss(format!("unpacked to {} instead of {}", applied.digest, layer.diff_id)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// *Source:* the definition, by hand with `printf | sha256sum`.
    #[test]
    fn a_chain_id_starts_with_the_first_layer() {
        let (a, b) = (Digest::of_content(b"a"), Digest::of_content(b"b"));
        assert_eq!(chain_id(None, a), a);
        assert_eq!(
            chain_id(Some(a), b),
            Digest::of_content(format!("sha256:{} sha256:{}", a.to_hex(), b.to_hex()).as_bytes())
        );
    }
}
