//! Volumes that are a file: what a volume is, and the file systems in such files.

use std::fmt;
use std::str::FromStr;

use nodekeel_fsquota::{Bytes, QuotaLimits};

mod format;
#[cfg_attr(not(feature = "csi"), allow(dead_code, reason = "the node plugin attaches and mounts"))]
pub(crate) mod loops;
#[cfg_attr(not(feature = "csi"), allow(dead_code, reason = "the node plugin attaches and mounts"))]
pub(crate) mod mounts;
mod root_mode;
#[cfg_attr(not(feature = "csi"), allow(dead_code, reason = "the node plugin attaches and mounts"))]
mod sys;

pub use format::FormatError;
pub(crate) use format::Formatter;

/// The size of a file is a multiple of this: the block size of the file systems in it, and of the disks with the
/// largest sectors.
const BLOCK_BYTES: u64 = 4096;

/// A file occupies at most this part of its size more, for the list of its extents, and [`FIXED_BYTES`].
///
/// *Source:* XFS: 16 bytes for each extent, and an extent for each block at worst: a 256th, doubled.
const EXTENT_PART: u64 = 128;

const FIXED_BYTES: u64 = 1 << 20;

/// Bytes that may be written at once into blocks that are shared with a snapshot: until it is written, each of them
/// counts twice.
///
/// *Source:* Linux `loop.c`: 128 requests, of 4 MiB each at most.
const COPY_BYTES: u64 = 512 << 20;

/// The kind of a volume: a directory, or a file that pods see as a device or as the file system in it.
///
/// The words in PersistentVolumes and on the disk are `directory`, `block`, `ext4` and `xfs`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "complete by nature: each image has a format")]
pub enum VolumeKind {
    /// A directory with a project quota, the default.
    #[default]
    Directory,
    /// A file in such a directory.
    Image(ImageFormat),
}

/// The content of a volume's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ImageFormat {
    /// The content of a block device: nothing of ours.
    Block,
    /// An ext4 file system.
    Ext4,
    /// An XFS file system.
    Xfs,
}

/// An image to make.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageSpec {
    pub(crate) format: ImageFormat,
    /// The size of its file; of a request, before it is rounded up to blocks.
    pub(crate) size: Bytes,
}

/// A text names no kind of volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("unknown kind of volume: expected directory, block, ext4 or xfs")]
pub struct InvalidKind;

impl VolumeKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [
        Self::Directory,
        Self::Image(ImageFormat::Block),
        Self::Image(ImageFormat::Ext4),
        Self::Image(ImageFormat::Xfs),
    ];

    /// The format of its file; `None` for a directory.
    pub fn image_format(self) -> Option<ImageFormat> {
        match self {
            Self::Directory => None,
            Self::Image(format) => Some(format),
        }
    }

    /// The word in PersistentVolumes and on the disk.
    pub fn as_str(self) -> &'static str {
        self.image_format().map_or("directory", ImageFormat::as_str)
    }

    /// The kind that the attribute of a PersistentVolume names; those of directories have none.
    ///
    /// # Errors
    /// [`InvalidKind`].
    pub fn from_attribute(value: Option<&str>) -> Result<Self, InvalidKind> {
        value.map_or(Ok(Self::Directory), str::parse)
    }

    /// The `volumeMode` of its PersistentVolume: `Block` or `Filesystem`.
    pub fn volume_mode(self) -> &'static str {
        match self {
            Self::Image(ImageFormat::Block) => "Block",
            _ => "Filesystem",
        }
    }
}

impl ImageFormat {
    /// All formats.
    pub const ALL: [Self; 3] = [Self::Block, Self::Ext4, Self::Xfs];

    /// The word in PersistentVolumes and on the disk.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// The file system in the file, as mount(8) and `csi.fsType` name it; `None` for a block device.
    pub fn fs_type(self) -> Option<&'static str> {
        match self {
            Self::Block => None,
            format => Some(format.as_str()),
        }
    }

    /// The size of the smallest volume: an ext4 with a journal, and the smallest XFS that mkfs.xfs makes.
    pub fn min_size(self) -> Bytes {
        match self {
            Self::Block => Bytes(1),
            Self::Ext4 => Bytes(8 << 20),
            Self::Xfs => Bytes(300 << 20),
        }
    }
}

/// By how much a size or limit in force may exceed the one that was set: file systems round up to their blocks, quotas to
/// KiB, and images to 4 KiB ([`file_size`]).
pub(crate) const MAX_ROUNDING: u64 = 64 << 10;

/// The size of the file of a volume of this size: whole blocks.
pub(crate) fn file_size(size: Bytes) -> Bytes {
    Bytes(size.0.max(1).div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES))
}

/// Bytes that a file of this size occupies at most, once nothing is being written.
pub(crate) fn promised_bytes(file_size: Bytes) -> Bytes {
    let extents = (file_size.0 / EXTENT_PART).saturating_add(FIXED_BYTES);
    Bytes(file_size.0.saturating_add(extents))
}

/// The limits of the directory of a file of this size. The size limits what a pod writes; these only show that nothing
/// else is in the directory, and must never make a write of a pod fail.
pub(crate) fn directory_limits(file_size: Bytes) -> QuotaLimits {
    let copies = file_size.0.min(COPY_BYTES);
    QuotaLimits { bytes: Some(Bytes(promised_bytes(file_size).0.saturating_add(copies))), inodes: None }
}

/// Returns whether these limits of the directory of a file of this size are those that were set.
pub(crate) fn has_directory_limits(file_size: Bytes, limits: QuotaLimits) -> bool {
    let wanted = directory_limits(file_size).bytes.unwrap_or_default();
    let is_right = |bytes: Bytes| bytes >= wanted && bytes.0 - wanted.0 <= MAX_ROUNDING;
    limits.inodes.is_none() && limits.bytes.is_some_and(is_right)
}

impl From<ImageFormat> for VolumeKind {
    fn from(format: ImageFormat) -> Self {
        Self::Image(format)
    }
}

impl FromStr for VolumeKind {
    type Err = InvalidKind;

    fn from_str(word: &str) -> Result<Self, InvalidKind> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == word).ok_or(InvalidKind)
    }
}

impl FromStr for ImageFormat {
    type Err = InvalidKind;

    fn from_str(word: &str) -> Result<Self, InvalidKind> {
        Self::ALL.into_iter().find(|format| format.as_str() == word).ok_or(InvalidKind)
    }
}

impl fmt::Display for VolumeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_its_word() {
        for kind in VolumeKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(kind));
            assert_eq!(kind.to_string(), kind.as_str());
            assert_eq!(VolumeKind::from_attribute(Some(kind.as_str())), Ok(kind));
        }
        for format in ImageFormat::ALL {
            assert_eq!(format.as_str().parse(), Ok(format));
            assert_eq!(format.fs_type().is_none(), VolumeKind::from(format).volume_mode() == "Block");
        }
        assert_eq!(VolumeKind::from_attribute(None), Ok(VolumeKind::Directory));
        for bad in ["", "Block", "ext3", "block\n"] {
            assert_eq!(bad.parse::<VolumeKind>(), Err(InvalidKind), "{bad:?}");
            assert_eq!(VolumeKind::from_attribute(Some(bad)), Err(InvalidKind), "{bad:?}");
        }
        assert_eq!("directory".parse::<ImageFormat>(), Err(InvalidKind));
    }

    #[test]
    fn a_file_has_whole_blocks_and_is_promised_more_than_its_size() {
        let sizes = [0, 1, 4096, 4097, u64::MAX].map(|bytes| file_size(Bytes(bytes)).0);
        assert_eq!(sizes, [4096, 4096, 4096, 8192, u64::MAX]);
        for bytes in [4096, 1 << 30, 1 << 50, u64::MAX] {
            let promised = promised_bytes(Bytes(bytes));
            assert!(promised.0 >= bytes && directory_limits(Bytes(bytes)).bytes >= Some(promised));
            assert!(promised.0 - bytes <= bytes / 128 + (1 << 20));
        }
    }

    #[test]
    fn the_directory_of_a_file_has_exactly_its_limits_but_for_rounding() {
        let size = Bytes(1 << 30);
        let wanted = directory_limits(size).bytes.expect("limited").0;
        let has = |bytes, inodes| has_directory_limits(size, QuotaLimits { bytes, inodes });
        for (bytes, expected) in [
            (wanted, true),
            (wanted + MAX_ROUNDING, true),
            (wanted - 1, false),
            (wanted + MAX_ROUNDING + 1, false),
        ] {
            assert_eq!(has(Some(Bytes(bytes)), None), expected, "{bytes}");
        }
        assert!(!has(None, None) && !has(Some(Bytes(wanted)), Some(nodekeel_fsquota::Inodes(9))));
    }
}
