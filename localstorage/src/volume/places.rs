//! The places within a disk at which data shows after its ends were overwritten.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::RangeInclusive;

use super::claim::{DiskClaim, SECTOR_BYTES, claim_offset};
use super::probe::DiskSignature;

/// The bytes read at each place, at a multiple of them.
pub(super) const BLOCK_BYTES: u64 = 4096;

/// The number of evenly distributed blocks: a disk that is filled to 0.1 % at random shows data in one of them
/// with a probability of 98 %.
const SAMPLE_COUNT: u64 = 4096;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The number of equal parts into which a file system may have divided the disk, each with a header.
/// mkfs.xfs makes four allocation groups, or up to 32 on an array, or one for each processor.
const PART_COUNTS: RangeInclusive<u64> = 2..=128;

/// The number of allocation groups of the largest size to look at.
const MAX_GROUPS: usize = 64;

/// Copies of superblocks: name, offset of the magic bytes in the copy, the magic bytes. *Source:* as those of
/// the primary ones.
const COPY_SIGNATURES: &[(&str, usize, &[u8])] = &[
    ("xfs", 0, b"XFSB"),
    ("luks", 0, b"SKUL\xba\xbe"),
    ("btrfs", 64, b"_BHRfS_M"),
    ("ocfs2", 0, b"OCFSV2"),
    ("ceph_bluestore", 0, b"bluestore block device"),
    ("bcachefs", 24, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("ext", 56, b"\x53\xef"),
    // Of blocks of 1 KiB: the copy is the second block of the group.
    ("ext", 1024 + 56, b"\x53\xef"),
];

/// The first copy of a header, or else the first data, at the places of copies, and then of the sample. A claim
/// and blocks that are explained, by their offset and content, do not count.
pub(super) fn find_hidden_data(
    disk: &mut (impl Read + Seek),
    size: u64,
    is_explained: impl Fn(u64, &[u8]) -> bool,
    readahead: impl Fn(&[u64]),
) -> io::Result<Option<DiskSignature>> {
    // Copies of headers first: they show to which file system the data belongs.
    for offsets in [copy_offsets(size), sample_offsets(size)] {
        readahead(&offsets);
        let mut data = None;
        for offset in offsets {
            let mut block = [0; BLOCK_BYTES as usize];
            let block = &mut block[..BLOCK_BYTES.min(size - offset) as usize];
            disk.seek(SeekFrom::Start(offset))?;
            disk.read_exact(block)?;
            if offset == claim_offset(size) && DiskClaim::parse(&block[..SECTOR_BYTES]).is_some() {
                block[..SECTOR_BYTES].fill(0);
            }
            let Some(found) = identify_block(offset, block).filter(|_| !is_explained(offset, block)) else {
                continue;
            };
            if found.name != DiskSignature::DATA {
                return Ok(Some(found));
            }
            // Unknown data is the answer only if no header follows.
            data = data.or(Some(found));
        }
        if data.is_some() {
            return Ok(data);
        }
    }
    Ok(None)
}

/// None for zeros.
pub(super) fn identify_block(offset: u64, block: &[u8]) -> Option<DiskSignature> {
    let first = block.iter().position(|byte| *byte != 0)?;
    let copy = COPY_SIGNATURES
        .iter()
        .find(|(_, at, magic)| block.get(*at..).is_some_and(|bytes| bytes.starts_with(magic)));
    let (name, at) = copy.map_or((DiskSignature::DATA, first), |(name, at, _)| (*name, *at));
    let sector = block.chunks(SECTOR_BYTES).nth(at / SECTOR_BYTES).map_or(0, crc32c::crc32c);
    Some(DiskSignature { name, offset: offset + at as u64, fingerprint: crc32c::crc32c(block), sector })
}

/// The blocks at which file systems and encrypted devices of this size keep copies of their headers, beyond
/// the ends of the disk.
fn copy_offsets(size: u64) -> Vec<u64> {
    let mut offsets = Vec::new();
    // LUKS2: the second header has the size of the first, 16 KiB to 4 MiB; those of XFS with allocation groups
    // of such a size, and of ocfs2 (1 GiB, times four each).
    offsets.extend((0..u64::BITS).map(|shift| 1 << shift));
    // btrfs: 64 MiB and 256 GiB, powers of two. bcachefs: after the first superblock, of 1 MiB.
    offsets.push(MIB + 4 * KIB);
    // Ceph's BlueStore.
    offsets.extend([10 * GIB, 100 * GIB, 1000 * GIB]);
    ext_offsets(size, &mut offsets);
    xfs_offsets(size, &mut offsets);
    to_blocks(offsets, size)
}

/// ext2 to ext4: in block groups 1, the powers of 3, 5 and 7, and (`sparse_super2`) the last, of as many blocks as
/// a block has bits. *Source:* Linux `Documentation/filesystems/ext4/blockgroup.rst`.
fn ext_offsets(size: u64, offsets: &mut Vec<u64>) {
    for block_bytes in (10..=16).map(|shift| 1_u64 << shift) {
        let group_bytes = 8 * block_bytes * block_bytes;
        let groups = size / group_bytes;
        let powers = [3_u64, 5, 7].into_iter().flat_map(|base| {
            std::iter::successors(Some(1), move |power: &u64| power.checked_mul(base))
                .take_while(|power| *power <= groups)
        });
        let last = [groups, groups.saturating_sub(1)];
        offsets.extend(powers.chain(last).map(|group| group * group_bytes));
    }
}

/// XFS: at the start of each allocation group. The groups divide the disk into equal parts, of at most 1 TiB
/// less one block. *Source:* xfsprogs `calc_default_ag_geometry`.
fn xfs_offsets(size: u64, offsets: &mut Vec<u64>) {
    for block_bytes in [512, KIB, 4 * KIB, 64 * KIB] {
        let blocks = size / block_bytes;
        offsets.extend(PART_COUNTS.map(|count| blocks.div_ceil(count) * block_bytes));
        let largest = (1 << 40) - block_bytes;
        offsets.extend((1..=size / largest).take(MAX_GROUPS).map(|group| group * largest));
    }
}

/// The blocks of the sample, at even distances.
fn sample_offsets(size: u64) -> Vec<u64> {
    let offsets = (0..SAMPLE_COUNT)
        .map(|place| (u128::from(size) * u128::from(place) / u128::from(SAMPLE_COUNT)) as u64);
    to_blocks(offsets.collect(), size)
}

/// The blocks that contain these offsets, in their order on the disk.
fn to_blocks(mut offsets: Vec<u64>, size: u64) -> Vec<u64> {
    offsets.retain(|offset| *offset < size);
    offsets.iter_mut().for_each(|offset| *offset = *offset / BLOCK_BYTES * BLOCK_BYTES);
    offsets.sort_unstable();
    offsets.dedup();
    offsets
}

#[cfg(test)]
#[path = "places_test.rs"]
mod tests;
