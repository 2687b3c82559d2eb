//! `[storage]`: the data volume of the node.

use serde::Deserialize;

/// `[storage]`
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct StorageConfig {
    /// What holds the node's data.
    pub kind: VolumeKind,
}

/// What holds the node's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum VolumeKind {
    /// `"directory"`: the directory `data` below the data directory, or the file system that is mounted there.
    #[default]
    Directory,
}
