use proptest::prelude::*;

use super::super::probe::{VolumeContents, probe_disk};
use super::*;

/// A disk of zeros with some bytes, which may be larger than the memory.
struct SparseDisk {
    size: u64,
    part: (u64, Vec<u8>),
    position: u64,
    /// The number of bytes read.
    read_bytes: u64,
}

impl SparseDisk {
    fn new(size: u64, offset: u64, bytes: &[u8]) -> SparseDisk {
        SparseDisk { size, part: (offset, bytes.to_vec()), position: 0, read_bytes: 0 }
    }
}

impl Read for SparseDisk {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = (buffer.len() as u64).min(self.size - self.position);
        let buffer = &mut buffer[..count as usize];
        buffer.fill(0);
        let (start, bytes) = &self.part;
        for (at, byte) in (*start..).zip(bytes) {
            if let Some(target) = at.checked_sub(self.position).and_then(|at| buffer.get_mut(at as usize)) {
                *target = *byte;
            }
        }
        self.position += count;
        self.read_bytes += count;
        Ok(count as usize)
    }
}

impl Seek for SparseDisk {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.position = match to {
            SeekFrom::Start(at) => at,
            SeekFrom::End(at) => self.size.saturating_add_signed(at),
            SeekFrom::Current(at) => self.position.saturating_add_signed(at),
        };
        Ok(self.position)
    }
}

/// The only signature of a disk of this size with these bytes.
fn only_signature(size: u64, offset: u64, bytes: &[u8]) -> (&'static str, u64) {
    match probe_disk(&mut SparseDisk::new(size, offset, bytes)).unwrap() {
        VolumeContents::Occupied { found, .. } if found.len() == 1 => (found[0].name, found[0].offset),
        other => panic!("{bytes:?} at {offset} of {size}: {other:?}"),
    }
}

#[test]
fn a_lone_copy_of_a_header_is_found_by_its_name() {
    const LUKS: &[u8] = b"SKUL\xba\xbe";
    const EXT: &[u8] = b"\x53\xef";
    let largest_group = (1 << 40) - 4 * KIB;
    for (name, size, offset, magic) in [
        ("luks", 64 * MIB, 16 * KIB, LUKS),
        ("luks", 64 * MIB, MIB, LUKS),
        ("luks", 64 * MIB, 2 * MIB, LUKS),
        ("luks", 64 * MIB, 4 * MIB, LUKS),
        // Block group 1 of each block size, then others.
        ("ext", 64 * MIB, 8 * MIB + KIB + 56, EXT),
        ("ext", 64 * MIB, 32 * MIB + 56, EXT),
        ("ext", GIB, 128 * MIB + 56, EXT),
        ("ext", GIB, 512 * MIB + 56, EXT),
        ("ext", 3 * GIB, 2 * GIB + 56, EXT),
        ("ext", 64 * GIB, 32 * GIB + 56, EXT),
        ("ext", GIB, 7 * 128 * MIB + 56, EXT),
        ("ext", 100 * GIB + 512, 343 * 128 * MIB + 56, EXT),
        ("ext", 100 * GIB + 2 * MIB, 800 * 128 * MIB + 56, EXT),
        // The second of 4, 16 and 12 allocation groups, and one of the largest size.
        ("xfs", GIB, 256 * MIB, b"XFSB"),
        ("xfs", 10 * GIB + 20 * KIB, (10 * GIB + 20 * KIB) / (16 * KIB) * 4 * KIB + 4 * KIB, b"XFSB"),
        ("xfs", 16 * GIB, GIB, b"XFSB"),
        ("xfs", 48 * GIB, 4 * GIB, b"XFSB"),
        ("xfs", 20 << 40, 7 * largest_group, b"XFSB"),
        ("btrfs", GIB, 64 * MIB + 64, b"_BHRfS_M"),
        ("btrfs", 300 * GIB, 256 * GIB + 64, b"_BHRfS_M"),
        ("ocfs2", 20 * GIB, 16 * GIB, b"OCFSV2"),
        ("ceph_bluestore", 200 * GIB, 100 * GIB, b"bluestore block device"),
        ("bcachefs", GIB, MIB + 4 * KIB + 24, COPY_SIGNATURES[5].2),
    ] {
        assert_eq!(only_signature(size, offset, magic), (name, offset), "{size}");
    }
}

#[test]
fn unknown_bytes_at_one_of_the_places_are_data() {
    for size in [64 * MIB, 100 * GIB + 512, 16 << 40] {
        for place in [1, 7, 2047, 4094] {
            let at = size / SAMPLE_COUNT * place / BLOCK_BYTES * BLOCK_BYTES + 3000;
            assert_eq!(only_signature(size, at, b"x"), (DiskSignature::DATA, at), "{size}");
        }
    }
}

#[test]
fn a_disk_of_zeros_shows_no_data_after_few_reads_whatever_its_size() {
    for size in [2 * MIB, 2 * MIB + 512, 64 * MIB + 512, GIB, 3 * GIB + 1536, 100 << 40, i64::MAX as u64] {
        let mut disk = SparseDisk::new(size, 0, b"");
        assert!(matches!(probe_disk(&mut disk).unwrap(), VolumeContents::Unread { .. }), "{size}");
        assert!(disk.read_bytes <= 24 * MIB, "{} bytes of {size} were read", disk.read_bytes);
    }
}

#[test]
fn a_small_disk_is_read_completely() {
    let size = 5 * MIB + 1024;
    for at in (0..size).step_by(4096 * 19 + 511) {
        assert_eq!(only_signature(size, at, b"x"), (DiskSignature::DATA, at));
    }
}

proptest! {
    #[test]
    fn data_longer_than_the_distance_of_two_places_is_found(
        size in 64 * MIB..1 << 44,
        start in 0.0..0.9_f64,
    ) {
        let start = (size as f64 * start) as u64;
        let distance = size / SAMPLE_COUNT + 2 * BLOCK_BYTES;
        let is_within = |offset: &u64| *offset >= start && offset + BLOCK_BYTES <= start + distance;
        prop_assert!(sample_offsets(size).iter().any(is_within));
    }

    #[test]
    fn all_places_are_blocks_of_the_disk(size in 2 * MIB..=i64::MAX as u64) {
        for offset in copy_offsets(size).into_iter().chain(sample_offsets(size)) {
            prop_assert!(offset < size && offset % BLOCK_BYTES == 0);
        }
    }
}
