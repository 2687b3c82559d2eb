//! The JSON documents of images, as far as they are needed.
//!
//! *Source:* OCI image specification 1.1 (image-index.md, manifest.md, config.md, annotations.md); Docker's image
//! specification 1.2 for `manifest.json`; `io.containerd.image.name` is containerd's own.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::image::{Descriptor, media};
use crate::{Digest, Platform};

/// Where an image's full name stands, and where its tag or name.
const NAMES: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];

/// A descriptor within a document.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Listed {
    #[serde(default)]
    media_type: String,
    pub(crate) digest: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    pub(crate) platform: Option<Platform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// What a descriptor leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leads {
    ToIndex,
    ToManifest,
    /// To something that is no image: a signature, a chart.
    Elsewhere,
}

impl Listed {
    pub(crate) fn descriptor(&self) -> Descriptor {
        let media_type = if self.media_type.is_empty() { media::OCI_MANIFEST } else { &self.media_type };
        Descriptor { media_type: media_type.to_owned(), digest: self.digest, size: self.size }
    }

    /// What the archive calls it.
    pub(crate) fn reference(&self) -> Option<&str> {
        let annotations = self.annotations.as_ref()?;
        NAMES.iter().find_map(|key| annotations.get(*key)).map(String::as_str).filter(|name| !name.is_empty())
    }
}

impl Descriptor {
    pub(crate) fn leads(&self) -> Leads {
        match self.media_type.as_str() {
            media::OCI_INDEX | media::DOCKER_LIST => Leads::ToIndex,
            media::OCI_MANIFEST | media::DOCKER_MANIFEST => Leads::ToManifest,
            _ => Leads::Elsewhere,
        }
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Index {
    pub(crate) manifests: Vec<Listed>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) config: Listed,
    pub(crate) layers: Vec<Listed>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Config {
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
pub(crate) struct Saved {
    pub(crate) config: String,
    #[serde(default)]
    pub(crate) repo_tags: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) layers: Option<Vec<String>>,
}
