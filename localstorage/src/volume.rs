//! The volume that a node's data lies on: made once, opened ever after, and never made over what somebody may want back.
//!
//! ```text
//!               mount_new / mount_existing
//!  Unmounted ───────────────────────────────▶ Mounting ──▶ Mounted
//!      ▲                                         │            │
//!      └───────── any error, undone ─────────────┴── unmount ─┘
//! ```

#[cfg(any(test, feature = "testing"))]
pub(crate) mod conformance;
mod directory;
mod disk;
mod lifecycle;
mod marker;
mod plain;
pub(crate) mod probe;
mod uuid;

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::dir::Dir;
use crate::error::Error;
use crate::mount::MountError;

pub use directory::Directory;
pub use plain::Plain;
pub use probe::{Contents, Signature, probe};

/// Where a node's data lies.
///
/// # Contract
/// - [`mount_new`](DataVolume::mount_new) destroys nothing but what it is told to, by what it found there before. A call
///   that was killed at any point is made again with the same arguments, and goes on; where all was done but its return,
///   that call is refused as [`Occupied`](VolumeError::Occupied), and the volume is there.
/// - [`mount_existing`](DataVolume::mount_existing) writes nothing, and opens only what `mount_new` has completed.
/// - Both give the volume's own top directory, held open: what is written through it reaches the volume or nothing.
/// - A failed call leaves the volume [`Unmounted`](State::Unmounted), and can be made again.
/// - One call is at work at a time: another one meanwhile, or on a mounted volume, is [`VolumeError::State`].
///
/// `testing::volume_conformance` (feature `testing`) checks it.
pub trait DataVolume: Send + Sync + fmt::Debug {
    /// Makes an empty volume, and mounts it.
    ///
    /// # Errors
    /// [`VolumeError::Occupied`] where there is anything that `erase` doesn't name, and the steps that can fail.
    fn mount_new(&self, erase: Erase) -> Result<Dir, VolumeError>;

    /// Mounts the volume that [`mount_new`](DataVolume::mount_new) once made.
    ///
    /// # Errors
    /// [`VolumeError::Absent`], [`VolumeError::Unfinished`], [`VolumeError::NotOurs`] tell what is there instead.
    fn mount_existing(&self) -> Result<Dir, VolumeError>;

    /// Unmounts it; nothing where it is not mounted. Directories held open keep it from that.
    ///
    /// # Errors
    /// [`VolumeError::Mount`], with the volume mounted as before; [`VolumeError::State`].
    fn unmount(&self) -> Result<(), VolumeError>;

    /// What it is at the moment.
    fn state(&self) -> State;
}

/// What a volume is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// Nothing has begun, or all of it is undone.
    Unmounted,
    /// A call is at work.
    Mounting,
    /// Its directory can be used.
    Mounted,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Unmounted => "not mounted",
            State::Mounting => "being mounted",
            State::Mounted => "mounted",
        })
    }
}

/// What making a new volume may destroy.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Erase {
    /// Nothing.
    Nothing,
    /// This, as [`VolumeError::Occupied`] has reported it, and only if it is still there and the same, and not on another
    /// disk that has its name now ([`Signature::mark`]): whoever says so has seen what he gives up.
    Exactly(Contents),
}

/// Why a volume could not be made, opened or closed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VolumeError {
    /// Another call is at work, or has succeeded: there is nothing to do.
    #[error("volume is {state}")]
    State {
        /// What it is.
        state: State,
    },
    /// There is something already. To give it up, say so with [`Erase::Exactly`].
    #[error("{} holds {found}, and is left as it is", .path.display())]
    Occupied {
        /// The device, or the directory.
        path: PathBuf,
        /// What is there.
        found: Contents,
    },
    /// There is nothing yet: make a new volume.
    #[error("{} is blank", .path.display())]
    Absent {
        /// The device, or the directory.
        path: PathBuf,
    },
    /// Making it was interrupted, before anything was on it: make it again.
    #[error("the volume on {} was never finished", .path.display())]
    Unfinished {
        /// The device, or the directory.
        path: PathBuf,
    },
    /// What is there was not made by [`DataVolume::mount_new`].
    #[error("{} holds {found}, which is no data volume of ours", .path.display())]
    NotOurs {
        /// The device, or the directory.
        path: PathBuf,
        /// What is there.
        found: Contents,
    },
    /// The device could not be opened, read or written, or is in use: nothing is known of it. A retry may help.
    #[error("{step} {}", .path.display())]
    Device {
        /// What was done.
        step: &'static str,
        /// The device.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// `mkfs.xfs` could not be started, or failed: install xfsprogs, or see what it said. A retry begins again.
    #[error("format {}{}", .path.display(), said(.stderr))]
    Format {
        /// The device.
        path: PathBuf,
        /// What it said, if it was started.
        stderr: String,
        /// How it ended.
        #[source]
        source: io::Error,
    },
    /// It could not be mounted or unmounted.
    #[error("mount volume")]
    Mount(#[source] MountError),
    /// The volume's directory could not be opened, looked through, or marked as complete.
    #[error("finish volume")]
    Finish(#[source] Error),
}

fn said(stderr: &str) -> String {
    if stderr.is_empty() { String::new() } else { format!(" ({stderr})") }
}
