//! What programs read.

use std::path::Path;

use nodekeel_fsquota::{Changed, ProjectQuota, Warning};
use serde::Serialize;

/// The account of a directory or of a project.
#[derive(Debug, Serialize)]
pub(crate) struct Status {
    /// Not known in a list of projects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) directory: Option<String>,
    pub(crate) project: u32,
    pub(crate) bytes: Amount,
    pub(crate) inodes: Amount,
    pub(crate) over_limit: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<Tree>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Amount {
    pub(crate) used: u64,
    pub(crate) limit: Option<u64>,
    pub(crate) available: Option<u64>,
}

impl Status {
    pub(crate) fn new(directory: Option<&Path>, status: &nodekeel_fsquota::Status) -> Self {
        let nodekeel_fsquota::Status { project, limits, usage } = *status;
        let available = status.available();
        Self {
            directory: directory.map(|path| path.to_string_lossy().into_owned()),
            project: project.get(),
            bytes: Amount {
                used: usage.bytes.0,
                limit: limits.bytes.map(|bytes| bytes.0),
                available: available.bytes.map(|bytes| bytes.0),
            },
            inodes: Amount {
                used: usage.inodes.0,
                limit: limits.inodes.map(|inodes| inodes.0),
                available: available.inodes.map(|inodes| inodes.0),
            },
            over_limit: status.over_limit(),
            tree: None,
        }
    }
}

/// What became of what was in a directory.
#[derive(Debug, Serialize)]
pub(crate) struct Tree {
    pub(crate) changed: u64,
    pub(crate) unchanged: u64,
    pub(crate) special: u64,
    pub(crate) foreign: u64,
}

impl From<Changed> for Tree {
    fn from(changed: Changed) -> Self {
        let Changed { changed, unchanged, special, foreign, .. } = changed;
        Self { changed, unchanged, special, foreign }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Cleared {
    pub(crate) directory: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<Tree>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Released {
    pub(crate) projects: Vec<u32>,
}

/// A file system whose limits bind.
#[derive(Debug, Serialize)]
pub(crate) struct Checked {
    pub(crate) mount_point: String,
    pub(crate) file_system: String,
    pub(crate) source: String,
    pub(crate) root: String,
    pub(crate) warnings: Vec<Warned>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Warned {
    pub(crate) warning: &'static str,
    pub(crate) text: String,
}

impl From<&ProjectQuota> for Checked {
    fn from(quota: &ProjectQuota) -> Self {
        let on = quota.file_system();
        let warned = |warning: Warning| Warned { warning: name(warning), text: warning.to_string() };
        Self {
            mount_point: on.mount_point.to_string_lossy().into_owned(),
            file_system: on.kind.to_string(),
            source: on.source.to_string_lossy().into_owned(),
            root: on.root.to_string_lossy().into_owned(),
            warnings: quota.warnings().into_iter().map(warned).collect(),
        }
    }
}

fn name(warning: Warning) -> &'static str {
    match warning {
        Warning::OwnersCanLeave => "owners_can_leave",
        Warning::PrivilegedCanExceed => "privileged_can_exceed",
        Warning::OthersCanLock => "others_can_lock",
        Warning::PartOfFileSystem => "part_of_file_system",
        _ => "other",
    }
}
