//! The mode of the top directory of a new ext4: mke2fs can't set it before version 1.47.1.
//!
//! *Source:* Linux, "ext4 Data Structures and Algorithms": the super block, the group descriptors, inodes, checksums.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// The permissions of the top directory: containers run as any user.
const ROOT_PERMISSIONS: u16 = 0o777;

/// Offset of the super block, in bytes.
const SUPER_BLOCK: u64 = 1024;

/// The number of the top directory's inode, `EXT4_ROOT_INO`.
const ROOT_INODE: u32 = 2;

/// `EXT4_FEATURE_INCOMPAT_64BIT`.
const WIDE_DESCRIPTORS: u32 = 0x80;

/// Gives the top directory of an ext4 that is not mounted the permissions 0777.
pub(super) fn open_root(image: &File) -> io::Result<()> {
    let layout = RootLayout::read(image)?;
    let mut inode = vec![0; layout.inode_bytes];
    image.read_exact_at(&mut inode, layout.offset)?;
    // The upper bits are the type of the inode, which stays a directory.
    let mode = (u16_at(&inode, 0)? & !0o7777) | ROOT_PERMISSIONS;
    put(&mut inode, 0, mode)?;
    // With `metadata_csum`, the kernel rejects an inode with a wrong checksum.
    layout.seal(&mut inode)?;
    image.write_all_at(&inode, layout.offset)
}

/// Location of the top directory's inode.
struct RootLayout {
    offset: u64,
    inode_bytes: usize,
    /// Seed of the checksums of the file system.
    uuid: Vec<u8>,
}

impl RootLayout {
    fn read(image: &File) -> io::Result<Self> {
        let mut super_block = vec![0; 1024];
        image.read_exact_at(&mut super_block, SUPER_BLOCK)?;
        // `s_log_block_size`, `s_inode_size`, `s_uuid`; below, `s_first_data_block` and `s_feature_incompat`.
        let block_bytes = 1024_u64.checked_shl(u32_at(&super_block, 0x18)?).ok_or_else(invalid)?;
        let inode_bytes = usize::from(u16_at(&super_block, 0x58)?);
        let uuid = super_block.get(0x68..0x78).ok_or_else(invalid)?.to_vec();
        // The group descriptors follow the block of the super block.
        let table = u64::from(u32_at(&super_block, 0x14)?).saturating_add(1).saturating_mul(block_bytes);
        let mut descriptor = vec![0; 64];
        image.read_exact_at(&mut descriptor, table)?;
        // `bg_inode_table_hi`, which only descriptors of 64 bytes have, and `bg_inode_table_lo`.
        let high = match u32_at(&super_block, 0x60)? & WIDE_DESCRIPTORS {
            0 => 0,
            _ => u64::from(u32_at(&descriptor, 0x28)?),
        };
        let first = (high << 32) | u64::from(u32_at(&descriptor, 0x8)?);
        let inodes = first.saturating_mul(block_bytes);
        let offset = inodes.saturating_add(inode_bytes as u64 * u64::from(ROOT_INODE - 1));
        Ok(Self { offset, inode_bytes, uuid })
    }

    /// Writes the checksum of the inode into it.
    fn seal(&self, inode: &mut [u8]) -> io::Result<()> {
        const LOW: usize = 0x7c;
        const HIGH: usize = 0x82;
        // Both halves count as zero in the sum itself.
        put(inode, LOW, 0)?;
        put(inode, HIGH, 0)?;
        let generation = inode.get(0x64..0x68).ok_or_else(invalid)?;
        let seed = [self.uuid.as_slice(), &ROOT_INODE.to_le_bytes(), generation].concat();
        let sum = crc32c(crc32c(u32::MAX, &seed), inode);
        put(inode, LOW, (sum & 0xffff) as u16)?;
        put(inode, HIGH, (sum >> 16) as u16)
    }
}

fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> io::Result<[u8; N]> {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).ok_or_else(invalid)
}

fn u16_at(bytes: &[u8], at: usize) -> io::Result<u16> {
    bytes_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> io::Result<u32> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

fn put(bytes: &mut [u8], at: usize, value: u16) -> io::Result<()> {
    bytes.get_mut(at..at + 2).ok_or_else(invalid)?.copy_from_slice(&value.to_le_bytes());
    Ok(())
}

/// CRC-32C without the final complement, as ext4 has it.
fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(seed, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0x82f6_3b78 & (sum & 1).wrapping_neg()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// *Source:* RFC 3720, B.4, "CRC Examples", complemented.
    #[test]
    fn the_checksum_is_crc32c() {
        assert_eq!(!crc32c(u32::MAX, &[0; 32]), 0x8a91_36aa);
        assert_eq!(!crc32c(u32::MAX, &[0xff; 32]), 0x62a8_ab43);
        assert_eq!(!crc32c(u32::MAX, b"123456789"), 0xe306_9283);
    }

    #[test]
    fn what_is_not_an_ext4_is_an_error() {
        for bytes in [0_u8, 0xff] {
            let file = tempfile::tempfile().expect("a file");
            file.write_all_at(&[bytes; 8192], 0).expect("written");
            open_root(&file).expect_err("no inode");
        }
    }
}
