//! The image store of a containerd, through its content, leases and images services, which 1.6 and 2.x share.

mod image_events;
mod import;
mod snapshot_proof;
mod unpack;
mod writer;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use async_trait::async_trait;
use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::namespaces_client::NamespacesClient;
use containerd_client::services::v1::version_client::VersionClient;
use containerd_client::services::v1::{
    DeleteContentRequest, Info, InfoRequest, ListImagesRequest, ListNamespacesRequest, ReadContentRequest,
    UpdateRequest,
};
use containerd_client::types;
use prost_types::FieldMask;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::digest::DigestHasher;
use crate::image::{Descriptor, Image, ImageLayer};
use crate::store::{ErrorSource, ImageStore, ImageStoreError, ImportSession, ReadPace};
use crate::{Digest, DiskReserve, DiskSpace, DiskUsage, InstanceId, Namespace};

pub(crate) use image_events::{ImageEvent, ImageEvents};
use import::{ContainerdImport, ImportLease};

/// The default snapshotter of containerd.
const DEFAULT_SNAPSHOTTER: &str = "overlayfs";

/// The label of content whose file was seen to be damaged: containerd itself knows content from its database alone, which keeps
/// this through kills of both programs. The record that is written in its place has no such label.
const DAMAGED_LABEL: &str = "nodekeel.damaged";

/// The image store of a running containerd.
#[derive(Debug, Clone)]
pub struct ContainerdImages {
    channel: Channel,
    snapshotter_name: String,
    /// A directory on the disk of the content, and what stays free there.
    disk: Option<(PathBuf, DiskReserve)>,
    /// True if an import compares existing layers with their digests, too.
    verifies_layers: bool,
    /// The program that the leases belong to.
    instance: InstanceId,
    /// Makes the lease ids of one process unique.
    import_count: Arc<AtomicU64>,
}

/// The containerd at a socket does not answer.
#[derive(Debug, thiserror::Error)]
#[error("can't call containerd at {socket} (is it running?)")]
pub struct ConnectError {
    socket: PathBuf,
    #[source]
    source: ErrorSource,
}

impl ContainerdImages {
    /// Connects to the socket of a containerd's API.
    ///
    /// # Errors
    /// [`ConnectError`]; a retry helps once containerd runs.
    pub async fn connect(socket: &Path) -> Result<Self, ConnectError> {
        let failed = |source: tonic::transport::Error| ConnectError {
            socket: socket.to_owned(),
            source: source.into(),
        };
        let channel = containerd_client::connect(socket).await.map_err(failed)?;
        let snapshotter_name = DEFAULT_SNAPSHOTTER.to_owned();
        Ok(Self {
            channel,
            snapshotter_name,
            disk: None,
            verifies_layers: false,
            instance: InstanceId::default(),
            import_count: Arc::default(),
        })
    }

    /// Sets the snapshotter that layers are unpacked into. Default: `overlayfs`.
    #[must_use]
    pub fn with_snapshotter(mut self, snapshotter: impl Into<String>) -> Self {
        self.snapshotter_name = snapshotter.into();
        self
    }

    /// Compares each layer that an import finds already present with its digest, and replaces a damaged one. That takes as
    /// long as to read it. Default: only that its file has its size.
    #[must_use]
    pub fn with_layer_verification(mut self) -> Self {
        self.verifies_layers = true;
        self
    }

    /// Sets the name of this program among several that import into the containerd. Default: that of the only one.
    #[must_use]
    pub fn with_instance(mut self, instance: InstanceId) -> Self {
        self.instance = instance;
        self
    }

    /// Keeps a reserve free on the disk of this directory, containerd's root. Default: nothing is checked before
    /// it is written.
    #[must_use]
    pub fn with_disk(mut self, root: impl Into<PathBuf>, reserve: DiskReserve) -> Self {
        self.disk = Some((root.into(), reserve));
        self
    }

    /// Discards the content of imports of this instance that were killed with their process or containerd, in all namespaces.
    /// Otherwise it would stay for a day. No other process of this instance may import into this containerd.
    ///
    /// # Errors
    /// [`ImageStoreError`]; a retry can help.
    pub(crate) async fn discard_abandoned_imports(&self) -> Result<(), ImageStoreError> {
        for namespace in self.list_namespaces().await? {
            import::discard_abandoned_imports(self, &namespace).await?;
        }
        Ok(())
    }

    /// Whether the snapshotter copies the files of a parent into each snapshot.
    fn copies_layers_below(&self) -> bool {
        self.snapshotter_name == "native"
    }

    /// A project limit of the root hides its disk, of which volumes and others may have left less.
    fn read_disk_space(&self) -> Result<Option<DiskSpace>, ImageStoreError> {
        let Some((root, reserve)) = &self.disk else { return Ok(None) };
        let failed = |error: rustix::io::Errno| ImageStoreError::ReadDiskSpace(error.into());
        let device = |path: &Path| rustix::fs::stat(path).map(|found| found.st_dev).ok();
        // On the same file system, but outside of the project limit: its numbers are those of the whole disk.
        let parent = root.parent().filter(|parent| device(parent) == device(root));
        let [disk, limited] = [parent.unwrap_or(root), root].map(rustix::fs::statvfs);
        let (disk, limited) = (disk.map_err(failed)?, limited.map_err(failed)?);
        let bytes = |blocks: u64| blocks.saturating_mul(disk.f_frsize);
        let usage = |blocks, inodes| DiskUsage { bytes: bytes(blocks), inodes };
        let (all, free) = (usage(disk.f_blocks, disk.f_files), usage(disk.f_bfree, disk.f_ffree));
        let space = DiskSpace::above_reserve(*reserve, all, free, bytes(disk.f_bavail));
        Ok(Some(space.limited_to(bytes(limited.f_bavail))))
    }
}

/// Asks the containerd at a socket for its version; an answer shows that the daemon works.
///
/// # Errors
/// [`ConnectError`]; a retry helps once containerd runs.
pub async fn daemon_version(socket: &Path) -> Result<String, ConnectError> {
    let failed = |source: ErrorSource| ConnectError { socket: socket.to_owned(), source };
    let channel = containerd_client::connect(socket).await.map_err(|error| failed(error.into()))?;
    let answer = VersionClient::new(channel).version(()).await.map_err(|error| failed(error.into()))?;
    Ok(answer.into_inner().version)
}

/// A request in a namespace; the lease holds what it creates.
fn namespaced_request<T>(message: T, namespace: &Namespace, lease: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    let values = [("containerd-namespace", Some(namespace.as_str())), ("containerd-lease", lease)];
    for (key, value) in values.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        let value = value.parse().expect("names of namespaces and leases are letters, digits, . _ and -");
        request.metadata_mut().insert(key, value);
    }
    request
}

fn has_code(status: &Status, code: Code) -> bool {
    status.code() == code
}

/// Returns whether a read has failed because of the file, and not of the connection.
fn is_unreadable(status: &Status) -> bool {
    matches!(status.code(), Code::NotFound | Code::OutOfRange | Code::DataLoss | Code::Unknown)
}

/// The kernel's messages for ENOSPC and EDQUOT.
///
/// *Source:* Go's `syscall`, `zerrors_linux_*.go`.
const DISK_FULL_TEXTS: [&str; 2] = ["no space left on device", "disk quota exceeded"];

/// Converts a status to a store error; a full disk or quota has a separate variant.
fn store_error(
    status: Status,
    what: &str,
    other: impl FnOnce(ErrorSource) -> ImageStoreError,
) -> ImageStoreError {
    // containerd passes on the kernel's message without a separate status code.
    let is_full = DISK_FULL_TEXTS.iter().any(|text| status.message().contains(text));
    if is_full || has_code(&status, Code::ResourceExhausted) {
        return ImageStoreError::NoSpace { what: what.to_owned(), source: status.into() };
    }
    other(status.into())
}

fn descriptor_to_proto(descriptor: &Descriptor) -> types::Descriptor {
    types::Descriptor {
        media_type: descriptor.media_type.clone(),
        digest: descriptor.digest.to_string(),
        size: descriptor.size.cast_signed(),
        annotations: Default::default(),
    }
}

/// `None` for an image with another digest than SHA-256, which this crate never creates.
fn image_from_proto(image: containerd_client::services::v1::Image) -> Option<Image> {
    let target = image.target?;
    let target = Descriptor {
        digest: target.digest.parse().ok()?,
        size: target.size.try_into().ok()?,
        media_type: target.media_type,
    };
    Some(Image { name: image.name, target, labels: image.labels.into_iter().collect() })
}

impl ContainerdImages {
    fn content_client(&self) -> ContentClient<Channel> {
        ContentClient::new(self.channel.clone())
    }

    /// See [`ImageStore::content_size`].
    async fn stat_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<u64>, ImageStoreError> {
        match self.read_record(namespace, digest).await? {
            // Whether its other bytes are right was looked at before.
            Some(record) if record.labels.contains_key(DAMAGED_LABEL) => Ok(None),
            Some(record) => self.stat_file(namespace, digest, &record).await,
            None => Ok(None),
        }
    }

    /// The row of some content in containerd's database.
    async fn read_record(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<Info>, ImageStoreError> {
        let request = namespaced_request(InfoRequest { digest: digest.to_string() }, namespace, None);
        match self.content_client().info(request).await {
            Ok(answer) => Ok(Some(answer.into_inner().info.unwrap_or_default())),
            Err(status) if has_code(&status, Code::NotFound) => Ok(None),
            Err(status) => Err(ImageStoreError::ReadContent { digest: *digest, source: status.into() }),
        }
    }

    /// The size of some content whose file has this size.
    async fn stat_file(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        record: &Info,
    ) -> Result<Option<u64>, ImageStoreError> {
        let to_error = |source: ErrorSource| ImageStoreError::ReadContent { digest: *digest, source };
        let size = record.size.try_into().map_err(|_| to_error("negative size".into()))?;
        let is_readable = self.has_last_byte(namespace, digest, size).await;
        Ok(is_readable.map_err(|status| to_error(status.into()))?.then_some(size))
    }

    /// Labels the records of some content, in all namespaces: they have one file.
    async fn record_damage(&self, digest: &Digest, is_damaged: bool) -> Result<(), ImageStoreError> {
        // A label without a value is removed.
        let value = if is_damaged { "true" } else { "" };
        let labels = HashMap::from([(DAMAGED_LABEL.to_owned(), value.to_owned())]);
        let info = Some(Info { digest: digest.to_string(), labels, ..Info::default() });
        let update_mask = Some(FieldMask { paths: vec![format!("labels.{DAMAGED_LABEL}")] });
        for namespace in self.list_namespaces().await? {
            let request = UpdateRequest { info: info.clone(), update_mask: update_mask.clone() };
            match self.content_client().update(namespaced_request(request, &namespace, None)).await {
                Err(status) if !has_code(&status, Code::NotFound) => {
                    let to_error = |source| ImageStoreError::LabelContent { digest: *digest, source };
                    return Err(store_error(status, "labels", to_error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns whether the file of some content has this size: containerd knows sizes from its database alone, also those
    /// of files that a power cut has taken away or truncated.
    async fn has_last_byte(&self, namespace: &Namespace, digest: &Digest, size: u64) -> Result<bool, Status> {
        // containerd returns an error for reading empty content.
        let Some(last) = size.checked_sub(1) else { return Ok(true) };
        let request = ReadContentRequest { digest: digest.to_string(), offset: last.cast_signed(), size: 1 };
        let read = async {
            let mut parts =
                self.content_client().read(namespaced_request(request, namespace, None)).await?.into_inner();
            Ok(parts.message().await?.is_some_and(|part| !part.data.is_empty()))
        };
        match read.await {
            Err(status) if is_unreadable(&status) => Ok(false),
            read => read,
        }
    }

    /// Returns whether some content of this size matches its digest.
    async fn matches_digest(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        record: &Info,
        size: u64,
        pace: &ReadPace,
    ) -> Result<bool, ImageStoreError> {
        if self.stat_file(namespace, digest, record).await? != Some(size) {
            return Ok(false);
        }
        let mut hasher = DigestHasher::default();
        // containerd returns an error for reading empty content.
        let read = async {
            if size == 0 {
                return Ok(());
            }
            let request =
                ReadContentRequest { digest: digest.to_string(), offset: 0, size: size.cast_signed() };
            let request = namespaced_request(request, namespace, None);
            let mut parts = self.content_client().read(request).await?.into_inner();
            while let Some(part) = parts.message().await? {
                hasher.update(&part.data);
                pace.spend(part.data.len() as u64).await;
            }
            Ok(())
        };
        match read.await {
            Ok(()) => Ok(hasher.finish() == *digest),
            // A disk that can't read it back has damaged it.
            Err(status) if is_unreadable(&status) => Ok(false),
            Err(status) => Err(ImageStoreError::ReadContent { digest: *digest, source: status.into() }),
        }
    }

    /// Removes content whose file is damaged, with its records in all namespaces: only then does containerd write it anew.
    /// The lease keeps what only this content has referred to.
    async fn discard_content(&self, lease: &ImportLease, digest: &Digest) -> Result<(), ImageStoreError> {
        tracing::warn!("content {digest} in containerd is damaged: writing it again");
        let to_error = |source: ErrorSource| ImageStoreError::ReadContent { digest: *digest, source };
        lease.keep_references(digest).await.map_err(|status| to_error(status.into()))?;
        for namespace in self.list_namespaces().await? {
            let request = DeleteContentRequest { digest: digest.to_string() };
            match self.content_client().delete(namespaced_request(request, &namespace, None)).await {
                Err(status) if !has_code(&status, Code::NotFound) => return Err(to_error(status.into())),
                _ => {}
            }
        }
        // With the record, the file is garbage.
        self.collect_garbage(&lease.namespace).await
    }

    /// The end of a lease collects garbage at once.
    async fn collect_garbage(&self, namespace: &Namespace) -> Result<(), ImageStoreError> {
        Box::new(ContainerdImport::begin(self.clone(), namespace.clone()).await?).finish().await
    }
}

#[async_trait]
impl ImageStore for ContainerdImages {
    async fn list_namespaces(&self) -> Result<Vec<Namespace>, ImageStoreError> {
        let answer = NamespacesClient::new(self.channel.clone()).list(ListNamespacesRequest::default()).await;
        let answer = answer.map_err(|status| ImageStoreError::ListNamespaces(status.into()))?;
        let namespaces = answer.into_inner().namespaces.into_iter();
        // This crate never uses another name.
        Ok(namespaces.filter_map(|namespace| namespace.name.parse().ok()).collect())
    }

    async fn list_images(&self, namespace: &Namespace) -> Result<Vec<Image>, ImageStoreError> {
        let request = namespaced_request(ListImagesRequest::default(), namespace, None);
        // tonic's limit of 4 MiB is too small for a namespace with many images.
        let mut client = ImagesClient::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        let answer = client.list(request).await;
        let to_error = |status: Status| ImageStoreError::ListImages {
            namespace: namespace.clone(),
            source: status.into(),
        };
        Ok(answer.map_err(to_error)?.into_inner().images.into_iter().filter_map(image_from_proto).collect())
    }

    async fn content_size(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<u64>, ImageStoreError> {
        self.stat_content(namespace, digest).await
    }

    async fn read_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        size: u64,
    ) -> Result<Option<Vec<u8>>, ImageStoreError> {
        let to_error = |source: ErrorSource| ImageStoreError::ReadContent { digest: *digest, source };
        if self.stat_content(namespace, digest).await? != Some(size) {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        // containerd returns an error for reading empty content.
        if size > 0 {
            let request =
                ReadContentRequest { digest: digest.to_string(), offset: 0, size: size.cast_signed() };
            let answer = self.content_client().read(namespaced_request(request, namespace, None)).await;
            let mut parts = answer.map_err(|status| to_error(status.into()))?.into_inner();
            while let Some(part) = parts.message().await.map_err(|status| to_error(status.into()))? {
                bytes.extend_from_slice(&part.data);
                // The size bounds the memory, so it has to bound the stream, too.
                if bytes.len() as u64 > size {
                    return Ok(None);
                }
            }
        }
        // containerd verifies content when it is written, but not when it is read: the disk may have damaged
        // it.
        Ok((Digest::of_content(&bytes) == *digest).then_some(bytes))
    }

    async fn verify_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        size: u64,
        pace: &ReadPace,
    ) -> Result<bool, ImageStoreError> {
        let Some(record) = self.read_record(namespace, digest).await? else { return Ok(false) };
        let is_intact = self.matches_digest(namespace, digest, &record, size, pace).await?;
        if is_intact == record.labels.contains_key(DAMAGED_LABEL) {
            self.record_damage(digest, !is_intact).await?;
        }
        Ok(is_intact)
    }

    async fn find_damaged_layer(
        &self,
        namespace: &Namespace,
        layers: &[ImageLayer],
        thorough: bool,
    ) -> Result<Option<usize>, ImageStoreError> {
        let import = ContainerdImport::begin(self.clone(), namespace.clone()).await?;
        let found = snapshot_proof::find_damaged_layer(import.lease(), layers, thorough).await;
        Box::new(import).finish().await?;
        found
    }

    async fn discard_unpacked(
        &self,
        namespace: &Namespace,
        layers: &[ImageLayer],
        from: usize,
    ) -> Result<bool, ImageStoreError> {
        unpack::discard_unpacked(self, namespace, layers, from).await
    }

    async fn is_unpacked(
        &self,
        namespace: &Namespace,
        layers: &[ImageLayer],
    ) -> Result<Option<bool>, ImageStoreError> {
        unpack::is_unpacked(self, namespace, layers).await.map(Some)
    }

    async fn begin_import(&self, namespace: &Namespace) -> Result<Box<dyn ImportSession>, ImageStoreError> {
        Ok(Box::new(ContainerdImport::begin(self.clone(), namespace.clone()).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_and_a_full_quota_are_no_space() {
        for text in ["write /a: no space left on device", "write /a: disk quota exceeded"] {
            let error = store_error(Status::unknown(text), "layer", ImageStoreError::BeginImport);
            assert!(matches!(error, ImageStoreError::NoSpace { .. }), "{error:?}");
        }
        let other = store_error(Status::unknown("permission denied"), "layer", ImageStoreError::BeginImport);
        assert!(matches!(other, ImageStoreError::BeginImport(_)), "{other:?}");
    }
}
