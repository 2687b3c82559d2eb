//! What is mounted where: mounts as plain data, and the seam by which they are made.

mod os;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod recorder;
pub(crate) mod table;

use std::fmt;
use std::io;
use std::ops::BitOr;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use os::OsMounter;
pub use table::{MountEntry, mount_table};

/// Flags of a mount, with the kernel's numbers.
///
/// *Source:* `MS_*` in `linux/mount.h`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MountFlags(u32);

impl MountFlags {
    /// None of them.
    pub const NONE: MountFlags = MountFlags(0);
    /// Nothing is written.
    pub const READ_ONLY: MountFlags = MountFlags(1);
    /// Set-user-id bits and file capabilities give nothing.
    pub const NOSUID: MountFlags = MountFlags(2);
    /// Device nodes can't be opened.
    pub const NODEV: MountFlags = MountFlags(4);
    /// Nothing is executed.
    pub const NOEXEC: MountFlags = MountFlags(8);
    /// Every write is on the disk before it returns.
    pub const SYNCHRONOUS: MountFlags = MountFlags(16);

    /// The flags with their names, as `/proc/self/mountinfo` has them.
    const NAMES: [(MountFlags, &'static str); 5] = [
        (Self::READ_ONLY, "ro"),
        (Self::NOSUID, "nosuid"),
        (Self::NODEV, "nodev"),
        (Self::NOEXEC, "noexec"),
        (Self::SYNCHRONOUS, "sync"),
    ];

    /// The kernel's bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Both; `|` that works in constants.
    pub const fn with(self, other: MountFlags) -> MountFlags {
        MountFlags(self.0 | other.0)
    }

    /// Whether all of `other` are among these.
    pub const fn contains(self, other: MountFlags) -> bool {
        self.0 & other.0 == other.0
    }

    fn names(self) -> impl Iterator<Item = &'static str> {
        Self::NAMES.into_iter().filter(move |(flag, _)| self.contains(*flag)).map(|(_, name)| name)
    }

    fn from_name(name: &str) -> MountFlags {
        let flag = Self::NAMES.iter().find(|(_, known)| *known == name);
        flag.map_or(Self::NONE, |(flag, _)| *flag)
    }
}

impl BitOr for MountFlags {
    type Output = MountFlags;

    fn bitor(self, other: MountFlags) -> MountFlags {
        self.with(other)
    }
}

/// By name, separated by commas; `rw` where there are none.
impl fmt::Display for MountFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.names().collect();
        f.write_str(if names.is_empty() { "rw".into() } else { names.join(",") }.as_str())
    }
}

impl fmt::Debug for MountFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MountFlags({self})")
    }
}

/// A mount as data: all but its source and its target.
///
/// The five of a node's [`Root`](crate::tree::Root) are constants here. They are those of the original with `nosuid`
/// added to each, since nothing below them needs set-user-id bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountSpec {
    /// The file system's type, as `/proc/filesystems` has it.
    pub fstype: &'static str,
    /// Flags of the mount.
    pub flags: MountFlags,
    /// Options of the file system, `key` or `key=value`.
    pub options: &'static [&'static str],
}

impl MountSpec {
    const STRICT: MountFlags = MountFlags::NOSUID.with(MountFlags::NODEV).with(MountFlags::NOEXEC);

    /// The EFI system partition. It is mounted synchronously: it holds what the next boot depends on.
    pub const ESP: MountSpec =
        MountSpec { fstype: "vfat", flags: Self::STRICT.with(MountFlags::SYNCHRONOUS), options: &[] };

    /// `/tmp`. Everybody may write there, and nobody removes what is another's.
    pub const TMP: MountSpec = MountSpec { fstype: "tmpfs", flags: Self::STRICT, options: &["mode=1777"] };

    /// `/ephemeral`. Programs are executed from it.
    pub const EPHEMERAL: MountSpec = MountSpec {
        fstype: "tmpfs",
        flags: MountFlags::NOSUID.with(MountFlags::NODEV),
        options: &["mode=755"],
    };

    /// `/run`.
    pub const RUN: MountSpec = MountSpec { fstype: "tmpfs", flags: Self::STRICT, options: &["mode=755"] };

    /// `/data`: project quotas bind. Device nodes work there, since block volumes are device nodes below the kubelet's
    /// directory.
    pub const DATA: MountSpec = MountSpec {
        fstype: "xfs",
        flags: MountFlags::NOSUID.with(MountFlags::NOEXEC),
        options: &["prjquota"],
    };
}

/// What is mounted on a directory, as far as it tells one mount from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The file system's type.
    pub fstype: String,
    /// Major and minor number of what is mounted.
    pub device: (u32, u32),
    /// Flags in effect.
    pub flags: MountFlags,
    /// Options in effect, including those that nobody asked for.
    pub options: Vec<String>,
}

impl Mounted {
    /// Whether this is what mounting `source` by `spec` makes: the same type and flags, each option asked for, and the
    /// same device where the source is one.
    pub fn is(&self, spec: &MountSpec, source: Option<(u32, u32)>) -> bool {
        let has = |option: &str| self.options.iter().any(|is| same_option(is, option));
        self.fstype == spec.fstype
            && self.flags == spec.flags
            && source.is_none_or(|device| device == self.device)
            // A mode is of the root directory, which whoever places a tree there sets; mountinfo leaves defaults out.
            && spec.options.iter().filter(|option| !option.starts_with("mode=")).all(|option| has(option))
    }
}

/// XFS reports options under their oldest name.
fn same_option(is: &str, wanted: &str) -> bool {
    let plain = |option| if option == "pquota" { "prjquota" } else { option };
    plain(is) == plain(wanted)
}

/// Why something could not be mounted or unmounted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MountError {
    /// Something else, or the same with other options, is mounted there: unmount it first.
    #[error("{} is mounted already, and otherwise: {} {}", .target.display(), .is.fstype, .is.flags)]
    Conflict {
        /// The directory.
        target: PathBuf,
        /// What is mounted on it.
        is: Box<Mounted>,
    },
    /// The target could not be opened: create it first; no symbolic link is followed.
    #[error("open mount point {}", .target.display())]
    Target {
        /// The directory.
        target: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The kernel refused the file system, one of its options or its source.
    #[error("mount {fstype} on {}{}", .target.display(), said(.kernel))]
    Mount {
        /// The directory.
        target: PathBuf,
        /// The file system's type.
        fstype: &'static str,
        /// What the kernel said about it, if anything.
        kernel: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is in use: close what is open below it.
    #[error("unmount {}", .target.display())]
    Unmount {
        /// The directory.
        target: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The table of mounts could not be read: `/proc` must be mounted.
    #[error("read what is mounted on {}", .target.display())]
    Table {
        /// The directory asked about.
        target: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

fn said(kernel: &str) -> String {
    if kernel.is_empty() { String::new() } else { format!(" ({kernel})") }
}

/// Makes and undoes mounts.
///
/// # Contract
/// - [`mount`](Mounter::mount) is idempotent: what is mounted there by the same spec, from the same source, is success
///   and is mounted once. Anything else there is [`MountError::Conflict`], and stays.
/// - It mounts wholly or not at all: an error leaves the target as it was.
/// - [`unmount`](Mounter::unmount) takes the topmost mount off the target; where nothing is mounted, that is success.
/// - Targets are absolute, and no symbolic link in them is followed.
pub trait Mounter: Send + Sync + fmt::Debug {
    /// Mounts `source` (none for what has none, as tmpfs) on `target` by `spec`.
    ///
    /// # Errors
    /// [`MountError::Conflict`] and the steps that can fail.
    fn mount(&self, spec: &MountSpec, source: Option<&Path>, target: &Path) -> Result<(), MountError>;

    /// Unmounts what is mounted on `target`.
    ///
    /// # Errors
    /// [`MountError::Unmount`] where it is in use.
    fn unmount(&self, target: &Path) -> Result<(), MountError>;

    /// What is mounted on `target`, topmost; none where it is a directory like any other.
    ///
    /// # Errors
    /// [`MountError::Table`].
    fn mounted(&self, target: &Path) -> Result<Option<Mounted>, MountError>;
}
