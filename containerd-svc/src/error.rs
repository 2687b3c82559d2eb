//! Errors of importing a bundle.

use std::fmt;
use std::path::PathBuf;

use crate::archive::ArchiveError;
use crate::name::InvalidContainerdName;
use crate::store::ImageStoreError;
use crate::{Digest, ImageName, Platform};

/// An error in the images of a readable archive.
#[derive(Debug, thiserror::Error)]
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
        source: serde_json::Error,
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
    /// Different images have the same name.
    #[error("the image archive has different images with the name {name}: save each under another name")]
    DuplicateName {
        /// The name.
        name: ImageName,
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

/// Failure to import a bundle. None of its images is listed then.
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
}

impl ImportError {
    /// Returns whether a retry may import the same file: the store or the disk failed, the file is not invalid.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Open { .. } | Self::Store { .. } => true,
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
}

impl BundleError {
    pub(crate) fn with_path(self, path: PathBuf) -> ImportError {
        match self {
            Self::Archive(source) => ImportError::Archive { path, source },
            Self::Image(source) => ImportError::Image { path, source },
            Self::Store(source) => ImportError::Store { path, source },
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
