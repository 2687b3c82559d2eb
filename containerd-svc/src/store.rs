//! The image store: its traits and errors.

use std::error::Error;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::{Instant, sleep_until};

use crate::image::{Image, ImageLayer, Labels};
use crate::{Digest, DiskSpace, Namespace};

/// The cause of a store error.
pub type ErrorSource = Box<dyn Error + Send + Sync>;

/// Stores images and their content, by namespace.
///
/// # Contract
/// - **Order.** Content of an [`ImportSession`] is visible to [`content_size`](Self::content_size) and
///   [`read_content`](Self::read_content) once it is committed, and an image to
///   [`list_images`](Self::list_images) once [`ImportSession::put_image`] has returned.
/// - **Lifetime.** Content exists as long as the session that wrote it or found it already present; after
///   that, as long as a listed image refers to it. An image refers to its target, and content to the digests
///   in its labels `containerd.io/gc.ref.content.*`. Other content may be removed at any time.
/// - **Verification.** Content matches its digest when it is committed. Content that a disk has damaged later does not
///   exist, as far as that is seen: files that are gone or truncated, and documents with other bytes.
/// - **Free space.** A session with a [disk](ImportSession::disk_space) reports what is left of it above its
///   reserve; an import that would need more stops before it writes.
/// - **Idempotence.** Existing content and images are a success.
/// - **Concurrency.** Several sessions may be open at the same time.
/// - **Cancel safety.** A dropped future has had its complete effect, or none.
///
/// `testing::conformance` (feature `testing`) checks this contract for any store.
#[async_trait]
pub trait ImageStore: Send + Sync + fmt::Debug {
    /// Lists the namespaces that may have images, in any order.
    ///
    /// # Errors
    /// [`ImageStoreError::ListNamespaces`]; a retry can help.
    async fn list_namespaces(&self) -> Result<Vec<Namespace>, ImageStoreError>;

    /// Lists the images of a namespace, in any order; an unused namespace has none.
    ///
    /// # Errors
    /// [`ImageStoreError::ListImages`]; a retry can help.
    async fn list_images(&self, namespace: &Namespace) -> Result<Vec<Image>, ImageStoreError>;

    /// The size of some content in bytes; `None` if it does not exist, or its file is gone or truncated.
    ///
    /// # Errors
    /// [`ImageStoreError::ReadContent`]; a retry can help.
    async fn content_size(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<u64>, ImageStoreError>;

    /// Reads some content of this size; `None` if it does not exist, has another size or does not match its digest.
    ///
    /// # Errors
    /// [`ImageStoreError::ReadContent`]; a retry can help.
    async fn read_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        size: u64,
    ) -> Result<Option<Vec<u8>>, ImageStoreError>;

    /// Reads all bytes of some content of this size at a pace, and returns whether they match its digest. What does not is
    /// damaged from then on: it does not exist until an import writes it again. Default: by
    /// [`read_content`](Self::read_content).
    ///
    /// # Errors
    /// [`ImageStoreError::ReadContent`]; a retry can help.
    async fn verify_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        size: u64,
        pace: &ReadPace,
    ) -> Result<bool, ImageStoreError> {
        pace.spend(size).await;
        Ok(self.read_content(namespace, digest, size).await?.is_some())
    }

    /// Compares the unpacked layers of an image, lowest first, with what was recorded when they were unpacked, or, if
    /// `thorough`, with the layers, which it unpacks again for that. Returns the number of leading layers that are right, of
    /// those that are unpacked; `None` if nothing is wrong. Default: `None`.
    ///
    /// # Errors
    /// [`ImageStoreError::UnpackLayer`] or [`ImageStoreError::NoSpace`]; a retry can help.
    async fn find_damaged_layer(
        &self,
        _namespace: &Namespace,
        _layers: &[ImageLayer],
        _thorough: bool,
    ) -> Result<Option<usize>, ImageStoreError> {
        Ok(None)
    }

    /// Discards the unpacked layers from this one on, so that they are unpacked again when they are needed. Returns false if
    /// containers use one of them: then that and those below it stay. Default: true, and nothing is done.
    ///
    /// # Errors
    /// [`ImageStoreError::UnpackLayer`]; a retry can help.
    async fn discard_unpacked(
        &self,
        _namespace: &Namespace,
        _layers: &[ImageLayer],
        _from: usize,
    ) -> Result<bool, ImageStoreError> {
        Ok(true)
    }

    /// Returns whether the layers of an image are unpacked, lowest first; `None` if the store does not unpack. Default:
    /// `None`.
    ///
    /// # Errors
    /// [`ImageStoreError::UnpackLayer`]; a retry can help.
    async fn is_unpacked(
        &self,
        _namespace: &Namespace,
        _layers: &[ImageLayer],
    ) -> Result<Option<bool>, ImageStoreError> {
        Ok(None)
    }

    /// Begins an import session.
    ///
    /// # Errors
    /// [`ImageStoreError::BeginImport`]; a retry can help.
    async fn begin_import(&self, namespace: &Namespace) -> Result<Box<dyn ImportSession>, ImageStoreError>;
}

/// A limit of the bytes that are read per second, and a count of them.
#[derive(Debug)]
pub struct ReadPace {
    bytes_per_second: Option<u64>,
    start: Instant,
    bytes: AtomicU64,
}

impl ReadPace {
    /// At most so many bytes per second, at least one; `None` for as fast as possible.
    pub fn new(bytes_per_second: Option<u64>) -> Self {
        let bytes_per_second = bytes_per_second.map(|bytes| bytes.max(1));
        Self { bytes_per_second, start: Instant::now(), bytes: AtomicU64::new(0) }
    }

    /// Counts bytes, and waits until so many may have been read.
    pub async fn spend(&self, bytes: u64) {
        let all = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if let Some(rate) = self.bytes_per_second {
            sleep_until(self.start + Duration::from_secs_f64(all as f64 / rate as f64)).await;
        }
    }

    /// The bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// A blob to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncomingBlob {
    /// The digest; `None` if that is known only at its end.
    pub digest: Option<Digest>,
    /// The size in bytes.
    pub size: u64,
    /// The name in the archive, for errors and as a key.
    pub file: String,
}

/// The import of one bundle into one namespace. Dropping the session discards all content that no listed
/// image needs.
#[async_trait]
pub trait ImportSession: Send + Sync + fmt::Debug {
    /// Opens a writer for a blob; `None` if the content already exists, and the session then keeps it as if
    /// written. Content that is seen to be damaged is replaced.
    ///
    /// # Errors
    /// [`ImageStoreError::WriteContent`] or [`ImageStoreError::NoSpace`]; a retry can help.
    async fn open_writer(
        &mut self,
        blob: &IncomingBlob,
    ) -> Result<Option<Box<dyn BlobWriter>>, ImageStoreError>;

    /// Adds labels to content.
    ///
    /// # Errors
    /// [`ImageStoreError::LabelContent`]; a retry can help.
    async fn label_content(&mut self, digest: &Digest, labels: &Labels) -> Result<(), ImageStoreError>;

    /// Unpacks an image's layers, lowest first, so that its first container starts without that delay. The
    /// returned labels belong on the image's configuration; without them, the snapshots may be removed. A
    /// store may do nothing and return no labels.
    ///
    /// # Errors
    /// [`ImageStoreError::UnpackLayer`] or [`ImageStoreError::NoSpace`]; a retry can help.
    async fn unpack_layers(&mut self, layers: &[ImageLayer]) -> Result<Labels, ImageStoreError>;

    /// Lists an image. An image with the same name gets its target and its labels, and keeps its other labels;
    /// a label with an empty value is removed.
    ///
    /// # Errors
    /// [`ImageStoreError::PutImage`]; a retry can help.
    async fn put_image(&mut self, image: &Image) -> Result<(), ImageStoreError>;

    /// Finishes the session: from now on, only listed images keep content.
    ///
    /// # Errors
    /// [`ImageStoreError::FinishImport`]: listed images stay listed; unneeded content may stay for a day.
    async fn finish(self: Box<Self>) -> Result<(), ImageStoreError>;

    /// The free space of the disk that content is written to. Default: unknown, and then nothing is checked
    /// before it is written.
    ///
    /// # Errors
    /// [`ImageStoreError::ReadDiskSpace`]; a retry can help.
    async fn disk_space(&self) -> Result<Option<DiskSpace>, ImageStoreError> {
        Ok(None)
    }

    /// Whether an unpacked layer takes as much of the disk as those below it, too. Default: no.
    fn copies_layers_below(&self) -> bool {
        false
    }
}

/// Writes one blob. Dropping it before the commit discards what was written.
#[async_trait]
pub trait BlobWriter: Send + fmt::Debug {
    /// Appends bytes.
    ///
    /// # Errors
    /// [`ImageStoreError::WriteContent`] or [`ImageStoreError::NoSpace`].
    async fn write(&mut self, chunk: Bytes) -> Result<(), ImageStoreError>;

    /// Commits the content, which is complete and durable when this returns.
    ///
    /// # Errors
    /// [`ImageStoreError::WriteContent`] or [`ImageStoreError::NoSpace`]; also where the content has another digest or
    /// size.
    async fn commit(self: Box<Self>, digest: &Digest) -> Result<(), ImageStoreError>;
}

/// An error of an image store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageStoreError {
    /// Listing the namespaces failed.
    #[error("can't list containerd's namespaces")]
    ListNamespaces(#[source] ErrorSource),
    /// Reading the free space of the disk failed.
    #[error("can't read the free space of the image store's disk")]
    ReadDiskSpace(#[source] ErrorSource),
    /// Listing the images of a namespace failed.
    #[error("can't list the images of containerd namespace {namespace}")]
    ListImages {
        /// The namespace.
        namespace: Namespace,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Reading content failed.
    #[error("can't read content {digest} from containerd's content store")]
    ReadContent {
        /// The digest.
        digest: Digest,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Beginning an import session failed.
    #[error("can't start an image import")]
    BeginImport(#[source] ErrorSource),
    /// The store's disk is full, or would be full up to its reserve: free space on it.
    #[error("no space left on containerd's disk to import {what}: free space on it, or lower its reserve")]
    NoSpace {
        /// The content that did not fit.
        what: String,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Writing content failed.
    #[error("can't write {file} of the image archive into containerd's content store")]
    WriteContent {
        /// The name in the archive.
        file: String,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Setting labels of content failed.
    #[error("can't set the labels of content {digest} in containerd's content store")]
    LabelContent {
        /// The digest.
        digest: Digest,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Unpacking a layer failed.
    #[error("can't unpack image layer {digest}")]
    UnpackLayer {
        /// The layer.
        digest: Digest,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Listing an image failed.
    #[error("can't create or update image {name} in containerd")]
    PutImage {
        /// The name.
        name: String,
        /// The cause.
        #[source]
        source: ErrorSource,
    },
    /// Finishing an import session failed.
    #[error("can't delete the containerd lease of a finished image import")]
    FinishImport(#[source] ErrorSource),
}
