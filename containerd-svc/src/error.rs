//! What is wrong with a bundle.

use std::fmt;
use std::path::PathBuf;

use crate::archive::StreamError;
use crate::name::NameError;
use crate::store::StoreError;
use crate::{Digest, ImageName, Platform};

/// What is wrong with the images in an archive, once it could be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// A file is not what its name says: copy or make the archive again.
    #[error("{file} is damaged: its content is {found}")]
    Digest {
        /// The file in the archive.
        file: String,
        /// The digest of its content.
        found: Digest,
    },
    /// It is neither an OCI layout nor a docker-archive: `index.json` and `manifest.json` are missing.
    #[error("it holds no images: neither index.json nor manifest.json is in it")]
    Empty,
    /// An index, manifest or configuration makes no sense.
    #[error("{what} makes no sense")]
    Document {
        /// Its name or digest.
        what: String,
        /// What the parser says.
        #[source]
        source: serde_json::Error,
    },
    /// Something that this node needs of an image isn't in the archive: save it again, whole.
    #[error("{what}, which {by} needs, is missing")]
    Missing {
        /// What is missing.
        what: String,
        /// What needs it.
        by: String,
    },
    /// A manifest has not as many layers as its configuration says.
    #[error("manifest {manifest} has {layers} layers, and its configuration says {told}")]
    Layers {
        /// The manifest.
        manifest: Digest,
        /// How many it has.
        layers: usize,
        /// How many it should have.
        told: usize,
    },
    /// An image doesn't run on this node: save the one for its platform.
    #[error("image {name} is for {}, and this node is {wanted}", Listed(.has))]
    Platform {
        /// The image.
        name: ImageName,
        /// The node's platform.
        wanted: Platform,
        /// The platforms that it is for.
        has: Vec<Platform>,
    },
    /// None of the images has a name: save them with one.
    #[error("none of its images has a name, by which it could be found")]
    Unnamed,
    /// A name is none.
    #[error("an image has no valid name")]
    Name(#[source] NameError),
    /// Different images have the same name.
    #[error("different images are called {name}")]
    Duplicate {
        /// The name.
        name: ImageName,
    },
    /// There is more of something than [`Limits`](crate::Limits) allow.
    #[error("more than {limit} {of}")]
    Limit {
        /// How many are allowed.
        limit: u64,
        /// Of what.
        of: &'static str,
    },
}

/// Platforms in a row.
struct Listed<'a>(&'a [Platform]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no platform");
        }
        let names: Vec<_> = self.0.iter().map(Platform::to_string).collect();
        f.write_str(&names.join(", "))
    }
}

/// Why a bundle was not imported. Nothing of it is listed then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Its file can't be opened.
    #[error("open bundle {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: nodekeel_localstorage::Error,
    },
    /// It can't be read as an archive.
    #[error("read bundle {path}")]
    Stream {
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: StreamError,
    },
    /// Its images are wrong.
    #[error("import bundle {path}")]
    Image {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: ImageError,
    },
    /// The store has failed: a retry can help.
    #[error("store bundle {path}")]
    Store {
        /// The file.
        path: PathBuf,
        /// How.
        #[source]
        source: StoreError,
    },
}

impl ImportError {
    /// Whether the same file may be imported by a later try: the store, or the disk, has failed, and not the file.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Open { .. } | Self::Store { .. } => true,
            Self::Stream { source, .. } => matches!(source, StreamError::Io(_)),
            Self::Image { .. } => false,
        }
    }
}

/// What went wrong with a bundle, before its file is named.
#[derive(Debug)]
pub(crate) enum Wrong {
    Stream(StreamError),
    Image(ImageError),
    Store(StoreError),
}

impl Wrong {
    pub(crate) fn of(self, path: PathBuf) -> ImportError {
        match self {
            Self::Stream(source) => ImportError::Stream { path, source },
            Self::Image(source) => ImportError::Image { path, source },
            Self::Store(source) => ImportError::Store { path, source },
        }
    }
}

impl From<StoreError> for Wrong {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<ImageError> for Wrong {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}
