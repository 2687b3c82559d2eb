//! Where images are kept: the traits, and what they say when they fail.

use std::error::Error;
use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;

use crate::image::{Image, Labels, Layer};
use crate::{Digest, Namespace};

/// A failure's cause, as a store hands it out.
pub type Cause = Box<dyn Error + Send + Sync>;

/// Keeps images and their content, by namespace.
///
/// # Contract
/// - **Order.** What an [`Import`] writes is seen by [`size`](Self::size) and [`read`](Self::read) once it is committed,
///   and an image by [`images`](Self::images) once [`Import::list`] has returned.
/// - **Life.** Content stays as long as the import lives that wrote it or was told that it is there; after that, as long
///   as a listed image leads to it. An image leads to its target, and content to what its labels
///   `containerd.io/gc.ref.content.*` name. Other content may go at any time.
/// - **Verification.** Content is what its digest says: whoever reads it needn't check it again.
/// - **Idempotence.** Content and images that are there already are success.
/// - **Concurrency.** Several imports may go on at the same time.
/// - **Cancel safety.** A dropped future may or may not have had its effect, wholly or not at all.
///
/// `testing::conformance` (feature `testing`) checks it for any store.
#[async_trait]
pub trait ImageStore: Send + Sync + fmt::Debug {
    /// The images of a namespace, in any order; none where nobody has used the namespace.
    ///
    /// # Errors
    /// [`StoreError::List`]; a retry can help.
    async fn images(&self, namespace: &Namespace) -> Result<Vec<Image>, StoreError>;

    /// How many bytes some content has; `None` if it isn't there.
    ///
    /// # Errors
    /// [`StoreError::Read`]; a retry can help.
    async fn size(&self, namespace: &Namespace, digest: &Digest) -> Result<Option<u64>, StoreError>;

    /// Some content, of at most `limit` bytes; `None` if it isn't there.
    ///
    /// # Errors
    /// [`StoreError::Read`], also where it is larger; a retry can help where it isn't.
    async fn read(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, StoreError>;

    /// Begins an import.
    ///
    /// # Errors
    /// [`StoreError::Begin`]; a retry can help.
    async fn begin(&self, namespace: &Namespace) -> Result<Box<dyn Import>, StoreError>;
}

/// Content that is about to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incoming {
    /// What it should be; `None` where that is known only once it has come.
    pub digest: Option<Digest>,
    /// Its bytes.
    pub size: u64,
    /// What it is called in the archive, for errors and as a handle.
    pub file: String,
}

/// A change of one namespace, by one bundle. Whatever is not listed when it is dropped is as if it had never been.
#[async_trait]
pub trait Import: Send + Sync + fmt::Debug {
    /// A writer for some content; `None` if it is there already, and then it stays as if it had been written.
    ///
    /// # Errors
    /// [`StoreError::Write`] or [`StoreError::Full`]; a retry can help.
    async fn blob(&mut self, blob: &Incoming) -> Result<Option<Box<dyn BlobWriter>>, StoreError>;

    /// Adds labels to content.
    ///
    /// # Errors
    /// [`StoreError::Label`]; a retry can help.
    async fn label(&mut self, digest: &Digest, labels: &Labels) -> Result<(), StoreError>;

    /// Makes a file system of an image's layers, from the lowest on, so that its first container needn't wait for it.
    /// The labels that it returns belong on the image's configuration, or what was unpacked may go. A store may do
    /// nothing and return none.
    ///
    /// # Errors
    /// [`StoreError::Unpack`] or [`StoreError::Full`]; a retry can help.
    async fn unpack(&mut self, layers: &[Layer]) -> Result<Labels, StoreError>;

    /// Lists an image, in the place of one of the same name.
    ///
    /// # Errors
    /// [`StoreError::Put`]; a retry can help.
    async fn list(&mut self, image: &Image) -> Result<(), StoreError>;

    /// Ends the import: from now on only what is listed keeps its content.
    ///
    /// # Errors
    /// [`StoreError::End`]: what was listed is listed; what was not needed may stay for a day.
    async fn end(self: Box<Self>) -> Result<(), StoreError>;
}

/// Takes one blob. Dropped before it is committed, what was written is gone.
#[async_trait]
pub trait BlobWriter: Send + fmt::Debug {
    /// Adds bytes.
    ///
    /// # Errors
    /// [`StoreError::Write`] or [`StoreError::Full`].
    async fn write(&mut self, chunk: Bytes) -> Result<(), StoreError>;

    /// The content is whole and durable when this returns.
    ///
    /// # Errors
    /// [`StoreError::Write`] or [`StoreError::Full`]; also where the content has another digest or size.
    async fn commit(self: Box<Self>, digest: &Digest) -> Result<(), StoreError>;
}

/// What went wrong with a store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The images of a namespace are not told.
    #[error("list the images of namespace {namespace}")]
    List {
        /// The namespace.
        namespace: Namespace,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// Content can't be read.
    #[error("read content {digest}")]
    Read {
        /// Which.
        digest: Digest,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// No import can be begun.
    #[error("begin an import")]
    Begin(#[source] Cause),
    /// The store's disk is full: make room on it.
    #[error("the store has no room for {what}")]
    Full {
        /// For what.
        what: String,
        /// What says so.
        #[source]
        source: Cause,
    },
    /// Content can't be written.
    #[error("write {file}")]
    Write {
        /// What it is called in the archive.
        file: String,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// Content can't be given labels.
    #[error("label content {digest}")]
    Label {
        /// Which.
        digest: Digest,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// A layer can't be unpacked.
    #[error("unpack layer {digest}")]
    Unpack {
        /// Which.
        digest: Digest,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// An image can't be listed.
    #[error("list image {name}")]
    Put {
        /// Which.
        name: String,
        /// Why not.
        #[source]
        source: Cause,
    },
    /// The import can't be ended.
    #[error("end an import")]
    End(#[source] Cause),
}
