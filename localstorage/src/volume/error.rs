//! The errors of volumes.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::lifecycle::MountState;
#[cfg(feature = "luks")]
use super::luks::LuksError;
use super::probe::VolumeContents;
use crate::error::Error;
use crate::mount::MountError;

/// A failure to create, open or close a volume.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VolumeError {
    /// Another call is in progress, or the volume is mounted already, or is not mounted yet.
    #[error("the data volume is {state}, which this operation does not allow")]
    InvalidState {
        /// The state.
        state: MountState,
    },
    /// There are contents already. Use [`ErasePolicy::Exactly`](super::ErasePolicy::Exactly) to erase them.
    #[error(
        "{} already contains {found}, and nothing was written to it: use an empty disk, or erase this one",
        .path.display()
    )]
    Occupied {
        /// The device, or the directory.
        path: PathBuf,
        /// The contents.
        found: VolumeContents,
    },
    /// The volume does not exist yet: create one.
    #[error("no data volume on {}: create one, or attach the node's disk", .path.display())]
    Absent {
        /// The device, or the directory.
        path: PathBuf,
    },
    /// The creation was interrupted, before any data was on it: create it again.
    #[error(
        "creation of the data volume on {} was interrupted, before it had data: create it again",
        .path.display()
    )]
    Unfinished {
        /// The device, or the directory.
        path: PathBuf,
    },
    /// The contents were not created by [`DataVolume::mount_new`](super::DataVolume::mount_new).
    #[error(
        "{} contains {found}, which is not a nodekeel data volume; nothing was written: attach the node's \
         disk",
        .path.display()
    )]
    ForeignData {
        /// The device, or the directory.
        path: PathBuf,
        /// The contents.
        found: VolumeContents,
    },
    /// The device could not be opened, read or written, or is in use: its contents are unknown. A retry may
    /// help.
    #[error("can't {step} disk {}", .path.display())]
    Device {
        /// The failed step.
        step: &'static str,
        /// The device.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file system of it is mounted, or it is part of another device. Nothing was written to it: end that use.
    #[error("can't get exclusive use of disk {}, which is {users}", .path.display())]
    InUse {
        /// The device.
        path: PathBuf,
        /// The mounts and devices that use it, with what to type.
        users: String,
    },
    /// Another disk has the name now, or the medium was changed. Nothing was written to that one: attach the node's
    /// disk, or correct the name. A retry uses the disk that has the name then.
    #[error(
        "another disk has taken the place of {}, and nothing was written to it: attach the node's disk, or correct \
         its name",
        .path.display()
    )]
    Replaced {
        /// The device.
        path: PathBuf,
    },
    /// The caller has canceled the reading of the whole disk. The next call resumes it.
    #[error("reading of disk {} was canceled: nothing was written to it", .path.display())]
    ReadingCanceled {
        /// The device.
        path: PathBuf,
    },
    /// The caller has canceled the wipe of the new volume. The next call resumes it.
    #[cfg(feature = "luks")]
    #[error("wipe of the new data volume on {} was canceled: the next start goes on with it", .path.display())]
    WipeCanceled {
        /// The device.
        path: PathBuf,
    },
    /// The caller has canceled the copy of a volume to this disk. The next call compares what is copied, and goes on.
    #[cfg(feature = "luks")]
    #[error("copy of the data volume to {} was canceled: the next start goes on with it", .path.display())]
    CopyCanceled {
        /// The device.
        path: PathBuf,
    },
    /// `mkfs.xfs` could not be started, or failed: install xfsprogs, or read its output. A retry starts over.
    #[error("can't format {}{}", .path.display(), in_parentheses(.stderr))]
    Format {
        /// The device.
        path: PathBuf,
        /// The error output, if it was started.
        stderr: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// `xfs_growfs` could not be started, or failed: install xfsprogs, or read its output.
    #[error("can't grow the file system on {}{}", .path.display(), in_parentheses(.stderr))]
    Grow {
        /// The mount point.
        path: PathBuf,
        /// The error output, if it was started.
        stderr: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The volume could not be encrypted, or opened with a key.
    #[cfg(feature = "luks")]
    #[error("can't use encrypted volume {}", .path.display())]
    Encryption {
        /// The device.
        path: PathBuf,
        /// The cause, and what to do.
        #[source]
        source: Box<LuksError>,
    },
    /// The volume could not be mounted or unmounted.
    #[error("can't mount or unmount the data volume")]
    Mount(#[source] MountError),
    /// The root directory of the volume could not be opened, listed, or marked as complete.
    #[error("can't read the data volume's root directory, or record there that the volume is complete")]
    Finish(#[source] Error),
}

fn in_parentheses(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!(" ({stderr})") }
}
