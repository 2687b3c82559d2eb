//! The image store of a containerd, through its content, leases and images services, which 1.6 and 2.x share.

mod import;
mod unpack;
mod writer;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use async_trait::async_trait;
use containerd_client::services::v1::content_client::ContentClient;
use containerd_client::services::v1::images_client::ImagesClient;
use containerd_client::services::v1::version_client::VersionClient;
use containerd_client::services::v1::{InfoRequest, ListImagesRequest, ReadContentRequest};
use containerd_client::types;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::image::{Descriptor, Image};
use crate::store::{ErrorSource, ImageStore, ImageStoreError, ImportSession};
use crate::{Digest, Namespace};

use import::ContainerdImport;

/// The default snapshotter of containerd.
const DEFAULT_SNAPSHOTTER: &str = "overlayfs";

/// The image store of a running containerd.
#[derive(Debug, Clone)]
pub struct ContainerdImages {
    channel: Channel,
    snapshotter_name: String,
    /// Makes the lease ids of one process unique.
    import_count: Arc<AtomicU64>,
}

/// The containerd at a socket does not answer.
#[derive(Debug, thiserror::Error)]
#[error("call containerd at {socket}")]
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
        Ok(Self { channel, snapshotter_name: DEFAULT_SNAPSHOTTER.to_owned(), import_count: Arc::default() })
    }

    /// Sets the snapshotter that layers are unpacked into. Default: `overlayfs`.
    #[must_use]
    pub fn with_snapshotter(mut self, snapshotter: impl Into<String>) -> Self {
        self.snapshotter_name = snapshotter.into();
        self
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

/// Converts a status to a store error; a full disk has a separate variant.
fn store_error(
    status: Status,
    what: &str,
    other: impl FnOnce(ErrorSource) -> ImageStoreError,
) -> ImageStoreError {
    // containerd passes on the kernel's message without a separate status code.
    if status.message().contains("no space left on device") || has_code(&status, Code::ResourceExhausted) {
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

    async fn stat_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<u64>, ImageStoreError> {
        let to_error = |source: ErrorSource| ImageStoreError::ReadContent { digest: *digest, source };
        let request = namespaced_request(InfoRequest { digest: digest.to_string() }, namespace, None);
        match self.content_client().info(request).await {
            Ok(answer) => {
                let info = answer.into_inner().info.unwrap_or_default();
                Ok(Some(info.size.try_into().map_err(|_| to_error("negative size".into()))?))
            }
            Err(status) if has_code(&status, Code::NotFound) => Ok(None),
            Err(status) => Err(to_error(status.into())),
        }
    }
}

#[async_trait]
impl ImageStore for ContainerdImages {
    async fn list_images(&self, namespace: &Namespace) -> Result<Vec<Image>, ImageStoreError> {
        let request = namespaced_request(ListImagesRequest::default(), namespace, None);
        let answer = ImagesClient::new(self.channel.clone()).list(request).await;
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
        limit: u64,
    ) -> Result<Option<Vec<u8>>, ImageStoreError> {
        let to_error = |source: ErrorSource| ImageStoreError::ReadContent { digest: *digest, source };
        let Some(size) = self.stat_content(namespace, digest).await? else { return Ok(None) };
        if size > limit {
            return Err(to_error(format!("{size} bytes exceed the limit of {limit}").into()));
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
                if bytes.len() as u64 > limit {
                    return Err(to_error("more bytes than its reported size".into()));
                }
            }
        }
        match Digest::of_content(&bytes) == *digest {
            true => Ok(Some(bytes)),
            false => Err(to_error("the bytes on disk do not match the digest".into())),
        }
    }

    async fn begin_import(&self, namespace: &Namespace) -> Result<Box<dyn ImportSession>, ImageStoreError> {
        Ok(Box::new(ContainerdImport::begin(self.clone(), namespace.clone()).await?))
    }
}
