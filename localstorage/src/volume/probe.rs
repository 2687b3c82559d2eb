//! The contents of a disk, derived only from its bytes. Only this module decides whether a disk may be
//! formatted.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};

use super::claim::{DiskClaim, SECTOR_BYTES, claim_offset, xfs_fingerprint};
use super::places;
use super::signatures::{
    End, MD_RAID_MAGIC, SIGNATURES, SWAP_PAGE_BYTES, SWAP_SIGNATURES, Start, ZFS_UBERBLOCKS,
};

/// The bytes read at each end. Every signature in the table lies within.
const WINDOW_BYTES: u64 = 1 << 20;

const BLOCK_BYTES: usize = places::BLOCK_BYTES as usize;

/// The block around a signature that its fingerprint covers: it contains the UUIDs and times of superblocks
/// and headers.
const FINGERPRINT_BLOCK_BYTES: u64 = 4096;

/// The smallest disk to probe. mkfs.xfs cannot format a smaller one anyway.
const MIN_DISK_BYTES: u64 = 2 * WINDOW_BYTES;

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

    /// Whether it is unknown data.
    fn is_data(&self) -> bool {
        self.name == Self::DATA
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
    /// The claim of an interrupted format by this crate, and no data written since: as far as the disk was blank
    /// when it was claimed, only what that format writes is in the places that [`Blank`](Self::Blank) names.
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
    pub(super) fn signatures(&self) -> &[DiskSignature] {
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
    let mut found = ends.find_signatures();
    if let Some(claim) = ends.claim()
        && found.iter().all(|signature| signature.is_data() || claim.names(signature))
    {
        let Some(foreign) = find_foreign_data(disk, &ends, claim, readahead)? else {
            return Ok(VolumeContents::Interrupted);
        };
        found.retain(|signature| !signature.is_data());
        found.push(foreign);
        return Ok(VolumeContents::Occupied { found });
    }
    match found.first() {
        // The ends alone prove nothing: they may have been overwritten, and the rest can be recovered.
        None => Ok(match places::find_hidden_data(disk, ends.size, |_, _| false, readahead)? {
            Some(signature) => VolumeContents::Occupied { found: vec![signature] },
            None => VolumeContents::Blank,
        }),
        Some(first) if first.is_xfs() && !ends.xfs_in_progress() => {
            Ok(VolumeContents::Xfs { label: ends.xfs_label(), found })
        }
        Some(_) => Ok(VolumeContents::Occupied { found }),
    }
}

/// The first data, in the places that prove a disk blank, that the format of a claim has not written. None if
/// the claim erases contents: their data remains while one file system replaces the other.
fn find_foreign_data(
    disk: &mut (impl Read + Seek),
    ends: &DiskEnds,
    claim: DiskClaim<'_>,
    readahead: impl Fn(&[u64]),
) -> io::Result<Option<DiskSignature>> {
    if !claim.erases_nothing() {
        return Ok(None);
    }
    match ends.find_unexplained(claim) {
        Some(data) => Ok(Some(data)),
        None => places::find_hidden_data(disk, ends.size, |_, block| claim.explains_block(block), readahead),
    }
}

/// Whether a disk has the claim with this UUID, and nothing else but what the claim names, a LUKS header, and data
/// before an offset: what an interrupted format as LUKS leaves. Whose header it is, the caller has to check. As with a
/// file system, the claim of contents to be erased also covers data without a signature.
#[cfg(feature = "luks")]
pub(crate) fn has_only_claimed_data(
    disk: &mut (impl Read + Seek),
    uuid: super::uuid::Uuid,
    end: u64,
    readahead: impl Fn(&[u64]),
) -> io::Result<bool> {
    let ends = DiskEnds::read(disk)?;
    let Some(claim) = ends.claim().filter(|claim| claim.uuid() == Some(uuid)) else {
        return Ok(false);
    };
    let is_ours = |found: &DiskSignature| {
        let is_header = found.name == "luks" && matches!(found.offset, 0 | 0x4000);
        found.is_data() || is_header || claim.names(found)
    };
    if !ends.find_signatures().iter().all(is_ours) {
        return Ok(false);
    }
    if !claim.erases_nothing() {
        return Ok(true);
    }
    let is_blank = |(offset, block): (u64, &[u8])| {
        let claim_bytes = if offset == claim_offset(ends.size) { SECTOR_BYTES } else { 0 };
        offset < end || block[claim_bytes..].iter().all(|byte| *byte == 0)
    };
    let hidden = places::find_hidden_data(disk, ends.size, |offset, _| offset < end, readahead)?;
    Ok(hidden.is_none() && numbered_blocks(ends.tail_start, &ends.tail).all(is_blank))
}

/// Whether a disk has the contents that it had before it was claimed, apart from the claim.
pub(crate) fn is_unchanged_but_for_claim(
    disk: &mut (impl Read + Seek),
    before: &VolumeContents,
    readahead: impl Fn(&[u64]),
) -> io::Result<bool> {
    let ends = DiskEnds::read(disk)?;
    let mut found = ends.find_signatures();
    if found.is_empty() {
        found.extend(places::find_hidden_data(disk, ends.size, |_, _| false, readahead)?);
    }
    Ok(found == before.signatures())
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
    /// The offset of the tail, which starts with a whole block.
    tail_start: u64,
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
        let mut window = |start: u64, end: u64| {
            let mut bytes = vec![0; (end - start) as usize];
            disk.seek(SeekFrom::Start(start))?;
            disk.read_exact(&mut bytes)?;
            Ok::<_, io::Error>(bytes)
        };
        let tail_start = (size - WINDOW_BYTES) / places::BLOCK_BYTES * places::BLOCK_BYTES;
        Ok(DiskEnds { head: window(0, WINDOW_BYTES)?, tail: window(tail_start, size)?, tail_start, size })
    }

    fn claim(&self) -> Option<DiskClaim<'_>> {
        DiskClaim::parse(self.tail_at(claim_offset(self.size), SECTOR_BYTES)?)
    }

    /// The first data that the format of the claim has not written.
    fn find_unexplained(&self, claim: DiskClaim<'_>) -> Option<DiskSignature> {
        let unexplained = |(offset, block): (u64, &[u8])| {
            let claim_bytes = if offset == claim_offset(self.size) { SECTOR_BYTES } else { 0 };
            let first = block[claim_bytes..].iter().position(|byte| *byte != 0)?;
            (!claim.explains_block(block)).then_some(offset + (claim_bytes + first) as u64)
        };
        let offset = numbered_blocks(0, &self.head)
            .chain(numbered_blocks(self.tail_start, &self.tail))
            .find_map(unexplained)?;
        Some(self.new_signature(DiskSignature::DATA, offset))
    }

    /// Bytes by their offset on the disk; none if they are not entirely within the last MiB.
    fn tail_at(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.tail_start)?).ok()?;
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

    /// The checksum of the 4 KiB block that contains an offset, without the sector of a claim. In the tail, a
    /// block counts from the last MiB.
    fn fingerprint_at(&self, offset: u64) -> u32 {
        let last_window = self.size - WINDOW_BYTES;
        let (window, start, base) = match offset {
            _ if offset < WINDOW_BYTES => (&self.head, 0, 0),
            _ if offset < last_window => (&self.tail, self.tail_start, self.tail_start),
            _ => (&self.tail, self.tail_start, last_window),
        };
        let from = base + (offset - base) / FINGERPRINT_BLOCK_BYTES * FINGERPRINT_BLOCK_BYTES;
        let claim = claim_offset(self.size)..claim_offset(self.size) + SECTOR_BYTES as u64;
        let block = window.iter().skip((from - start) as usize).take(FINGERPRINT_BLOCK_BYTES as usize);
        let kept: Vec<u8> =
            (from..).zip(block).filter(|(at, _)| !claim.contains(at)).map(|(_, byte)| *byte).collect();
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
        found.sort_by_key(|signature| (signature.offset, signature.is_data(), signature.name));
        found.dedup();
        if found.iter().any(|signature| !signature.is_data()) {
            found.retain(|signature| !signature.is_data());
        }
        found
    }

    /// The first byte other than zero, outside the sector of a claim.
    fn find_data(&self) -> Option<u64> {
        let first = |bytes: &[u8]| bytes.iter().position(|byte| *byte != 0);
        if let Some(at) = first(&self.head) {
            return Some(at as u64);
        }
        let claim = (claim_offset(self.size) - self.tail_start) as usize;
        let (before, rest) = self.tail.split_at(claim);
        let (sector, behind) = rest.split_at(SECTOR_BYTES);
        let sector = if DiskClaim::parse(sector).is_some() { &[] } else { sector };
        let parts = [(0, before), (claim, sector), (claim + SECTOR_BYTES, behind)];
        parts.iter().find_map(|(at, part)| Some(self.tail_start + (at + first(part)?) as u64))
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

/// The blocks of 4 KiB of a window, with their offsets on the disk.
fn numbered_blocks(start: u64, window: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    (start..).step_by(BLOCK_BYTES).zip(window.chunks(BLOCK_BYTES))
}

#[cfg(test)]
#[path = "probe_test.rs"]
mod tests;
