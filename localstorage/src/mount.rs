//! Mounts as plain data, and the trait that mounts and unmounts.

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

/// Mount flags, with the numbers of the kernel.
///
/// *Source:* `MS_*` in `linux/mount.h`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct MountFlags(u32);

impl MountFlags {
    /// No flags.
    pub const NONE: MountFlags = MountFlags(0);
    /// Read-only.
    pub const READ_ONLY: MountFlags = MountFlags(1);
    /// Set-user-ID bits and file capabilities have no effect.
    pub const NOSUID: MountFlags = MountFlags(2);
    /// Device nodes cannot be opened.
    pub const NODEV: MountFlags = MountFlags(4);
    /// Programs cannot be executed.
    pub const NOEXEC: MountFlags = MountFlags(8);
    /// Every write is on disk before it returns.
    pub const SYNCHRONOUS: MountFlags = MountFlags(16);

    /// The flags with their names in `/proc/self/mountinfo`.
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

    /// The union of both; `|` that works in constants.
    pub const fn union(self, other: MountFlags) -> MountFlags {
        MountFlags(self.0 | other.0)
    }

    /// Returns whether these contain all flags of `other`.
    pub const fn contains(self, other: MountFlags) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags, with those of `mask` as in `other`.
    fn replaced(self, mask: MountFlags, other: MountFlags) -> MountFlags {
        MountFlags(self.0 & !mask.0 | other.0 & mask.0)
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
        self.union(other)
    }
}

/// Names separated by commas; `rw` if there are none.
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

/// A mount as data, without its source and target.
///
/// The mounts of a node are constants here. They are those of Monogon with `nosuid` added to each, since no program
/// on them needs set-user-ID bits, and without the `noexec` of [`DATA`](Self::DATA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountSpec {
    /// The file system type, as in `/proc/filesystems`.
    pub fstype: &'static str,
    /// The flags of the mount.
    pub flags: MountFlags,
    /// The options of the file system, `key` or `key=value`.
    pub options: &'static [&'static str],
}

impl MountSpec {
    /// The flags of a mount, not of its file system.
    const STRICT: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

    /// The EFI system partition. It is mounted synchronously, since the next boot depends on it, and for root alone:
    /// vfat keeps no modes, and the node unlock key is there.
    pub const ESP: MountSpec = MountSpec {
        fstype: "vfat",
        flags: Self::STRICT.union(MountFlags::SYNCHRONOUS),
        options: &["fmask=0177", "dmask=0077"],
    };

    /// `/tmp`. All users may write there, and only owners may remove their files.
    pub const TMP: MountSpec = MountSpec { fstype: "tmpfs", flags: Self::STRICT, options: &["mode=1777"] };

    /// `/ephemeral`. Programs are executed from it.
    pub const EPHEMERAL: MountSpec = MountSpec {
        fstype: "tmpfs",
        flags: MountFlags::NOSUID.union(MountFlags::NODEV),
        options: &["mode=755"],
    };

    /// `/run`.
    pub const RUN: MountSpec = MountSpec { fstype: "tmpfs", flags: Self::STRICT, options: &["mode=755"] };

    /// `/data`, with project quotas enforced. Pods execute programs from directories below it, whose mounts inherit its
    /// flags: Monogon's `noexec` would reach an `emptyDir`. Device nodes work there, since block volumes are device
    /// nodes below the kubelet's directory.
    pub const DATA: MountSpec =
        MountSpec { fstype: "xfs", flags: MountFlags::NOSUID, options: &["prjquota"] };
}

/// The file system mounted on a directory: what distinguishes one mount from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// The file system type.
    pub fstype: String,
    /// The major and minor number of the mounted device.
    pub device: (u32, u32),
    /// The flags in effect.
    pub flags: MountFlags,
    /// The options in effect, including defaults.
    pub options: Vec<String>,
}

impl MountInfo {
    /// Returns whether this is the result of mounting `source` by `spec`: the same type and flags, each requested
    /// option, and the same device if the source is one.
    pub fn matches_spec(&self, spec: &MountSpec, source: Option<(u32, u32)>) -> bool {
        let has = |option: &str| self.options.iter().any(|known| is_same_option(known, option));
        self.fstype == spec.fstype
            && self.flags == spec.flags
            && source.is_none_or(|device| device == self.device)
            // The mode applies to the root directory, which creating a layout sets; mountinfo omits defaults.
            && spec.options.iter().filter(|option| !option.starts_with("mode=")).all(|option| has(option))
    }

    /// Returns whether this is the result of mounting the block device `source` by `spec`, but for flags of the mount, which
    /// can be changed.
    pub(crate) fn matches_but_flags(&self, spec: &MountSpec, source: Option<(u32, u32)>) -> bool {
        let flags = self.flags.replaced(MountSpec::STRICT, spec.flags);
        MountInfo { flags, ..self.clone() }.matches_spec(spec, source)
    }
}

/// Returns whether both options are the same. XFS reports options under their oldest name.
fn is_same_option(option: &str, other: &str) -> bool {
    let plain = |option| if option == "pquota" { "prjquota" } else { option };
    plain(option) == plain(other)
}

/// A failure to mount or unmount a file system.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MountError {
    /// Another file system, or the same with other options, is mounted there: unmount it first.
    #[error(
        "a file system from another device, or with other options, is already mounted on {}: {} {}; unmount \
         it, or correct its options",
        .target.display(), .existing.fstype, .existing.flags
    )]
    Conflict {
        /// The directory.
        target: PathBuf,
        /// The existing mount.
        existing: Box<MountInfo>,
    },
    /// The target could not be opened: create it first. Symbolic links are not followed.
    #[error("can't open mount point {}: create the directory (symbolic links are not followed)", .target.display())]
    OpenTarget {
        /// The directory.
        target: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The kernel rejected the file system, one of its options or its source.
    #[error("can't mount {fstype} on {}{}", .target.display(), in_parentheses(.kernel))]
    Mount {
        /// The directory.
        target: PathBuf,
        /// The file system type.
        fstype: &'static str,
        /// The log of the kernel about the mount; may be empty.
        kernel: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file system is in use: close the open files below it.
    #[error("can't unmount {}", .target.display())]
    Unmount {
        /// The directory.
        target: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The mount table could not be read: `/proc` must be mounted.
    #[error("can't read the mount table (/proc/self/mountinfo) to check {}", .target.display())]
    ReadTable {
        /// The requested directory.
        target: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

fn in_parentheses(kernel: &str) -> String {
    if kernel.is_empty() { String::new() } else { format!(" ({kernel})") }
}

/// Mounts and unmounts file systems.
///
/// # Contract
/// - [`mount`](Mounter::mount) is idempotent: it succeeds without a second mount if the same source is
///   already mounted by the same spec. A block device that differs in `nosuid`, `nodev` and `noexec` alone, as one
///   that an earlier release has mounted, gets these flags of the spec. Any other existing mount is
///   [`MountError::Conflict`], and stays.
/// - It mounts completely or not at all: an error leaves the target unchanged.
/// - [`unmount`](Mounter::unmount) removes the topmost mount of the target; it succeeds if nothing is
///   mounted.
/// - Targets are absolute, and symbolic links in them are not followed.
pub trait Mounter: Send + Sync + fmt::Debug {
    /// Mounts `source` on `target` by `spec`; the source is none for file systems without one, such as tmpfs.
    ///
    /// # Errors
    /// [`MountError::Conflict`] and the steps that can fail.
    fn mount(&self, spec: &MountSpec, source: Option<&Path>, target: &Path) -> Result<(), MountError>;

    /// Unmounts the topmost mount of `target`.
    ///
    /// # Errors
    /// [`MountError::Unmount`] if it is in use.
    fn unmount(&self, target: &Path) -> Result<(), MountError>;

    /// The topmost mount of `target`; none if it is not a mount point.
    ///
    /// # Errors
    /// [`MountError::ReadTable`].
    fn mount_info(&self, target: &Path) -> Result<Option<MountInfo>, MountError>;
}
