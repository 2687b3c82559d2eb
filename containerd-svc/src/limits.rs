//! How much of a bundle is read before it is given up.

/// What a bundle may hold. What is larger is refused, so that no archive takes the memory or the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of the archive once it is decompressed. Default: 64 GiB.
    pub archive_bytes: u64,
    /// Files, directories and links in it. Default: 65,536; an image has some hundreds.
    pub entries: u32,
    /// Bytes of an index, a manifest or a configuration. Default: 4 MiB, which is what registries take.
    ///
    /// *Source:* OCI distribution specification, "pushing manifests".
    pub document_bytes: u64,
    /// Manifests, layers and names that are looked at, together. Default: 16,384.
    pub descriptors: u32,
    /// How deep an index may lie within indexes. Default: 4.
    pub nesting: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            archive_bytes: 64 << 30,
            entries: 65_536,
            document_bytes: 4 << 20,
            descriptors: 16_384,
            nesting: 4,
        }
    }
}
