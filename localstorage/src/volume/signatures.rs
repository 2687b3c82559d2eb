//! The signatures of file systems, partition tables and encrypted devices.

/// The end of the disk from which the offset of a signature counts.
pub(super) enum OffsetBase {
    Start,
    End,
}
pub(super) use OffsetBase::{End, Start};

/// Name, base and distance of the offset, bytes. *Source:* util-linux `libblkid/src/superblocks`, the file
/// systems' own headers.
pub(super) const SIGNATURES: &[(&str, OffsetBase, u64, &[u8])] = &[
    ("xfs", Start, 0, b"XFSB"),
    ("xfs_log", Start, 0, b"\xfe\xed\xba\xbe"),
    ("ext", Start, 1080, b"\x53\xef"),
    ("btrfs", Start, 65_600, b"_BHRfS_M"),
    ("vfat", Start, 54, b"FAT12   "),
    ("vfat", Start, 54, b"FAT16   "),
    ("vfat", Start, 82, b"FAT32   "),
    ("exfat", Start, 3, b"EXFAT   "),
    ("ntfs", Start, 3, b"NTFS    "),
    ("refs", Start, 3, b"ReFS\0"),
    ("bitlocker", Start, 3, b"-FVE-FS-"),
    ("luks", Start, 0, b"LUKS\xba\xbe"),
    ("luks", Start, 0x4000, b"SKUL\xba\xbe"),
    ("luks", Start, 0x8000, b"SKUL\xba\xbe"),
    ("luks", Start, 0x1_0000, b"SKUL\xba\xbe"),
    ("luks", Start, 0x2_0000, b"SKUL\xba\xbe"),
    ("luks", Start, 0x4_0000, b"SKUL\xba\xbe"),
    ("luks", Start, 0x8_0000, b"SKUL\xba\xbe"),
    ("LVM2_member", Start, 0, b"LABELONE"),
    ("LVM2_member", Start, 512, b"LABELONE"),
    ("LVM2_member", Start, 1024, b"LABELONE"),
    ("LVM2_member", Start, 1536, b"LABELONE"),
    ("linux_raid_member", Start, 0, b"\xfc\x4e\x2b\xa9"),
    ("linux_raid_member", Start, 4096, b"\xfc\x4e\x2b\xa9"),
    ("gpt", Start, 512, b"EFI PART"),
    ("gpt", Start, 4096, b"EFI PART"),
    ("gpt", End, 512, b"EFI PART"),
    ("gpt", End, 4096, b"EFI PART"),
    ("mbr", Start, 510, b"\x55\xaa"),
    ("squashfs", Start, 0, b"hsqs"),
    ("squashfs", Start, 0, b"sqsh"),
    ("erofs", Start, 1024, b"\xe2\xe1\xf5\xe0"),
    ("f2fs", Start, 1024, b"\x10\x20\xf5\xf2"),
    ("nilfs2", Start, 1030, b"\x34\x34"),
    ("iso9660", Start, 32_769, b"CD001"),
    ("udf", Start, 32_769, b"BEA01"),
    ("bcachefs", Start, 4120, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("bcache", Start, 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("dm_integrity", Start, 0, b"integrt\0"),
    ("dm_verity", Start, 0, b"verity\0\0"),
    ("vdo", Start, 0, b"dmvdo001"),
    ("stratis", Start, 516, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("stratis", Start, 4612, b"!Stra0tis\x86\xff\x02^\x41rh"),
    ("ceph_bluestore", Start, 0, b"bluestore block device"),
    ("jfs", Start, 32_768, b"JFS1"),
    ("reiserfs", Start, 8244, b"ReIsEr"),
    ("reiserfs", Start, 65_588, b"ReIsEr"),
    ("reiser4", Start, 65_536, b"ReIsEr4"),
    ("gfs2", Start, 65_536, b"\x01\x16\x19\x70"),
    ("ocfs2", Start, 4096, b"OCFSV2"),
    ("ufs", Start, 9564, b"\x54\x19\x01\x00"),
    ("ufs", Start, 66_908, b"\x54\x19\x01\x00"),
    ("hfs", Start, 1024, b"BD"),
    ("hfsplus", Start, 1024, b"H+"),
    ("hfsplus", Start, 1024, b"HX"),
    ("apfs", Start, 32, b"NXSB"),
    ("minix", Start, 1040, b"\x7f\x13"),
    ("minix", Start, 1040, b"\x8f\x13"),
    ("minix", Start, 1040, b"\x68\x24"),
    ("minix", Start, 1040, b"\x78\x24"),
    ("minix", Start, 1048, b"\x5a\x4d"),
    ("cramfs", Start, 0, b"\x45\x3d\xcd\x28"),
    ("romfs", Start, 0, b"-rom1fs-"),
    ("isw_raid_member", End, 1024, b"Intel Raid ISM Cfg Sig. "),
    ("ddf_raid_member", End, 512, b"\xde\x11\xde\x11"),
    ("drbd", End, 4036, b"\x83\x74\x02\x6b"),
    ("drbd", End, 4036, b"\x83\x74\x02\x67"),
];

/// The page sizes of all architectures: a swap area has its signature ten bytes before the end of the first
/// page.
pub(super) const SWAP_PAGE_BYTES: [u64; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
pub(super) const SWAP_SIGNATURES: &[(&str, &[u8])] = &[
    ("swap", b"SWAPSPACE2"),
    ("swap", b"SWAP-SPACE"),
    ("swsuspend", b"S1SUSPEND\0"),
    ("swsuspend", b"S2SUSPEND\0"),
    ("swsuspend", b"LINHIB0001"),
];

/// A uberblock of ZFS in either byte order; four labels at the ends of the disk contain up to 128 of them
/// each.
pub(super) const ZFS_UBERBLOCKS: [&[u8]; 2] = [b"\x0c\xb1\xba\0\0\0\0\0", b"\0\0\0\0\0\xba\xb1\x0c"];

/// The magic of a Linux software RAID, which may be near the end of a member.
pub(super) const MD_RAID_MAGIC: &[u8] = b"\xfc\x4e\x2b\xa9";
