//! Limits on the size of a bundle.

/// Limits of a bundle. A larger one is rejected, so that no archive exhausts memory or disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImportLimits {
    /// Bytes of the decompressed archive. Default: 64 GiB.
    pub archive_bytes: u64,
    /// Files, directories and links. Default: 65,536; an image has a few hundred.
    pub entries: u32,
    /// Bytes of an index, a manifest or a configuration. Default: 4 MiB, the limit of registries.
    ///
    /// *Source:* OCI distribution specification, "pushing manifests".
    pub document_bytes: u64,
    /// Manifests, layers and names in total. Default: 16,384.
    pub descriptors: u32,
    /// Nesting depth of indexes. Default: 4.
    pub nesting: u32,
    /// Bytes of the window of a zstd archive, which takes that much memory; rounded down to a power of two. Default: 128 MiB,
    /// the window of `zstd --long` and `zstd --ultra -22`.
    pub zstd_window: u64,
}

impl Default for ImportLimits {
    fn default() -> Self {
        Self {
            archive_bytes: 64 << 30,
            entries: 65_536,
            document_bytes: 4 << 20,
            descriptors: 16_384,
            nesting: 4,
            zstd_window: 128 << 20,
        }
    }
}
