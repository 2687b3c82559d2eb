//! The JSON documents of images, reduced to the fields in use.
//!
//! *Source:* OCI image specification 1.1 (image-index.md, manifest.md, config.md, annotations.md); Docker's
//! image specification 1.2 for `manifest.json`; `io.containerd.image.name` is containerd's annotation.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::image::{Descriptor, media};
use crate::{Digest, Platform};

/// Annotations with an image's full name, and with its tag or name.
const NAME_ANNOTATIONS: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];

/// A descriptor within a document.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct JsonDescriptor {
    #[serde(default)]
    media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// The kind of content that a descriptor refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetKind {
    Index,
    Manifest,
    /// Not an image: a signature, a chart.
    Other,
}

impl JsonDescriptor {
    pub(crate) fn to_descriptor(&self) -> Descriptor {
        let media_type = if self.media_type.is_empty() { media::OCI_MANIFEST } else { &self.media_type };
        Descriptor { media_type: media_type.to_owned(), digest: self.digest, size: self.size }
    }

    /// The name that the archive gives it.
    pub(crate) fn reference_name(&self) -> Option<&str> {
        let annotations = self.annotations.as_ref()?;
        NAME_ANNOTATIONS
            .iter()
            .find_map(|key| annotations.get(*key))
            .map(String::as_str)
            .filter(|name| !name.is_empty())
    }
}

impl Descriptor {
    pub(crate) fn target_kind(&self) -> TargetKind {
        match self.media_type.as_str() {
            media::OCI_INDEX | media::DOCKER_LIST => TargetKind::Index,
            media::OCI_MANIFEST | media::DOCKER_MANIFEST => TargetKind::Manifest,
            _ => TargetKind::Other,
        }
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct ImageIndex {
    pub(crate) manifests: Vec<JsonDescriptor>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ImageManifest {
    pub(crate) config: JsonDescriptor,
    pub(crate) layers: Vec<JsonDescriptor>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ImageConfig {
    #[serde(flatten)]
    pub(crate) platform: Platform,
    pub(crate) rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RootFs {
    pub(crate) diff_ids: Vec<Digest>,
}

/// An image in a docker-archive's `manifest.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(crate) struct DockerManifestEntry {
    pub(crate) config: String,
    #[serde(default)]
    pub(crate) repo_tags: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) layers: Option<Vec<String>>,
}
