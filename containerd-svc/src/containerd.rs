//! Images kept by a containerd, through its content, leases and images services: those that 1.6 and 2.x have alike.

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
use crate::store::{Cause, ImageStore, Import, StoreError};
use crate::{Digest, Namespace};

use import::ContainerdImport;

/// What containerd unpacks into unless it is told otherwise.
const SNAPSHOTTER: &str = "overlayfs";

/// The images of a running containerd.
#[derive(Debug, Clone)]
pub struct ContainerdImages {
    channel: Channel,
    snapshotter: String,
    /// Tells the imports of one program apart.
    imports: Arc<AtomicU64>,
}

/// Nobody answers at a containerd's socket.
#[derive(Debug, thiserror::Error)]
#[error("ask containerd at {socket}")]
pub struct ConnectError {
    socket: PathBuf,
    #[source]
    source: Cause,
}

impl ContainerdImages {
    /// Connects to the socket of a containerd's API.
    ///
    /// # Errors
    /// [`ConnectError`]; a retry helps once it runs.
    pub async fn connect(socket: &Path) -> Result<Self, ConnectError> {
        let failed = |source: tonic::transport::Error| ConnectError {
            socket: socket.to_owned(),
            source: source.into(),
        };
        let channel = containerd_client::connect(socket).await.map_err(failed)?;
        Ok(Self { channel, snapshotter: SNAPSHOTTER.to_owned(), imports: Arc::default() })
    }

    /// Into which snapshotter layers are unpacked. Default: `overlayfs`.
    #[must_use]
    pub fn snapshotter(mut self, snapshotter: impl Into<String>) -> Self {
        self.snapshotter = snapshotter.into();
        self
    }
}

/// The version of the containerd at a socket, as it tells it itself: whoever answers, works.
///
/// # Errors
/// [`ConnectError`]; a retry helps once it runs.
pub async fn version(socket: &Path) -> Result<String, ConnectError> {
    let failed = |source: Cause| ConnectError { socket: socket.to_owned(), source };
    let channel = containerd_client::connect(socket).await.map_err(|error| failed(error.into()))?;
    let answer = VersionClient::new(channel).version(()).await.map_err(|error| failed(error.into()))?;
    Ok(answer.into_inner().version)
}

/// A request in a namespace; what it makes belongs to the lease.
fn request<T>(message: T, namespace: &Namespace, lease: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    let values = [("containerd-namespace", Some(namespace.as_str())), ("containerd-lease", lease)];
    for (key, value) in values.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        let value = value.parse().expect("names of namespaces and leases are letters, digits, . _ and -");
        request.metadata_mut().insert(key, value);
    }
    request
}

fn is(status: &Status, code: Code) -> bool {
    status.code() == code
}

/// What a failure is, with a full disk told from the rest.
fn failed(status: Status, what: &str, other: impl FnOnce(Cause) -> StoreError) -> StoreError {
    // containerd gives the kernel's words on, and no code of its own.
    if status.message().contains("no space left on device") || is(&status, Code::ResourceExhausted) {
        return StoreError::Full { what: what.to_owned(), source: status.into() };
    }
    other(status.into())
}

fn to_wire(descriptor: &Descriptor) -> types::Descriptor {
    types::Descriptor {
        media_type: descriptor.media_type.clone(),
        digest: descriptor.digest.to_string(),
        size: descriptor.size.cast_signed(),
        annotations: Default::default(),
    }
}

/// `None` for what no image of ours is: another digest than SHA-256.
fn from_wire(image: containerd_client::services::v1::Image) -> Option<Image> {
    let target = image.target?;
    let target = Descriptor {
        digest: target.digest.parse().ok()?,
        size: target.size.try_into().ok()?,
        media_type: target.media_type,
    };
    Some(Image { name: image.name, target, labels: image.labels.into_iter().collect() })
}

impl ContainerdImages {
    fn content(&self) -> ContentClient<Channel> {
        ContentClient::new(self.channel.clone())
    }

    async fn content_size(&self, namespace: &Namespace, digest: &Digest) -> Result<Option<u64>, StoreError> {
        let wrong = |source: Cause| StoreError::Read { digest: *digest, source };
        let asked = request(InfoRequest { digest: digest.to_string() }, namespace, None);
        match self.content().info(asked).await {
            Ok(answer) => {
                let info = answer.into_inner().info.unwrap_or_default();
                Ok(Some(info.size.try_into().map_err(|_| wrong("its size is negative".into()))?))
            }
            Err(status) if is(&status, Code::NotFound) => Ok(None),
            Err(status) => Err(wrong(status.into())),
        }
    }
}

#[async_trait]
impl ImageStore for ContainerdImages {
    async fn images(&self, namespace: &Namespace) -> Result<Vec<Image>, StoreError> {
        let asked = request(ListImagesRequest::default(), namespace, None);
        let answer = ImagesClient::new(self.channel.clone()).list(asked).await;
        let wrong = |status: Status| StoreError::List { namespace: namespace.clone(), source: status.into() };
        Ok(answer.map_err(wrong)?.into_inner().images.into_iter().filter_map(from_wire).collect())
    }

    async fn size(&self, namespace: &Namespace, digest: &Digest) -> Result<Option<u64>, StoreError> {
        self.content_size(namespace, digest).await
    }

    async fn read(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let wrong = |source: Cause| StoreError::Read { digest: *digest, source };
        let Some(size) = self.content_size(namespace, digest).await? else { return Ok(None) };
        if size > limit {
            return Err(wrong(format!("it has {size} bytes, and {limit} are read at most").into()));
        }
        let mut bytes = Vec::new();
        // Of nothing, containerd reads nothing, and calls that an error.
        if size > 0 {
            let asked =
                ReadContentRequest { digest: digest.to_string(), offset: 0, size: size.cast_signed() };
            let answer = self.content().read(request(asked, namespace, None)).await;
            let mut parts = answer.map_err(|status| wrong(status.into()))?.into_inner();
            while let Some(part) = parts.message().await.map_err(|status| wrong(status.into()))? {
                bytes.extend_from_slice(&part.data);
                if bytes.len() as u64 > limit {
                    return Err(wrong("it has more bytes than containerd says".into()));
                }
            }
        }
        match Digest::of(&bytes) == *digest {
            true => Ok(Some(bytes)),
            false => Err(wrong("its bytes on the disk are not what its digest says".into())),
        }
    }

    async fn begin(&self, namespace: &Namespace) -> Result<Box<dyn Import>, StoreError> {
        Ok(Box::new(ContainerdImport::begin(self.clone(), namespace.clone()).await?))
    }
}
