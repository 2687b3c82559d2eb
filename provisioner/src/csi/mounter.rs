//! The operations on mounts that the plugin needs.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;

use super::target_path::TargetPath;
use crate::id::VolumeId;
use crate::image::loops::BackingFile;
use crate::store::OpenVolume;

/// Identifies a directory or file: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// The device number, as in `stat`.
    pub device: u64,
    /// The inode number.
    pub inode: u64,
}

impl FileId {
    /// The directory or file that a descriptor refers to.
    ///
    /// # Errors
    /// `fstat` failed.
    pub fn from_fd(file: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino })
    }
}

impl From<BackingFile> for FileId {
    fn from(file: BackingFile) -> Self {
        Self { device: file.device, inode: file.inode }
    }
}

/// Restrictions of a mount. A device that is mounted has only the first one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MountRestrictions {
    /// No writes.
    pub read_only: bool,
    /// No set-user-ID programs.
    pub no_suid: bool,
    /// No device nodes.
    pub no_dev: bool,
    /// No programs at all.
    pub no_exec: bool,
}

impl From<nodekeel_localstorage::mount::MountFlags> for MountRestrictions {
    fn from(flags: nodekeel_localstorage::mount::MountFlags) -> Self {
        use nodekeel_localstorage::mount::MountFlags as Kernel;
        Self {
            read_only: flags.contains(Kernel::READ_ONLY),
            no_suid: flags.contains(Kernel::NOSUID),
            no_dev: flags.contains(Kernel::NODEV),
            no_exec: flags.contains(Kernel::NOEXEC),
        }
    }
}

/// The topmost mount at a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetMount {
    /// The volume that is visible there: its directory, or the file that is below a device or file system. Otherwise
    /// the directory or file that is there.
    pub volume: FileId,
    /// The restrictions of this mount, without those of its file system.
    pub flags: MountRestrictions,
}

/// Mounts volumes at targets.
///
/// # Contract
/// - A target is opened beneath the kubelet's directory without following symbolic links.
/// - The target of a block volume is a file, which becomes the device; that of any other volume is a directory.
/// - [`mount`](Self::mount) either mounts the volume with exactly these flags, or mounts nothing and leaves
///   nothing that it created. At no time is the volume visible there with other flags.
/// - What is mounted is found again after a restart: nothing depends on the memory of the process.
/// - Calls for different targets may be concurrent. The caller serializes calls for one target.
/// - Calls block for as long as the kernel takes.
///
/// `testing::conformance` (feature `testing`) checks any implementation against it.
pub trait VolumeMounter: Send + Sync + fmt::Debug {
    /// The topmost mount at a target; `None` if the target is not a mount point or does not exist.
    ///
    /// # Errors
    /// [`TargetMountError::NotDirectory`] or [`TargetMountError::Inspect`].
    fn find_mount(&self, target: &TargetPath) -> Result<Option<TargetMount>, TargetMountError>;

    /// Mounts a volume at a target. Creates the target's directory or file if it is missing; its parent must exist.
    ///
    /// A file system in a file is grown to the size of the file. A block volume is mounted read-only or writable, at
    /// all its targets.
    ///
    /// # Errors
    /// [`TargetMountError::NoParent`], [`TargetMountError::NotDirectory`], [`TargetMountError::NotFile`],
    /// [`TargetMountError::Occupied`], [`TargetMountError::AccessConflict`] or [`TargetMountError::Mount`].
    fn mount(
        &self,
        volume: &OpenVolume,
        target: &TargetPath,
        flags: MountRestrictions,
    ) -> Result<(), TargetMountError>;

    /// Unmounts all mounts at a target, and removes its directory or empty file. Succeeds if the target does not exist.
    ///
    /// # Errors
    /// [`TargetMountError::NotDirectory`], [`TargetMountError::Occupied`], [`TargetMountError::Busy`] or
    /// [`TargetMountError::Unmount`].
    fn unmount(&self, target: &TargetPath) -> Result<(), TargetMountError>;

    /// Returns whether the topmost mount at a target is known to show something else than a volume. `volume` is the
    /// directory or file that the store has of it, if any.
    ///
    /// Default: whether [`find_mount`](Self::find_mount) finds another one than that of the store.
    ///
    /// # Errors
    /// [`TargetMountError::NotDirectory`] or [`TargetMountError::Inspect`].
    fn shows_other(
        &self,
        target: &TargetPath,
        id: &VolumeId,
        volume: Option<FileId>,
    ) -> Result<bool, TargetMountError> {
        let _ = id;
        let mounted = self.find_mount(target)?;
        Ok(mounted.zip(volume).is_some_and(|(mounted, volume)| mounted.volume != volume))
    }

    /// All targets at which a volume is visible. The deletion of the volume depends on it, so anything that
    /// cannot be determined is an error.
    ///
    /// # Errors
    /// [`TargetMountError::List`] or [`TargetMountError::Inspect`].
    fn list_targets(&self, volume: &OpenVolume) -> Result<Vec<TargetPath>, TargetMountError>;

    /// All mount points below the kubelet's directory at which a directory or file within a volume is visible, such as
    /// those of a `subPath`. Default: none, for a mounter that can't tell.
    ///
    /// # Errors
    /// [`TargetMountError::List`].
    fn list_nested(&self, volume: &OpenVolume) -> Result<Vec<PathBuf>, TargetMountError> {
        let _ = volume;
        Ok(Vec::new())
    }

    /// Opens the topmost mount at a target (`O_PATH`), to read the size of its file system. `None`, the default:
    /// nothing is mounted there, or the mounter can't tell. An open mount can't be unmounted.
    ///
    /// # Errors
    /// [`TargetMountError::NotDirectory`] or [`TargetMountError::Inspect`].
    fn open_mount(&self, target: &TargetPath) -> Result<Option<OwnedFd>, TargetMountError> {
        let _ = target;
        Ok(None)
    }

    /// The volumes that may hold something of the node that must be [released](Self::release). Default: none.
    ///
    /// # Errors
    /// [`TargetMountError::List`].
    fn list_attached(&self) -> Result<Vec<VolumeId>, TargetMountError> {
        Ok(Vec::new())
    }

    /// Releases what a volume holds of the node, such as a loop device, if it is mounted nowhere. Default: nothing, for
    /// a mounter whose volumes hold nothing then.
    ///
    /// # Errors
    /// [`TargetMountError::Release`], or those of [`list_targets`](Self::list_targets).
    fn release(&self, volume: &OpenVolume) -> Result<(), TargetMountError> {
        let _ = volume;
        Ok(())
    }
}

/// An operation on a mount failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TargetMountError {
    /// The parent directory of the target does not exist; the kubelet should have created it.
    #[error(
        "parent directory {} of the mount target does not exist below the kubelet's directory: the kubelet \
         creates it",
        parent.display()
    )]
    NoParent {
        /// The missing directory, relative to the kubelet's.
        parent: PathBuf,
    },
    /// A component of the target path is a symbolic link, or not a directory. Find out what created it.
    #[error(
        "{} below the kubelet's directory is not a directory, or is behind a symbolic link: replace it by a \
         directory",
        path.display()
    )]
    NotDirectory {
        /// The path, relative to the kubelet's directory.
        path: PathBuf,
    },
    /// The target of a block volume is a directory. Find out what created it.
    #[error("{} below the kubelet's directory is a directory, not a file: remove it", path.display())]
    NotFile {
        /// The path, relative to the kubelet's directory.
        path: PathBuf,
    },
    /// A block volume is published read-only and writable at once. A retry helps once it is unpublished elsewhere.
    #[error(
        "can't mount a block volume at target {target}: it is read-only elsewhere on this node and writable here, or \
         the reverse; use it in one way at a time"
    )]
    AccessConflict {
        /// The target.
        target: TargetPath,
    },
    /// The target conflicts with an existing mount or directory.
    #[error("target {target} below the kubelet's directory is occupied, and was not changed")]
    Occupied {
        /// The target.
        target: TargetPath,
        /// The conflict.
        #[source]
        source: TargetConflict,
    },
    /// A process still uses the mount at the target. A retry helps once the process has exited.
    #[error("can't unmount target {target}: a process on this node still uses it; stop that process")]
    Busy {
        /// The target.
        target: TargetPath,
    },
    /// Finding out what is mounted at the target failed.
    #[error("can't find out what is mounted at target {target}")]
    Inspect {
        /// The target.
        target: TargetPath,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Mounting the volume failed.
    #[error("can't mount a volume at target {target}")]
    Mount {
        /// The target.
        target: TargetPath,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Unmounting the target, or removing its directory, failed.
    #[error("can't unmount or remove target {target}")]
    Unmount {
        /// The target.
        target: TargetPath,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Listing the mounts of this node failed.
    #[error("can't list the mounts of this node")]
    List {
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Detaching the device of a volume failed.
    #[error("can't detach the loop device of a volume")]
    Release {
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The occupant of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TargetConflict {
    /// A mount.
    #[error("another process mounted something there meanwhile, which stays: retry")]
    Mount,
    /// A mount that does not show the volume that is to be unmounted.
    #[error("another process mounted something else there, which stays: unmount it")]
    OtherMount,
    /// A directory that is not empty. It is not changed.
    #[error("its directory is not empty: move its content away")]
    NotEmpty,
}
