//! Metadata of files and directories.

use std::fmt;

use rustix::fs::{FileType, RawMode, Stat};

use crate::file_name::FileName;

/// Permission bits, set exactly as given: the umask does not apply.
///
/// Invariant: no bits beyond `0o7777`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileMode(u32);

impl FileMode {
    /// `0o700`: a directory for the owner alone.
    pub const PRIVATE_DIR: Self = Self(0o700);
    /// `0o600`: a file for the owner alone.
    pub const PRIVATE_FILE: Self = Self(0o600);

    /// A mode with these bits.
    ///
    /// # Panics
    /// If there are bits beyond `0o7777`; in a constant, at compile time.
    pub const fn new(bits: u32) -> Self {
        assert!(bits <= 0o7777, "a mode has no bits beyond 0o7777");
        Self(bits)
    }

    /// The bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The permission bits of `st_mode`, which also contains the file type.
    pub(crate) const fn from_st_mode(mode: RawMode) -> Self {
        Self(mode & 0o7777)
    }

    pub(crate) const fn to_rustix(self) -> rustix::fs::Mode {
        rustix::fs::Mode::from_bits_retain(self.0)
    }
}

impl fmt::Debug for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mode({:#05o})", self.0)
    }
}

/// In octal, as chmod takes it.
impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// The user and the group that own a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "the kernel knows no third")]
pub struct FileOwner {
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
}

/// The kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link. This crate never follows it.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A kind that this crate does not know.
    Unknown,
}

impl From<FileType> for FileKind {
    fn from(kind: FileType) -> Self {
        match kind {
            FileType::RegularFile => Self::File,
            FileType::Directory => Self::Dir,
            FileType::Symlink => Self::Symlink,
            FileType::Fifo => Self::Fifo,
            FileType::Socket => Self::Socket,
            FileType::CharacterDevice => Self::CharDevice,
            FileType::BlockDevice => Self::BlockDevice,
            FileType::Unknown => Self::Unknown,
        }
    }
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct DirEntry {
    /// The name.
    pub name: FileName,
    /// The kind.
    pub kind: FileKind,
    /// The inode number; for a mount point, that of the directory under the mount.
    pub inode: u64,
}

impl DirEntry {
    /// An entry, for implementers of [`FileStore`](crate::FileStore).
    pub fn new(name: FileName, kind: FileKind, inode: u64) -> Self {
        Self { name, kind, inode }
    }
}

/// Metadata of a file or a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metadata {
    /// The kind.
    pub kind: FileKind,
    /// The permissions.
    pub mode: FileMode,
    /// The length of a regular file in bytes.
    pub size: u64,
    /// The inode number.
    pub inode: u64,
    /// The device of its file system, as in `stat`.
    pub device: u64,
    /// The number of hard links.
    pub links: u64,
    /// The user id of its owner.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
}

impl Metadata {
    #[allow(
        clippy::unnecessary_cast,
        clippy::useless_conversion,
        reason = "the types differ between architectures"
    )]
    pub(crate) fn from_stat(stat: &Stat) -> Self {
        Self {
            kind: FileType::from_raw_mode(stat.st_mode).into(),
            mode: FileMode::from_st_mode(stat.st_mode),
            size: u64::try_from(stat.st_size).unwrap_or_default(),
            inode: stat.st_ino as u64,
            device: stat.st_dev as u64,
            links: stat.st_nlink as u64,
            uid: stat.st_uid,
            gid: stat.st_gid,
        }
    }

    /// The user and the group that own the file.
    pub fn owner(&self) -> FileOwner {
        FileOwner { uid: self.uid, gid: self.gid }
    }

    /// Returns whether both describe the same file.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}
