//! The two ends of a disk, and the signatures in them.

use std::io::{self, Read, Seek, SeekFrom};

use super::claim::{DiskClaim, SECTOR_BYTES, claim_line, claim_offset, xfs_fingerprint};
use super::digest::{ContentsDigest, DigestScope};
use super::places;
use super::probe::DiskSignature;
use super::signatures::{
    End, MD_RAID_MAGIC, SIGNATURES, SWAP_PAGE_BYTES, SWAP_SIGNATURES, Start, ZFS_UBERBLOCKS,
};

/// The bytes read at each end. Every signature in the table is within.
pub(super) const WINDOW_BYTES: u64 = 1 << 20;

const BLOCK_BYTES: usize = places::BLOCK_BYTES as usize;

/// The block around a signature that its fingerprint covers: it contains the UUIDs and times of superblocks
/// and headers.
const FINGERPRINT_BLOCK_BYTES: u64 = 4096;

/// The smallest disk to probe. mkfs.xfs cannot format a smaller one anyway.
const MIN_DISK_BYTES: u64 = 2 * WINDOW_BYTES;

/// The first and the last MiB of a disk.
pub(super) struct DiskEnds {
    pub(super) size: u64,
    head: Vec<u8>,
    tail: Vec<u8>,
    /// The offset of the tail, which starts with a whole block.
    tail_start: u64,
}

impl DiskEnds {
    pub(super) fn read(disk: &mut (impl Read + Seek)) -> io::Result<DiskEnds> {
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

    /// The digest of both ends, and of what a probe has found, also elsewhere.
    pub(super) fn sampled_digest(&self, found: &[DiskSignature]) -> ContentsDigest {
        let found: Vec<_> = found.iter().map(claim_line).collect();
        ContentsDigest::new(DigestScope::Sampled, &[&self.head, &self.tail, found.join("\n").as_bytes()])
    }

    pub(super) fn claim(&self) -> Option<DiskClaim<'_>> {
        DiskClaim::parse(self.tail_at(claim_offset(self.size), SECTOR_BYTES)?)
    }

    /// The first data that the format of the claim has not written.
    pub(super) fn find_unexplained(&self, claim: DiskClaim<'_>) -> Option<DiskSignature> {
        let unexplained = |(offset, block): (u64, &[u8])| {
            // The claim is the first sector of its block, and is no data.
            let claim_bytes = if offset == claim_offset(self.size) { SECTOR_BYTES } else { 0 };
            let first = block[claim_bytes..].iter().position(|byte| *byte != 0)?;
            (!claim.explains_block(block)).then_some(offset + (claim_bytes + first) as u64)
        };
        let offset = numbered_blocks(0, &self.head)
            .chain(numbered_blocks(self.tail_start, &self.tail))
            .find_map(unexplained)?;
        Some(self.new_signature(DiskSignature::DATA, offset))
    }

    /// Returns whether the tail has nothing but a claim in the blocks from this offset on.
    #[cfg(feature = "luks")]
    pub(super) fn is_tail_blank_from(&self, end: u64) -> bool {
        let is_blank = |(offset, block): (u64, &[u8])| {
            let claim_bytes = if offset == claim_offset(self.size) { SECTOR_BYTES } else { 0 };
            offset < end || block[claim_bytes..].iter().all(|byte| *byte == 0)
        };
        numbered_blocks(self.tail_start, &self.tail).all(is_blank)
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
        let [fingerprint, sector] = match (name, offset) {
            // Each mount changes the superblock: its UUID and its label stay.
            ("xfs", 0) => [xfs_fingerprint(&self.head[32..48], &self.head[108..120]); 2],
            _ => [FINGERPRINT_BLOCK_BYTES, SECTOR_BYTES as u64]
                .map(|unit| crc32c::crc32c(&self.unit_at(offset, unit))),
        };
        DiskSignature { name, offset, fingerprint, sector }
    }

    /// Returns whether a claim covers a signature: unknown data, or what the claim names. Around a signature to be
    /// erased, the interrupted format may have written or cleared the other sectors of the block: its own is as it
    /// was.
    pub(super) fn is_claimed(&self, claim: DiskClaim, signature: &DiskSignature) -> bool {
        let is_remainder = || {
            let block = self.unit_at(signature.offset, FINGERPRINT_BLOCK_BYTES);
            let written = block.chunks(SECTOR_BYTES).filter(|sector| sector.iter().any(|byte| *byte != 0));
            // Its own sector is all that is left of the old block, or mkfs.xfs has written the others.
            written.count() == 1 || claim.explains_block(&block)
        };
        signature.is_data() || claim.names(signature) || claim.names_sector(signature) && is_remainder()
    }

    /// The unit of this size that contains an offset, without the sector of a claim. In the tail, units count from the
    /// last MiB.
    fn unit_at(&self, offset: u64, unit: u64) -> Vec<u8> {
        let last_window = self.size - WINDOW_BYTES;
        let (window, start, base) = match offset {
            _ if offset < WINDOW_BYTES => (&self.head, 0, 0),
            _ if offset < last_window => (&self.tail, self.tail_start, self.tail_start),
            _ => (&self.tail, self.tail_start, last_window),
        };
        let from = base + (offset - base) / unit * unit;
        let claim = claim_offset(self.size)..claim_offset(self.size) + SECTOR_BYTES as u64;
        let bytes = window.iter().skip((from - start) as usize).take(unit as usize);
        (from..).zip(bytes).filter(|(at, _)| !claim.contains(at)).map(|(_, byte)| *byte).collect()
    }

    /// All signatures in the order of offsets, without duplicates.
    pub(super) fn find_signatures(&self) -> Vec<DiskSignature> {
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

    /// Version 1.0 is 8 to 12 KiB before the end, version 0.90 64 to 128 KiB. *Source:* Linux `md.c`,
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
    pub(super) fn xfs_in_progress(&self) -> bool {
        self.head[126] != 0
    }

    /// `sb_fname`, 12 bytes padded with zeros.
    pub(super) fn xfs_label(&self) -> String {
        let label = &self.head[108..120];
        let end = label.iter().position(|byte| *byte == 0).unwrap_or(label.len());
        String::from_utf8_lossy(&label[..end]).into_owned()
    }
}

/// The blocks of 4 KiB of a window, with their offsets on the disk.
fn numbered_blocks(start: u64, window: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    (start..).step_by(BLOCK_BYTES).zip(window.chunks(BLOCK_BYTES))
}
