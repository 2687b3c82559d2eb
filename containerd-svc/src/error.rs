//! Errors of importing a bundle.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::archive::ArchiveError;
use crate::import::error_chain;
use crate::name::InvalidContainerdName;
use crate::store::ImageStoreError;
use crate::{Digest, ImageName, Platform};

/// An error in an image of a readable archive, or in what such an archive has in the place of one.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ArchivedImageError {
    /// The content of a file does not match its digest: copy or create the archive again.
    #[error("digest mismatch in {file}: its content is {found}; copy or create the archive again")]
    DigestMismatch {
        /// The file in the archive.
        file: String,
        /// The digest of its content.
        found: Digest,
    },
    /// The archive is neither an OCI layout nor a docker-archive.
    #[error("the image archive has neither index.json nor manifest.json, so it has no images: save it again")]
    NoIndex,
    /// An index, manifest or configuration is invalid.
    #[error("can't parse JSON document {what} of the image archive")]
    InvalidDocument {
        /// The name or digest.
        what: String,
        /// The parser's error.
        #[source]
        source: Arc<serde_json::Error>,
    },
    /// The index has an entry that is no descriptor with a SHA-256 digest, the only ones that are supported: save the
    /// image with such digests.
    #[error(
        "unsupported entry of the archive's index, with digest {digest:?}: save the image with SHA-256 digests"
    )]
    UnsupportedEntry {
        /// The digest as it is in the index.
        digest: String,
    },
    /// No image that containerd could run: a chart, a signature, a module of WebAssembly. Nothing is wrong with it.
    #[error("no image that containerd runs: it has media type {media_type:?}")]
    NotAnImage {
        /// The media type that shows it: of the target, its configuration or a layer.
        media_type: String,
    },
    /// The archive lacks content that this node needs of an image: save the complete image again.
    #[error("{what} is missing in the image archive, but {by} refers to it: save the complete image again")]
    MissingContent {
        /// The missing content.
        what: String,
        /// The content that needs it.
        by: String,
    },
    /// The number of layers in a manifest differs from its configuration.
    #[error(
        "image manifest {manifest} has {layers} layers, but the image's configuration lists {expected}: \
         create the archive again"
    )]
    LayerCount {
        /// The manifest.
        manifest: Digest,
        /// The number of layers in the manifest.
        layers: usize,
        /// The number of layers in the configuration.
        expected: usize,
    },
    /// The image is for other platforms: save the one for this node's platform.
    #[error(
        "image {name} is for {}, but this node is {wanted}: save the image for {wanted}",
        PlatformList(.available)
    )]
    PlatformMismatch {
        /// The image.
        name: ImageName,
        /// The node's platform.
        wanted: Platform,
        /// The platforms of the image.
        available: Vec<Platform>,
    },
    /// None of the images has a name: save them with one.
    #[error("no image in the image archive has a name: save the images with their names")]
    Unnamed,
    /// An image name is invalid.
    #[error("the image archive has an invalid image name")]
    InvalidName(#[source] InvalidContainerdName),
    /// The name has the digest of another image, or of an index of which the archive has one image: save the image with that digest, or all
    /// of the index.
    #[error(
        "image {name} of the archive has the digest {found}: save it by its own digest or by a tag, or save it for all platforms \
         (skopeo copy --all)"
    )]
    NameDigest {
        /// The image.
        name: ImageName,
        /// The digest of its manifest, or of its index of manifests.
        found: Digest,
    },
    /// Different images have the same name.
    #[error("the image archive has different images with the name {name}: save each under another name")]
    DuplicateName {
        /// The name.
        name: ImageName,
    },
    /// The [`ImagePolicy`](crate::ImagePolicy) refuses the image.
    #[error("image {name} with {digest} is not allowed: {reason}")]
    NotAllowed {
        /// The image.
        name: ImageName,
        /// The digest of its manifest, or of its index of manifests.
        digest: Digest,
        /// The reason, and what is to be done.
        reason: String,
    },
    /// The images exceed a limit of [`ImportLimits`](crate::ImportLimits).
    #[error(
        "archive exceeds the limit of {limit} {of}: check that it is an image archive, or raise the limit"
    )]
    Limit {
        /// The maximum.
        limit: u64,
        /// The quantity that is limited.
        of: &'static str,
    },
}

impl ArchivedImageError {
    /// True if nothing is wrong: this is content that is not for this node.
    pub fn is_foreign(&self) -> bool {
        matches!(self, Self::NotAnImage { .. } | Self::PlatformMismatch { .. })
    }
}

/// Content with a name in an archive that was not listed.
#[derive(Debug, Clone)]
pub struct LeftOutImage {
    /// The name in the archive; of an entry without a name, its digest.
    pub name: String,
    /// The reason.
    pub reason: LeftOutReason,
}

/// The reason why an image was not listed. It does not affect the other images of the archive.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LeftOutReason {
    /// It is not for this node, or is invalid.
    #[error(transparent)]
    Archive(ArchivedImageError),
    /// The store has refused it; a retry may help.
    #[error(transparent)]
    Store(Arc<ImageStoreError>),
}

impl LeftOutImage {
    /// True if nothing is wrong: this is content that is not for this node.
    pub fn is_foreign(&self) -> bool {
        matches!(&self.reason, LeftOutReason::Archive(error) if error.is_foreign())
    }

    /// The image, if the policy refuses it.
    pub(crate) fn refused(&self) -> Option<(ImageName, Digest)> {
        match &self.reason {
            LeftOutReason::Archive(ArchivedImageError::NotAllowed { name, digest, .. }) => {
                Some((name.clone(), *digest))
            }
            _ => None,
        }
    }
}

impl fmt::Display for LeftOutImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, error_chain(&self.reason))
    }
}

struct PlatformList<'a>(&'a [Platform]);

impl fmt::Display for PlatformList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no platform");
        }
        let names: Vec<_> = self.0.iter().map(Platform::to_string).collect();
        f.write_str(&names.join(", "))
    }
}

/// Failure to import a bundle: none of its images is listed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Opening the file failed.
    #[error("can't open image bundle {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: nodekeel_localstorage::Error,
    },
    /// Reading the file as an archive failed.
    #[error("can't read image bundle {path}")]
    Archive {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ArchiveError,
    },
    /// The images are invalid.
    #[error("can't import the images of image bundle {path}")]
    Image {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ArchivedImageError,
    },
    /// The image store failed: a retry can help.
    #[error("can't write image bundle {path} into containerd's image store")]
    Store {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: ImageStoreError,
    },
    /// The image store has refused each of the images: a retry can help.
    #[error("containerd refuses the images of image bundle {path}: create them again")]
    Refused {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Arc<ImageStoreError>,
    },
}

impl ImportError {
    /// Returns whether a retry may import the same file: the store or the disk failed, the file is not invalid.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Open { .. } | Self::Store { .. } | Self::Refused { .. } => true,
            Self::Archive { source, .. } => matches!(source, ArchiveError::Io(_)),
            Self::Image { .. } => false,
        }
    }
}

/// An import error without the path of the bundle.
#[derive(Debug)]
pub(crate) enum BundleError {
    Archive(ArchiveError),
    Image(ArchivedImageError),
    Store(ImageStoreError),
    /// The store has refused each of its images.
    Refused(Arc<ImageStoreError>),
    /// The store could not unpack content that is damaged. It does not exist any more, and the bundle brings it.
    Damaged(ImageStoreError),
}

impl BundleError {
    pub(crate) fn with_path(self, path: PathBuf) -> ImportError {
        match self {
            Self::Archive(source) => ImportError::Archive { path, source },
            Self::Image(source) => ImportError::Image { path, source },
            Self::Store(source) | Self::Damaged(source) => ImportError::Store { path, source },
            Self::Refused(source) => ImportError::Refused { path, source },
        }
    }
}

impl From<ImageStoreError> for BundleError {
    fn from(error: ImageStoreError) -> Self {
        Self::Store(error)
    }
}

impl From<ArchivedImageError> for BundleError {
    fn from(error: ArchivedImageError) -> Self {
        Self::Image(error)
    }
}
