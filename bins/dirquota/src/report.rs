//! The JSON output.

use std::path::Path;

use nodekeel_fsquota::{EnforcementGap, ProjectQuota, TreeSummary};
use serde::Serialize;

/// Limits and usage of a directory or project.
#[derive(Debug, Serialize)]
pub(crate) struct StatusReport {
    /// Unknown in a list of projects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) directory: Option<String>,
    pub(crate) project: u32,
    pub(crate) bytes: UsageAmount,
    pub(crate) inodes: UsageAmount,
    pub(crate) over_limit: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<TreeCounts>,
}

#[derive(Debug, Serialize)]
pub(crate) struct UsageAmount {
    pub(crate) used: u64,
    pub(crate) limit: Option<u64>,
    pub(crate) available: Option<u64>,
}

impl StatusReport {
    pub(crate) fn new(directory: Option<&Path>, status: &nodekeel_fsquota::QuotaStatus) -> Self {
        let nodekeel_fsquota::QuotaStatus { project, limits, usage } = *status;
        let available = status.remaining_quota();
        Self {
            directory: directory.map(|path| path.to_string_lossy().into_owned()),
            project: project.get(),
            bytes: UsageAmount {
                used: usage.bytes.0,
                limit: limits.bytes.map(|bytes| bytes.0),
                available: available.bytes.map(|bytes| bytes.0),
            },
            inodes: UsageAmount {
                used: usage.inodes.0,
                limit: limits.inodes.map(|inodes| inodes.0),
                available: available.inodes.map(|inodes| inodes.0),
            },
            over_limit: status.is_over_limit(),
            tree: None,
        }
    }
}

/// Counts of the entries of a directory tree.
#[derive(Debug, Serialize)]
pub(crate) struct TreeCounts {
    pub(crate) changed: u64,
    pub(crate) unchanged: u64,
    pub(crate) special: u64,
    pub(crate) foreign: u64,
    pub(crate) immutable: u64,
    /// The first of them, relative to the directory.
    pub(crate) immutable_paths: Vec<String>,
}

impl From<TreeSummary> for TreeCounts {
    fn from(changed: TreeSummary) -> Self {
        let TreeSummary { changed, unchanged, special, foreign, immutable, immutable_paths, .. } = changed;
        let immutable_paths =
            immutable_paths.iter().map(|path| path.to_string_lossy().into_owned()).collect();
        Self { changed, unchanged, special, foreign, immutable, immutable_paths }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct ClearReport {
    pub(crate) directory: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<TreeCounts>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ReleaseReport {
    pub(crate) projects: Vec<u32>,
}

/// A file system that enforces project quotas.
#[derive(Debug, Serialize)]
pub(crate) struct CheckReport {
    pub(crate) mount_point: String,
    pub(crate) file_system: String,
    pub(crate) source: String,
    pub(crate) root: String,
    pub(crate) warnings: Vec<WarningReport>,
}

#[derive(Debug, Serialize)]
pub(crate) struct WarningReport {
    pub(crate) warning: &'static str,
    pub(crate) text: String,
}

impl From<&ProjectQuota> for CheckReport {
    fn from(quota: &ProjectQuota) -> Self {
        let on = quota.file_system();
        let warned = |warning: EnforcementGap| WarningReport {
            warning: warning_key(warning),
            text: warning.to_string(),
        };
        Self {
            mount_point: on.mount_point.to_string_lossy().into_owned(),
            file_system: on.kind.to_string(),
            source: on.source.to_string_lossy().into_owned(),
            root: on.root.to_string_lossy().into_owned(),
            warnings: quota.enforcement_gaps().into_iter().map(warned).collect(),
        }
    }
}

fn warning_key(warning: EnforcementGap) -> &'static str {
    match warning {
        EnforcementGap::OwnersCanLeave => "owners_can_leave",
        EnforcementGap::PrivilegedCanExceed => "privileged_can_exceed",
        EnforcementGap::PartOfFileSystem => "part_of_file_system",
        _ => "other",
    }
}
