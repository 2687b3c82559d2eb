//! What the plugin needs of a kernel's mounts.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use super::target::Target;

/// Which directory it is: the device and the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// The device's number, as `stat` gives it.
    pub device: u64,
    /// The inode's number.
    pub inode: u64,
}

impl FileId {
    /// The directory behind a descriptor.
    ///
    /// # Errors
    /// What `fstat` says.
    pub fn of(file: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// What a mount doesn't allow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MountFlags {
    /// No writing.
    pub read_only: bool,
    /// No set-user-id programs.
    pub no_suid: bool,
    /// No device nodes.
    pub no_dev: bool,
    /// No programs at all.
    pub no_exec: bool,
}

impl From<nodekeel_localstorage::mount::MountFlags> for MountFlags {
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

/// What is mounted at a target, on top of whatever is below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mounted {
    /// The directory that is seen there.
    pub of: FileId,
    /// What this mount doesn't allow; what its file system as a whole doesn't allow isn't in here.
    pub flags: MountFlags,
}

/// Mounts volumes at targets.
///
/// # Contract
/// - A target is reached beneath the kubelet's directory, and no symbolic link is followed on the way.
/// - [`mount`](Self::mount) ends with the volume mounted with exactly these flags, or with nothing mounted and no
///   directory left that it made. At no time is the volume seen there with other flags.
/// - Calls for different targets may be made at the same time. For one target the caller takes care that there is one.
/// - Calls block for as long as the kernel takes.
///
/// `testing::conformance` (feature `testing`) checks it for any implementation.
pub trait Mounts: Send + Sync + fmt::Debug {
    /// What is mounted at a target: the topmost mount, or nothing, also where there is no such place.
    ///
    /// # Errors
    /// [`MountError::Link`] or [`MountError::Look`].
    fn mounted(&self, target: &Target) -> Result<Option<Mounted>, MountError>;

    /// Mounts a volume at a target. The target's directory is made where there is none; the one above it must exist.
    ///
    /// # Errors
    /// [`MountError::NoParent`], [`MountError::Link`], [`MountError::Occupied`] or [`MountError::Mount`].
    fn mount(&self, volume: BorrowedFd<'_>, target: &Target, flags: MountFlags) -> Result<(), MountError>;

    /// Unmounts all that is mounted at a target, and removes its directory. Where there is nothing, that is success.
    ///
    /// # Errors
    /// [`MountError::Link`], [`MountError::Occupied`], [`MountError::Busy`] or [`MountError::Unmount`].
    fn unmount(&self, target: &Target) -> Result<(), MountError>;

    /// Every target at which a volume can be seen. It decides whether the volume may be destroyed, so what can't be told is an
    /// error.
    ///
    /// # Errors
    /// [`MountError::List`] or [`MountError::Look`].
    fn targets(&self, volume: BorrowedFd<'_>) -> Result<Vec<Target>, MountError>;
}

/// What went wrong with a mount.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The directory above the target doesn't exist; the kubelet should have made it.
    #[error("there is no directory {} below the kubelet's for a target to be made in", parent.display())]
    NoParent {
        /// The missing directory, relative to the kubelet's.
        parent: PathBuf,
    },
    /// A symbolic link, or something else that is no directory, is on the way to the target. Look who put it there.
    #[error("{} below the kubelet's directory is reached through a symbolic link, or is no directory", path.display())]
    Link {
        /// The path, relative to the kubelet's directory.
        path: PathBuf,
    },
    /// Something is at the target already.
    #[error("target {target} below the kubelet's directory is taken")]
    Occupied {
        /// The target.
        target: Target,
        /// What is there.
        #[source]
        source: Conflict,
    },
    /// A process still uses what is mounted at the target. A retry helps once it has ended.
    #[error("target {target} is still in use by a process on this node")]
    Busy {
        /// The target.
        target: Target,
    },
    /// It could not be told what is mounted at the target.
    #[error("look at target {target}")]
    Look {
        /// The target.
        target: Target,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The volume could not be mounted.
    #[error("mount a volume at target {target}")]
    Mount {
        /// The target.
        target: Target,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The target could not be unmounted, or its directory not removed.
    #[error("unmount target {target}")]
    Unmount {
        /// The target.
        target: Target,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The mounts of this node could not be listed.
    #[error("list the mounts of this node")]
    List {
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// What is at a target that should be free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Conflict {
    /// A mount.
    #[error("something is mounted there")]
    Mount,
    /// A directory with something in it. It is left as it is.
    #[error("the directory there is not empty: move away what it holds")]
    NotEmpty,
}
