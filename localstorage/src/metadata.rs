//! What is known about files and directories.

use std::fmt;

use rustix::fs::{FileType, RawMode, Stat};

use crate::name::Name;

/// Permission bits, set exactly as given: the umask takes none away.
///
/// Invariant: no bits beyond `0o7777`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mode(u32);

impl Mode {
    /// `0o700`: a directory for the owner alone.
    pub const PRIVATE_DIR: Self = Self(0o700);
    /// `0o600`: a file for the owner alone.
    pub const PRIVATE_FILE: Self = Self(0o600);

    /// These bits.
    ///
    /// # Panics
    /// Where there are bits beyond `0o7777`; for a constant, at compile time.
    pub const fn new(bits: u32) -> Self {
        assert!(bits <= 0o7777, "a mode has no bits beyond 0o7777");
        Self(bits)
    }

    /// The bits.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Those of the mode that the kernel reports with the type of the file in it.
    pub(crate) const fn of(mode: RawMode) -> Self {
        Self(mode & 0o7777)
    }

    pub(crate) const fn raw(self) -> rustix::fs::Mode {
        rustix::fs::Mode::from_bits_retain(self.0)
    }
}

impl fmt::Debug for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mode({:#05o})", self.0)
    }
}

/// In octal, as chmod takes it.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// What something in a directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link. Nothing here follows it.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// Of a kind that this crate doesn't know.
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

/// Something in a directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Entry {
    /// Its name.
    pub name: Name,
    /// What it is.
    pub kind: FileKind,
    /// Its inode number. Of a mount point: that of the directory below.
    pub inode: u64,
}

impl Entry {
    /// For implementers of [`Placement`](crate::Placement).
    pub fn new(name: Name, kind: FileKind, inode: u64) -> Self {
        Self { name, kind, inode }
    }
}

/// What is known about a file or a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metadata {
    /// What it is.
    pub kind: FileKind,
    /// Its permissions.
    pub mode: Mode,
    /// Its length in bytes, of a regular file.
    pub size: u64,
    /// Its number on its file system.
    pub inode: u64,
    /// The device of its file system, as `stat` has it.
    pub device: u64,
    /// How many names it has.
    pub links: u64,
    /// Who owns it.
    pub uid: u32,
    /// The group that owns it.
    pub gid: u32,
}

impl Metadata {
    #[allow(
        clippy::unnecessary_cast,
        clippy::useless_conversion,
        reason = "the types differ between architectures"
    )]
    pub(crate) fn of(stat: &Stat) -> Self {
        Self {
            kind: FileType::from_raw_mode(stat.st_mode).into(),
            mode: Mode::of(stat.st_mode),
            size: u64::try_from(stat.st_size).unwrap_or_default(),
            inode: stat.st_ino as u64,
            device: stat.st_dev as u64,
            links: stat.st_nlink as u64,
            uid: stat.st_uid,
            gid: stat.st_gid,
        }
    }

    /// Whether both are of the same file.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}
