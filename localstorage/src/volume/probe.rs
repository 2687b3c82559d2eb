//! The contents of a disk, derived only from its bytes. Only this module decides whether a disk may be
//! formatted.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};
use std::iter;

use super::places;
use super::uuid::Uuid;

/// The bytes read at each end. Every signature in the table lies within.
const WINDOW_BYTES: u64 = 1 << 20;

/// The block around a signature that its fingerprint covers: it contains the UUIDs and times of superblocks
/// and headers.
const FINGERPRINT_BLOCK_BYTES: u64 = 4096;

/// The smallest disk to probe. mkfs.xfs cannot format a smaller one anyway.
const MIN_DISK_BYTES: u64 = 2 * WINDOW_BYTES;

/// The offset of the claim from the end of the disk. It is inside the last MiB, which is always read, and
/// outside the 128 KiB at each end that mkfs.xfs wipes.
const CLAIM_FROM_END: u64 = 512 << 10;

/// The start of a claim. One line follows for the file system to be created, and one for each signature to be
/// erased.
const CLAIM_HEADER: &str = "nodekeel data volume, format 1: being formatted\n";

/// A claim has one sector, which a disk writes completely or not at all.
pub(crate) const SECTOR_BYTES: usize = 512;

/// The prefix of the UUID of the file system to be created, in the second line of a claim.
const CLAIM_UUID_PREFIX: &str = "as ";

/// Encodes a claim: the sector that marks an unfinished format by this crate.
///
/// Only the end of that format wipes it. So it names the signatures to be erased and the file system to be
/// created: any other signature was written to the disk since and must be kept, even if it is of the same
/// kind. A line that does not fit is omitted, and its signature is not covered.
pub(crate) fn encode_claim(uuid: Uuid, label: &str, erased: &VolumeContents) -> [u8; SECTOR_BYTES] {
    let mut text = format!("{CLAIM_HEADER}{CLAIM_UUID_PREFIX}{uuid}\n");
    let created =
        DiskSignature { name: "xfs", offset: 0, fingerprint: xfs_fingerprint(&uuid.0, label.as_bytes()) };
    for signature in iter::once(&created).chain(erased.signatures()) {
        let line = signature.claim_line();
        if text.len() + line.len() < SECTOR_BYTES {
            text.extend([&line, "\n"]);
        }
    }
    let mut sector = [0; SECTOR_BYTES];
    sector[..text.len()].copy_from_slice(text.as_bytes());
    sector
}

/// Whether a sector is a claim.
pub(crate) fn is_claim(sector: &[u8]) -> bool {
    sector.starts_with(CLAIM_HEADER.as_bytes())
}

/// The UUID that a claim names.
pub(crate) fn parse_claim_uuid(sector: &[u8]) -> Option<Uuid> {
    let text = std::str::from_utf8(sector.strip_prefix(CLAIM_HEADER.as_bytes())?).ok()?;
    text.lines().next()?.strip_prefix(CLAIM_UUID_PREFIX)?.parse().ok()
}

/// The fingerprint of an XFS, which mounting does not change.
fn xfs_fingerprint(uuid: &[u8], label: &[u8]) -> u32 {
    let end = label.iter().position(|byte| *byte == 0).unwrap_or(label.len());
    crc32c::crc32c_append(crc32c::crc32c(uuid), &label[..end])
}

/// The offset of the claim on a disk of this size.
pub(crate) fn claim_offset(size: u64) -> u64 {
    size.saturating_sub(CLAIM_FROM_END) / 4096 * 4096
}

/// One signature found on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskSignature {
    /// The type of the signature, as in blkid where it has a name; `data` for unknown bytes.
    pub name: &'static str,
    /// The offset from the start of the disk, in bytes.
    pub offset: u64,
    /// Distinguishes it from other signatures of its type: a CRC-32C of the 4 KiB that contain it; for an
    /// XFS, whose superblock changes with each mount, of its UUID and its label.
    pub fingerprint: u32,
}

impl DiskSignature {
    /// The name for unknown data: bytes other than zero, found where a blank disk has none.
    pub const DATA: &'static str = "data";

    fn is_xfs(&self) -> bool {
        self.name == "xfs" && self.offset == 0
    }

    /// Its line in a claim.
    fn claim_line(&self) -> String {
        format!("{self}, {:08x}", self.fingerprint)
    }
}

impl fmt::Display for DiskSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.name, self.offset)
    }
}

/// The contents of a disk or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VolumeContents {
    /// Nothing but zeros in the first and the last MiB, where file systems, partition tables and encrypted
    /// devices keep copies of their headers, and in 4 KiB at each of 4,096 even places.
    Blank,
    /// The claim of an interrupted format by this crate, and no data written since.
    Interrupted,
    /// An XFS whose superblock is complete, with its label.
    Xfs {
        /// The label, without its zero padding; invalid UTF-8 is replaced.
        label: String,
        /// All signatures found, in the order of their offsets.
        found: Vec<DiskSignature>,
    },
    /// Not a disk but a directory with files.
    Files {
        /// The number of entries, including directories.
        entries: usize,
    },
    /// Other contents: never formatted without consent.
    Occupied {
        /// All signatures found, in the order of their offsets; never empty.
        found: Vec<DiskSignature>,
    },
}

impl VolumeContents {
    fn signatures(&self) -> &[DiskSignature] {
        match self {
            VolumeContents::Xfs { found, .. } | VolumeContents::Occupied { found } => found,
            _ => &[],
        }
    }
}

impl fmt::Display for VolumeContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VolumeContents::Blank => f.write_str("nothing"),
            VolumeContents::Interrupted => f.write_str("an interrupted format"),
            VolumeContents::Xfs { label, .. } => write!(f, "an XFS labelled {label:?}"),
            VolumeContents::Files { entries } => write!(f, "{entries} files"),
            VolumeContents::Occupied { found } => {
                let all: Vec<_> = found.iter().map(DiskSignature::to_string).collect();
                f.write_str(&all.join(", "))
            }
        }
    }
}

/// Whether a signature counts from the start of the disk or from its end.
enum OffsetBase {
    Start,
    End,
}
use OffsetBase::{End, Start};

/// Name, base and distance of the offset, bytes. *Source:* util-linux `libblkid/src/superblocks`, the file
/// systems' own headers.
const SIGNATURES: &[(&str, OffsetBase, u64, &[u8])] = &[
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
const SWAP_PAGE_BYTES: [u64; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
const SWAP_SIGNATURES: &[(&str, &[u8])] = &[
    ("swap", b"SWAPSPACE2"),
    ("swap", b"SWAP-SPACE"),
    ("swsuspend", b"S1SUSPEND\0"),
    ("swsuspend", b"S2SUSPEND\0"),
    ("swsuspend", b"LINHIB0001"),
];

/// A uberblock of ZFS in either byte order; four labels at the ends of the disk contain up to 128 of them
/// each.
const ZFS_UBERBLOCKS: [&[u8]; 2] = [b"\x0c\xb1\xba\0\0\0\0\0", b"\0\0\0\0\0\xba\xb1\x0c"];

/// The magic of a Linux software RAID, which may lie near the end of a member.
const MD_RAID_MAGIC: &[u8] = b"\xfc\x4e\x2b\xa9";

/// Probes the contents of a disk or disk image. It reads the first and the last MiB and, if both are zero, up
/// to 20 MiB more: a second or less on a solid-state disk.
///
/// # Errors
/// Errors of reading; [`io::ErrorKind::InvalidInput`] for a disk of less than 2 MiB. An unreadable disk is
/// never reported as blank.
pub fn probe_disk(disk: &mut (impl Read + Seek)) -> io::Result<VolumeContents> {
    probe_with_readahead(disk, |_| {})
}

/// Like [`probe_disk`], with a function that is given the offsets of blocks before they are read.
pub(crate) fn probe_with_readahead(
    disk: &mut (impl Read + Seek),
    readahead: impl Fn(&[u64]),
) -> io::Result<VolumeContents> {
    let ends = DiskEnds::read(disk)?;
    let found = ends.find_signatures();
    let found = match found.first() {
        None => VolumeContents::Blank,
        Some(first) if first.is_xfs() && !ends.xfs_in_progress() => {
            VolumeContents::Xfs { label: ends.xfs_label(), found }
        }
        Some(_) => VolumeContents::Occupied { found },
    };
    if ends.claim_explains(&found) {
        return Ok(VolumeContents::Interrupted);
    }
    match found {
        // The ends alone prove nothing: they may have been overwritten, and the rest can be recovered.
        VolumeContents::Blank => Ok(match places::find_hidden_data(disk, ends.size, readahead)? {
            Some(signature) => VolumeContents::Occupied { found: vec![signature] },
            None => VolumeContents::Blank,
        }),
        found => Ok(found),
    }
}

/// Whether a disk is [`VolumeContents::Blank`], apart from a claim.
pub(crate) fn is_blank_but_for_claim(
    disk: &mut (impl Read + Seek),
    readahead: impl Fn(&[u64]),
) -> io::Result<bool> {
    let ends = DiskEnds::read(disk)?;
    Ok(ends.find_signatures().is_empty() && places::find_hidden_data(disk, ends.size, readahead)?.is_none())
}

/// Checks that probing never panics, and that only zeros are reported as blank.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_disk_image(bytes: &[u8]) {
    // Arbitrary bytes at the start, at the end and all over; short ones are padded.
    for (at, size) in [
        (0, 2 * WINDOW_BYTES),
        (2 * WINDOW_BYTES, 2 * WINDOW_BYTES + bytes.len() as u64),
        (0, bytes.len() as u64),
    ] {
        let mut image = vec![0; size as usize];
        let start = (at as usize).min(image.len());
        let len = bytes.len().min(image.len() - start);
        image[start..start + len].copy_from_slice(&bytes[..len]);
        if let Ok(VolumeContents::Blank) = probe_disk(&mut io::Cursor::new(&image)) {
            let (head, tail) =
                (&image[..WINDOW_BYTES as usize], &image[image.len() - WINDOW_BYTES as usize..]);
            assert!([head, tail].concat().iter().all(|byte| *byte == 0), "a disk with data is not blank");
        }
    }
}

/// The first and the last MiB of a disk.
struct DiskEnds {
    size: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl DiskEnds {
    fn read(disk: &mut (impl Read + Seek)) -> io::Result<DiskEnds> {
        let size = disk.seek(SeekFrom::End(0))?;
        if size < MIN_DISK_BYTES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("disk of {size} bytes is too small"),
            ));
        }
        let mut window = |at: u64| {
            let mut bytes = vec![0; WINDOW_BYTES as usize];
            disk.seek(SeekFrom::Start(at))?;
            disk.read_exact(&mut bytes)?;
            Ok::<_, io::Error>(bytes)
        };
        Ok(DiskEnds { head: window(0)?, tail: window(size - WINDOW_BYTES)?, size })
    }

    /// Whether there is a claim that explains all signatures: those that it names, an incomplete file system,
    /// and unknown bytes, which remain while one file system replaces the other.
    fn claim_explains(&self, found: &VolumeContents) -> bool {
        let claim = self.tail_at(claim_offset(self.size), SECTOR_BYTES).filter(|sector| is_claim(sector));
        let Some(claim) = claim.and_then(|sector| std::str::from_utf8(sector).ok()) else { return false };
        let names = |line: String| claim.trim_end_matches('\0').lines().any(|named| named == line);
        found.signatures().iter().all(|signature| {
            signature.name == DiskSignature::DATA
                || signature.is_xfs() && self.xfs_in_progress()
                || names(signature.claim_line())
        })
    }

    /// Bytes by their offset on the disk; none if they are not entirely within the last MiB.
    fn tail_at(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.size - WINDOW_BYTES)?).ok()?;
        self.tail.get(start..start.checked_add(len)?)
    }

    fn head_at(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.head.get(start..start.checked_add(len)?)
    }

    fn new_signature(&self, name: &'static str, offset: u64) -> DiskSignature {
        let mark = match (name, offset) {
            ("xfs", 0) => xfs_fingerprint(&self.head[32..48], &self.head[108..120]),
            _ => self.fingerprint_at(offset),
        };
        DiskSignature { name, offset, fingerprint: mark }
    }

    /// The checksum of the 4 KiB block that contains an offset, without the sector of a claim.
    fn fingerprint_at(&self, offset: u64) -> u32 {
        let (window, start) =
            if offset < WINDOW_BYTES { (&self.head, 0) } else { (&self.tail, self.size - WINDOW_BYTES) };
        let from = (offset - start) / FINGERPRINT_BLOCK_BYTES * FINGERPRINT_BLOCK_BYTES;
        let claim = claim_offset(self.size)..claim_offset(self.size) + SECTOR_BYTES as u64;
        let block =
            (start + from..).zip(window.iter().skip(from as usize).take(FINGERPRINT_BLOCK_BYTES as usize));
        let kept: Vec<u8> = block.filter(|(at, _)| !claim.contains(at)).map(|(_, byte)| *byte).collect();
        crc32c::crc32c(&kept)
    }

    /// All signatures in the order of offsets, without duplicates.
    fn find_signatures(&self) -> Vec<DiskSignature> {
        let mut found = Vec::new();
        self.find_table_signatures(&mut found);
        self.find_swap(&mut found);
        self.find_trailing_raid(&mut found);
        self.find_zfs(&mut found);
        found.extend(self.find_data().map(|offset| self.new_signature(DiskSignature::DATA, offset)));
        // `data` sorts after other names of the same offset: it names a disk only without other signatures.
        found.sort_by_key(|signature| {
            (signature.offset, signature.name == DiskSignature::DATA, signature.name)
        });
        found.dedup();
        if found.iter().any(|signature| signature.name != DiskSignature::DATA) {
            found.retain(|signature| signature.name != DiskSignature::DATA);
        }
        found
    }

    /// The first byte other than zero, outside the sector of a claim.
    fn find_data(&self) -> Option<u64> {
        let first = |bytes: &[u8]| bytes.iter().position(|byte| *byte != 0);
        if let Some(at) = first(&self.head) {
            return Some(at as u64);
        }
        let start = self.size - WINDOW_BYTES;
        let claim = (claim_offset(self.size) - start) as usize;
        let (before, rest) = self.tail.split_at(claim);
        let (sector, behind) = rest.split_at(SECTOR_BYTES);
        let sector = if is_claim(sector) { &[] } else { sector };
        let parts = [(0, before), (claim, sector), (claim + SECTOR_BYTES, behind)];
        parts.iter().find_map(|(at, part)| Some(start + (at + first(part)?) as u64))
    }

    fn find_table_signatures(&self, found: &mut Vec<DiskSignature>) {
        for (name, from, distance, magic) in SIGNATURES {
            let (offset, bytes) = match from {
                Start => (*distance, self.head_at(*distance, magic.len())),
                End => (self.size - distance, self.tail_at(self.size - distance, magic.len())),
            };
            if bytes == Some(*magic) {
                found.push(self.new_signature(name, offset));
            }
        }
    }

    fn find_swap(&self, found: &mut Vec<DiskSignature>) {
        for offset in SWAP_PAGE_BYTES.map(|page| page - 10) {
            let bytes = self.head_at(offset, 10);
            found.extend(
                SWAP_SIGNATURES
                    .iter()
                    .filter(|(_, magic)| bytes == Some(*magic))
                    .map(|(name, _)| self.new_signature(name, offset)),
            );
        }
    }

    /// Version 1.0 lies 8 to 12 KiB, version 0.90 64 to 128 KiB before the end. *Source:* Linux `md.c`,
    /// `super_1_load` and `calc_dev_sboffset`.
    fn find_trailing_raid(&self, found: &mut Vec<DiskSignature>) {
        let sectors = self.size / 512;
        let newer = (sectors - 16) / 8 * 8 * 512;
        let older = self.size / (64 << 10) * (64 << 10) - (64 << 10);
        for offset in [newer, older] {
            if self.tail_at(offset, MD_RAID_MAGIC.len()) == Some(MD_RAID_MAGIC) {
                found.push(self.new_signature("linux_raid_member", offset));
            }
        }
    }

    /// A ring of uberblocks fills the second half of each 256 KiB label: one is enough.
    fn find_zfs(&self, found: &mut Vec<DiskSignature>) {
        let last = self.size / (256 << 10) * (256 << 10) - (512 << 10);
        let labels = [0, 256 << 10, last, last + (256 << 10)];
        for label in labels {
            let ring = (0..128).map(|slot| label + (128 << 10) + slot * 1024);
            let first = ring.into_iter().find(|offset| {
                let bytes = self.head_at(*offset, 8).or_else(|| self.tail_at(*offset, 8));
                ZFS_UBERBLOCKS.iter().any(|magic| bytes == Some(*magic))
            });
            found.extend(first.map(|offset| self.new_signature("zfs_member", offset)));
        }
    }

    /// `sb_inprogress`: mkfs.xfs clears it last of all. *Source:* Linux `xfs_format.h`, `struct xfs_dsb`.
    fn xfs_in_progress(&self) -> bool {
        self.head[126] != 0
    }

    /// `sb_fname`, 12 bytes padded with zeros.
    fn xfs_label(&self) -> String {
        let label = &self.head[108..120];
        let end = label.iter().position(|byte| *byte == 0).unwrap_or(label.len());
        String::from_utf8_lossy(&label[..end]).into_owned()
    }
}

#[cfg(test)]
#[path = "probe_test.rs"]
mod tests;
