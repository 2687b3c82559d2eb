//! File systems in files, mounted from loop devices.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nodekeel_localstorage::mount::MountEntry;
use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen,
};

use super::ImageFormat;
use super::loops::LoopDevice;
use super::sys;

/// Offset of the super block of an ext4, and how much of it is read, in bytes.
const EXT4_SUPERBLOCK: u64 = 1024;
const EXT4_SUPERBLOCK_BYTES: usize = 1024;

/// The smallest last allocation group of an XFS, in blocks. *Source:* `XFS_MIN_AG_BLOCKS` in Linux
/// `fs/xfs/libxfs/xfs_fs.h`.
const XFS_MIN_GROUP_BLOCKS: u64 = 64;

/// The most that is read of the kernel's log of a mount, in lines.
const MAX_LOG_LINES: usize = 16;

/// A mount of the file system of a device that nothing but its holder sees. Dropping it unmounts it, unless it was
/// moved to a target.
#[derive(Debug)]
pub(crate) struct DetachedMount {
    mount: OwnedFd,
    format: ImageFormat,
}

/// Mounts the file system of a device without restrictions; no process can see it. If the file system is mounted
/// already, this is one more mount of it.
///
/// # Errors
/// The kernel's error, with its log.
pub(crate) fn mount_device(device: &LoopDevice, format: ImageFormat) -> io::Result<DetachedMount> {
    let fs_type = format.fs_type().ok_or(io::ErrorKind::InvalidInput)?;
    let context = fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC)?;
    let mount = || {
        fsconfig_set_string(context.as_fd(), "source", device.path())?;
        // Files that are deleted in it free space of the volume's directory.
        fsconfig_set_flag(context.as_fd(), "discard")?;
        match format {
            // A restored snapshot has the UUID of its source.
            ImageFormat::Xfs => fsconfig_set_flag(context.as_fd(), "nouuid")?,
            // By default, ext4 goes on after errors, and can damage more.
            _ => fsconfig_set_string(context.as_fd(), "errors", "remount-ro")?,
        }
        fsconfig_create(context.as_fd())?;
        fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
    };
    match mount() {
        Ok(mount) => Ok(DetachedMount { mount, format }),
        Err(errno) => {
            // The error number rarely names the cause. The kernel writes that into the log of the context:
            // fsopen(2).
            let (error, log) = (io::Error::from(errno), read_log(&context));
            Err(io::Error::new(
                error.kind(),
                format!("mount the {fs_type} of {}: {error}{log}", device.path().display()),
            ))
        }
    }
}

/// One more mount of a device's file system, if it is mounted in this mount namespace.
///
/// # Errors
/// The kernel's error.
pub(super) fn mount_again(device: &LoopDevice, all: &[MountEntry]) -> io::Result<Option<DetachedMount>> {
    let mounted = all.iter().find(|mount| device.is_source_of(mount));
    let format = mounted.and_then(|mount| mount.info.fstype.parse::<ImageFormat>().ok());
    format.map(|format| mount_device(device, format)).transpose()
}

impl DetachedMount {
    /// Grows the file system to the size of its device. Nothing happens if it has that size.
    ///
    /// # Errors
    /// The kernel's error, such as `EPERM` without `CAP_SYS_RESOURCE`.
    pub(crate) fn grow_to(&self, device: &LoopDevice) -> io::Result<()> {
        let (bytes, root) = (device.size()?, self.open_root()?);
        match self.format {
            ImageFormat::Ext4 => {
                let size = Ext4Size::read_from(device.as_fd())?;
                let blocks = size.blocks_in(bytes);
                if blocks > size.blocks { sys::resize_ext4(root.as_fd(), blocks) } else { Ok(()) }
            }
            ImageFormat::Xfs => {
                let geometry = sys::xfs_geometry(root.as_fd())?;
                let blocks =
                    usable_xfs_blocks(bytes / u64::from(geometry.block_size.max(1)), geometry.group_blocks);
                if blocks > geometry.data_blocks {
                    sys::grow_xfs(root.as_fd(), blocks, geometry.inode_percent)
                } else {
                    Ok(())
                }
            }
            ImageFormat::Block => Ok(()),
        }
    }

    /// Writes the cache of the file system into its device.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(self.open_root()?)?)
    }

    fn open_root(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.mount, c".", flags, Mode::empty())?)
    }
}

impl AsFd for DetachedMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

impl From<DetachedMount> for OwnedFd {
    fn from(mount: DetachedMount) -> Self {
        mount.mount
    }
}

/// The size of an ext4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ext4Size {
    blocks: u64,
    block_size: u64,
}

impl Ext4Size {
    /// Reads it through the cache of the device, which the file system writes it into.
    fn read_from(device: BorrowedFd<'_>) -> io::Result<Self> {
        let mut superblock = [0; EXT4_SUPERBLOCK_BYTES];
        let read = rustix::io::pread(device, &mut superblock, EXT4_SUPERBLOCK)?;
        match read {
            EXT4_SUPERBLOCK_BYTES => Ok(Self::parse(&superblock)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// *Source:* `struct ext4_super_block` in Linux `fs/ext4/ext4.h`: `s_blocks_count_lo` at 0x4, `s_log_block_size` at
    /// 0x18, `s_feature_incompat` at 0x60, `s_blocks_count_hi` at 0x150.
    fn parse(superblock: &[u8; EXT4_SUPERBLOCK_BYTES]) -> Self {
        const HAS_64_BITS: u32 = 0x80;
        let number = |at: usize| {
            superblock[at..at + 4].iter().rev().fold(0_u32, |number, byte| number << 8 | u32::from(*byte))
        };
        let high = if number(0x60) & HAS_64_BITS == 0 { 0 } else { number(0x150) };
        Self {
            blocks: u64::from(high) << 32 | u64::from(number(0x4)),
            block_size: 1024_u64.checked_shl(number(0x18)).unwrap_or(0),
        }
    }

    /// Number of blocks of a device of this size; none if the size of a block is not known.
    fn blocks_in(self, bytes: u64) -> u64 {
        bytes.checked_div(self.block_size).unwrap_or(0)
    }
}

/// Number of these blocks that an XFS can use: a last allocation group that is too small is left out.
fn usable_xfs_blocks(blocks: u64, group_blocks: u32) -> u64 {
    let last = blocks.checked_rem(group_blocks.into()).unwrap_or(0);
    if last < XFS_MIN_GROUP_BLOCKS { blocks - last } else { blocks }
}

/// The kernel's log of a failed mount, in parentheses.
fn read_log(context: &OwnedFd) -> String {
    let mut lines = Vec::new();
    let mut line = [0; 1024];
    while lines.len() < MAX_LOG_LINES
        && let Ok(length) = rustix::io::read(context, &mut line)
    {
        let text = String::from_utf8_lossy(line.get(..length).unwrap_or_default()).trim().to_owned();
        // Each line has its level first: `e` for an error.
        lines.push(text.split_once(' ').map_or(text.clone(), |(_, rest)| rest.to_owned()));
    }
    if lines.is_empty() { String::new() } else { format!(" ({})", lines.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_size_of_an_ext4_is_read_from_its_superblock() {
        let mut superblock = [0; EXT4_SUPERBLOCK_BYTES];
        superblock[0x4..0x8].copy_from_slice(&4096_u32.to_le_bytes());
        superblock[0x18..0x1c].copy_from_slice(&2_u32.to_le_bytes());
        superblock[0x150..0x154].copy_from_slice(&1_u32.to_le_bytes());
        let small = Ext4Size::parse(&superblock);
        assert_eq!(small, Ext4Size { blocks: 4096, block_size: 4096 });
        assert_eq!(small.blocks_in((16 << 20) + 4095), 4096);
        superblock[0x60] = 0x80;
        assert_eq!(Ext4Size::parse(&superblock).blocks, (1 << 32) + 4096);
    }

    #[test]
    fn an_xfs_grows_only_by_what_it_can_use() {
        assert_eq!(usable_xfs_blocks(76_800, 19_200), 76_800);
        assert_eq!(usable_xfs_blocks(76_800 + 63, 19_200), 76_800);
        assert_eq!(usable_xfs_blocks(76_800 + 64, 19_200), 76_864);
        assert_eq!(usable_xfs_blocks(100, 0), 100);
    }

    proptest! {
        #[test]
        fn any_superblock_has_a_size(bytes in proptest::collection::vec(any::<u8>(), EXT4_SUPERBLOCK_BYTES), size: u64) {
            let superblock = <[u8; EXT4_SUPERBLOCK_BYTES]>::try_from(bytes).expect("1024 bytes");
            prop_assert!(Ext4Size::parse(&superblock).blocks_in(size) <= size);
        }
    }
}
