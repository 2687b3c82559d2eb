//! Images as a store keeps them.

use std::collections::BTreeMap;

use crate::{Digest, DiskUsage};

/// Identifies content by media type, digest and size.
///
/// *Source:* OCI image specification, descriptor.md.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// For example `application/vnd.oci.image.manifest.v1+json`.
    pub media_type: String,
    /// The digest of its bytes.
    pub digest: Digest,
    /// Size in bytes.
    pub size: u64,
}

/// Labels of an image or of content: a key and its value have at most 4,096 bytes together.
pub type Labels = BTreeMap<String, String>;

/// A listed image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The name. Images of other clients may have names that are not a valid [`ImageName`](crate::ImageName).
    pub name: String,
    /// The manifest, or the index of its manifests.
    pub target: Descriptor,
    /// The labels.
    pub labels: Labels,
}

/// A layer of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageLayer {
    /// The stored blob, compressed or not.
    pub blob: Descriptor,
    /// The digest of the tar that it unpacks to.
    pub diff_id: Digest,
    /// What its files take on a disk at most; `None` if that is not known yet.
    pub unpacked: Option<DiskUsage>,
}

/// The supported media types.
///
/// *Source:* OCI image specification, media-types.md; Docker's image manifest v2, schema 2.
pub(crate) mod media {
    pub(crate) const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
    pub(crate) const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    pub(crate) const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    pub(crate) const OCI_LAYER_PREFIX: &str = "application/vnd.oci.image.layer.";
    pub(crate) const DOCKER_LAYER_PREFIX: &str = "application/vnd.docker.image.rootfs.";
    pub(crate) const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
    pub(crate) const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
    pub(crate) const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
    pub(crate) const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";
    pub(crate) const DOCKER_LAYER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
    pub(crate) const OCI_LAYER_ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
}
