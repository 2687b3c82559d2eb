//! What a disk holds, told by its bytes alone: whether it may be formatted is decided here and nowhere else.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};
use std::iter;

use super::uuid::Uuid;

/// How much of either end is looked at. Every signature in the table lies within.
const WINDOW: u64 = 1 << 20;

/// Bytes at the start in which anything but zero counts as somebody's data.
const QUIET: usize = 64 << 10;

/// How much around a signature tells it from another of its kind: superblocks and headers have their UUIDs and times there.
const BLOCK: u64 = 4096;

/// Smallest disk that is considered at all; below it nothing can be formatted anyway.
const SMALLEST: u64 = 2 * WINDOW;

/// Offset of the claim from the end of the disk. It is inside the last MiB, which is always read, and clear of the 128 KiB
/// at either end that mkfs.xfs wipes.
const CLAIM_FROM_END: u64 = 512 << 10;

/// What a claim begins with. One line each follows for what was given up, and for the label to come.
const CLAIM_TEXT: &str = "nodekeel data volume, format 1: being formatted\n";

/// A claim has one sector, which a disk writes wholly or not at all.
pub(crate) const SECTOR: usize = 512;

/// What the UUID of the file system to come stands behind, in the second line of a claim.
const CLAIMED: &str = "as ";

/// The sector that says: what lies on this disk is a format of ours that did not end.
///
/// Nothing wipes it but the end of that format. So it names what was given up, and what is to come: whatever else is found
/// beside it has come to the disk since, and is somebody's, also where it is of the same kind. A line that doesn't fit is left
/// out, and what it names is never taken for given up.
pub(crate) fn claim(uuid: Uuid, label: &str, given_up: &Contents) -> [u8; SECTOR] {
    let mut text = format!("{CLAIM_TEXT}{CLAIMED}{uuid}\n");
    let to_come = Signature { name: "xfs", offset: 0, mark: xfs_mark(&uuid.0, label.as_bytes()) };
    for signature in iter::once(&to_come).chain(given_up.signatures()) {
        let line = signature.line();
        if text.len() + line.len() < SECTOR {
            text.extend([&line, "\n"]);
        }
    }
    let mut sector = [0; SECTOR];
    sector[..text.len()].copy_from_slice(text.as_bytes());
    sector
}

/// Whether a sector is a claim.
pub(crate) fn is_claim(sector: &[u8]) -> bool {
    sector.starts_with(CLAIM_TEXT.as_bytes())
}

/// The UUID that a claim names.
pub(crate) fn claimed(sector: &[u8]) -> Option<Uuid> {
    let text = std::str::from_utf8(sector.strip_prefix(CLAIM_TEXT.as_bytes())?).ok()?;
    text.lines().next()?.strip_prefix(CLAIMED)?.parse().ok()
}

/// What tells an XFS from every other, whatever a mount changes in it.
fn xfs_mark(uuid: &[u8], label: &[u8]) -> u32 {
    let end = label.iter().position(|byte| *byte == 0).unwrap_or(label.len());
    crc32c::crc32c_append(crc32c::crc32c(uuid), &label[..end])
}

/// One thing found on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signature {
    /// What it is a sign of, in the words of blkid where it has some; `data` for bytes that no table knows.
    pub name: &'static str,
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// What tells it from another of its kind: a CRC-32C of the 4 KiB that it is in; of an XFS, whose superblock each mount
    /// changes, of its UUID and its label.
    pub mark: u32,
}

impl Signature {
    /// The name of what no table knows: bytes other than zero near the start of the disk.
    pub const DATA: &'static str = "data";

    fn is_xfs(&self) -> bool {
        self.name == "xfs" && self.offset == 0
    }

    /// How a claim names it.
    fn line(&self) -> String {
        format!("{self}, {:08x}", self.mark)
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.name, self.offset)
    }
}

/// What a disk holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contents {
    /// No signature, and nothing but zeros in the first 64 KiB.
    Blank,
    /// The claim of a format of ours that was interrupted, and nothing that has come since: nobody's data is on it.
    Interrupted,
    /// An XFS whose superblock is complete, with its label.
    Xfs {
        /// The label, without the zeros it is padded with; what is no text in it is replaced.
        label: String,
        /// All signatures found, in the order of their offsets.
        found: Vec<Signature>,
    },
    /// Not a disk but a directory, with files in it.
    Files {
        /// How many entries, of which some may be directories.
        entries: usize,
    },
    /// Something else: never formatted unasked.
    Occupied {
        /// All signatures found, in the order of their offsets; never empty.
        found: Vec<Signature>,
    },
}

impl Contents {
    fn signatures(&self) -> &[Signature] {
        match self {
            Contents::Xfs { found, .. } | Contents::Occupied { found } => found,
            _ => &[],
        }
    }
}

impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Contents::Blank => f.write_str("nothing"),
            Contents::Interrupted => f.write_str("a format that was interrupted"),
            Contents::Xfs { label, .. } => write!(f, "an XFS labelled {label:?}"),
            Contents::Files { entries } => write!(f, "{entries} files"),
            Contents::Occupied { found } => {
                let all: Vec<_> = found.iter().map(Signature::to_string).collect();
                f.write_str(&all.join(", "))
            }
        }
    }
}

/// Whether a signature counts from the start of the disk or from its end.
enum From {
    Start,
    End,
}
use From::{End, Start};

/// Name, where, bytes. *Source:* util-linux `libblkid/src/superblocks`, the file systems' own headers.
const SIGNATURES: &[(&str, From, u64, &[u8])] = &[
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

/// Where swap areas are signed: ten bytes before the end of the first page, of any page size there is.
const PAGES: [u64; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
const SWAP: &[(&str, &[u8])] = &[
    ("swap", b"SWAPSPACE2"),
    ("swap", b"SWAP-SPACE"),
    ("swsuspend", b"S1SUSPEND\0"),
    ("swsuspend", b"S2SUSPEND\0"),
    ("swsuspend", b"LINHIB0001"),
];

/// A uberblock of ZFS in either byte order; four labels at the ends of the disk hold up to 128 of them each.
const UBERBLOCK: [&[u8]; 2] = [b"\x0c\xb1\xba\0\0\0\0\0", b"\0\0\0\0\0\xba\xb1\x0c"];

/// The magic of a Linux software RAID, which may lie near the end of a member.
const RAID: &[u8] = b"\xfc\x4e\x2b\xa9";

/// Tells what the disk (or the image of one) holds. It reads the first and the last MiB and nothing else.
///
/// # Errors
/// Those of reading; a disk of less than 2 MiB is [`io::ErrorKind::InvalidInput`]. What can't be read is never said to
/// be blank.
pub fn probe(disk: &mut (impl Read + Seek)) -> io::Result<Contents> {
    let ends = Ends::read(disk)?;
    let found = ends.signatures();
    let found = match found.first() {
        None => Contents::Blank,
        Some(first) if first.is_xfs() && !ends.xfs_in_progress() => {
            Contents::Xfs { label: ends.xfs_label(), found }
        }
        Some(_) => Contents::Occupied { found },
    };
    Ok(if ends.claim_covers(&found) { Contents::Interrupted } else { found })
}

/// What the ends of a disk may hold: never panics, and nothing but zeros is said to be blank.
///
/// # Panics
/// Where that isn't so.
#[cfg(any(test, feature = "testing"))]
pub fn disk_image(bytes: &[u8]) {
    // Arbitrary bytes at the start, at the end and all over; short ones are padded.
    for (at, size) in
        [(0, 2 * WINDOW), (2 * WINDOW, 2 * WINDOW + bytes.len() as u64), (0, bytes.len() as u64)]
    {
        let mut image = vec![0; size as usize];
        let start = (at as usize).min(image.len());
        let len = bytes.len().min(image.len() - start);
        image[start..start + len].copy_from_slice(&bytes[..len]);
        if let Ok(Contents::Blank) = probe(&mut io::Cursor::new(&image)) {
            assert!(image[..QUIET].iter().all(|byte| *byte == 0), "what holds data is not blank");
        }
    }
}

/// Where the claim lies on a disk of this size.
pub(crate) fn claim_offset(size: u64) -> u64 {
    size.saturating_sub(CLAIM_FROM_END) / 4096 * 4096
}

/// The first and the last MiB of a disk.
struct Ends {
    size: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl Ends {
    fn read(disk: &mut (impl Read + Seek)) -> io::Result<Ends> {
        let size = disk.seek(SeekFrom::End(0))?;
        if size < SMALLEST {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a disk of {size} bytes is too small"),
            ));
        }
        let mut window = |at: u64| {
            let mut bytes = vec![0; WINDOW as usize];
            disk.seek(SeekFrom::Start(at))?;
            disk.read_exact(&mut bytes)?;
            Ok::<_, io::Error>(bytes)
        };
        Ok(Ends { head: window(0)?, tail: window(size - WINDOW)?, size })
    }

    /// Whether there is a claim, and nothing that it doesn't explain: what it names, a file system that is not complete,
    /// and bytes of no known kind, which either leaves while the other takes its place.
    fn claim_covers(&self, found: &Contents) -> bool {
        let claim = self.tail_at(claim_offset(self.size), SECTOR).filter(|sector| is_claim(sector));
        let Some(claim) = claim.and_then(|sector| std::str::from_utf8(sector).ok()) else { return false };
        let names = |line: String| claim.trim_end_matches('\0').lines().any(|named| named == line);
        found.signatures().iter().all(|signature| {
            signature.name == Signature::DATA
                || signature.is_xfs() && self.xfs_in_progress()
                || names(signature.line())
        })
    }

    /// Bytes by their offset on the disk; none where they are not wholly within the last MiB.
    fn tail_at(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.size - WINDOW)?).ok()?;
        self.tail.get(start..start.checked_add(len)?)
    }

    fn head_at(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.head.get(start..start.checked_add(len)?)
    }

    fn signature(&self, name: &'static str, offset: u64) -> Signature {
        let mark = match (name, offset) {
            ("xfs", 0) => xfs_mark(&self.head[32..48], &self.head[108..120]),
            _ => self.mark(offset),
        };
        Signature { name, offset, mark }
    }

    /// The sum of the 4 KiB of its window that an offset is in, without the sector that a claim takes.
    fn mark(&self, offset: u64) -> u32 {
        let (window, start) =
            if offset < WINDOW { (&self.head, 0) } else { (&self.tail, self.size - WINDOW) };
        let from = (offset - start) / BLOCK * BLOCK;
        let claim = claim_offset(self.size)..claim_offset(self.size) + SECTOR as u64;
        let block = (start + from..).zip(window.iter().skip(from as usize).take(BLOCK as usize));
        let kept: Vec<u8> = block.filter(|(at, _)| !claim.contains(at)).map(|(_, byte)| *byte).collect();
        crc32c::crc32c(&kept)
    }

    /// All that is found, in the order of offsets, each once.
    fn signatures(&self) -> Vec<Signature> {
        let mut found = Vec::new();
        self.by_table(&mut found);
        self.swap(&mut found);
        self.raid_at_the_end(&mut found);
        self.zfs(&mut found);
        if let Some(at) = self.head[..QUIET].iter().position(|byte| *byte != 0) {
            found.push(self.signature(Signature::DATA, at as u64));
        }
        // `data` sorts before names of the same offset; it is the last thing to name a disk by.
        found.sort_by_key(|signature| (signature.offset, signature.name == Signature::DATA, signature.name));
        found.dedup();
        if found.iter().any(|signature| signature.name != Signature::DATA) {
            found.retain(|signature| signature.name != Signature::DATA);
        }
        found
    }

    fn by_table(&self, found: &mut Vec<Signature>) {
        for (name, from, distance, magic) in SIGNATURES {
            let (offset, bytes) = match from {
                Start => (*distance, self.head_at(*distance, magic.len())),
                End => (self.size - distance, self.tail_at(self.size - distance, magic.len())),
            };
            if bytes == Some(*magic) {
                found.push(self.signature(name, offset));
            }
        }
    }

    fn swap(&self, found: &mut Vec<Signature>) {
        for offset in PAGES.map(|page| page - 10) {
            let bytes = self.head_at(offset, 10);
            found.extend(
                SWAP.iter()
                    .filter(|(_, magic)| bytes == Some(*magic))
                    .map(|(name, _)| self.signature(name, offset)),
            );
        }
    }

    /// Version 1.0 lies 8 to 12 KiB, version 0.90 64 to 128 KiB before the end. *Source:* Linux `md.c`, `super_1_load`
    /// and `calc_dev_sboffset`.
    fn raid_at_the_end(&self, found: &mut Vec<Signature>) {
        let sectors = self.size / 512;
        let newer = (sectors - 16) / 8 * 8 * 512;
        let older = self.size / (64 << 10) * (64 << 10) - (64 << 10);
        for offset in [newer, older] {
            if self.tail_at(offset, RAID.len()) == Some(RAID) {
                found.push(self.signature("linux_raid_member", offset));
            }
        }
    }

    /// A ring of uberblocks fills the second half of each 256 KiB label: one is enough.
    fn zfs(&self, found: &mut Vec<Signature>) {
        let last = self.size / (256 << 10) * (256 << 10) - (512 << 10);
        let labels = [0, 256 << 10, last, last + (256 << 10)];
        for label in labels {
            let ring = (0..128).map(|slot| label + (128 << 10) + slot * 1024);
            let first = ring.into_iter().find(|offset| {
                let bytes = self.head_at(*offset, 8).or_else(|| self.tail_at(*offset, 8));
                UBERBLOCK.iter().any(|magic| bytes == Some(*magic))
            });
            found.extend(first.map(|offset| self.signature("zfs_member", offset)));
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
