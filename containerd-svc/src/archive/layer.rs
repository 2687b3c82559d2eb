//! The space that a layer takes on a disk once it is unpacked.

use std::io::Read;

use super::error::ArchiveError;
use super::tar::{RawEntry, TarReader};
use crate::{DiskUsage, ImportLimits};

/// The unit in which most file systems allocate space to a file.
const BLOCK_BYTES: u64 = 4096;

/// An inode where they are not allocated in advance (512 bytes on XFS), and an entry of a directory (up to 263 bytes on
/// ext4).
const ENTRY_BYTES: u64 = 1024;

/// The longest target of a symbolic link that an inode of ext4 holds itself.
const INLINE_LINK_BYTES: usize = 59;

/// Reads a layer, compressed or not, for an upper bound of what its files take; stops as soon as that exceeds `room`, and
/// returns what it has counted until then.
pub(crate) fn measure_layer(
    layer: impl Read,
    limits: &ImportLimits,
    room: DiskUsage,
) -> Result<DiskUsage, ArchiveError> {
    // The room bounds both.
    let limits = ImportLimits { archive_bytes: u64::MAX, entries: u32::MAX, ..limits.clone() };
    let mut tar = TarReader::open(layer, &limits)?;
    let (mut usage, mut previous) = (DiskUsage::default(), Vec::new());
    // The header of a file has its size: a file that does not fit is not read.
    while usage.fits_into(room)
        && let Some(entry) = tar.next_raw_entry()?
    {
        usage = usage + entry_usage(&entry, count_new_directories(&previous, &entry.name));
        previous = entry.name;
    }
    Ok(usage)
}

/// What an entry takes, with this many directories above it that have no entry before it.
fn entry_usage(entry: &RawEntry, directories: u64) -> DiskUsage {
    let blocks = |bytes: u64| bytes.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(bytes);
    let content = match entry.kind {
        b'5' => BLOCK_BYTES,
        b'2' if entry.link.len() > INLINE_LINK_BYTES => BLOCK_BYTES,
        _ => blocks(entry.size),
    };
    let bytes = [ENTRY_BYTES, blocks(entry.attribute_bytes), directories * (ENTRY_BYTES + BLOCK_BYTES)];
    DiskUsage {
        bytes: bytes.into_iter().fold(content, u64::saturating_add),
        // A hard link is another name of an inode.
        inodes: directories + u64::from(entry.kind != b'1'),
    }
}

/// The most directories that may have to be created for an entry, because none of the entries before it has: those that the
/// previous one did not need.
fn count_new_directories(previous: &[u8], name: &[u8]) -> u64 {
    let parts = |name| <[u8]>::split(name, |byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
    let shared = parts(previous).zip(parts(name)).take_while(|(a, b)| a == b).count();
    parts(name).count().saturating_sub(1).saturating_sub(shared) as u64
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const ROOM: DiskUsage = DiskUsage { bytes: u64::MAX, inodes: u64::MAX };

    fn layer(entries: &[(&str, tar::EntryType, u64)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, size) in entries {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_size(*size);
            header.set_mode(0o644);
            let content = std::io::repeat(0).take(*size);
            match kind {
                tar::EntryType::Link => builder.append_link(&mut header, name, "a/1").expect("added"),
                _ => builder.append_data(&mut header, name, content).expect("added"),
            }
        }
        builder.into_inner().expect("a tar")
    }

    fn measure(bytes: &[u8], room: DiskUsage) -> DiskUsage {
        measure_layer(bytes, &ImportLimits::default(), room).expect("a tar")
    }

    #[test]
    fn files_count_in_blocks_and_each_entry_but_a_hard_link_as_an_inode() {
        use tar::EntryType::{Directory, Link, Regular};
        let bytes = layer(&[
            ("a/", Directory, 0),
            ("a/1", Regular, 1),
            ("a/2", Regular, 4097),
            ("a/3", Link, 0),
            // Two directories without an entry.
            ("b/c/4", Regular, 0),
            ("b/c/5", Regular, 0),
        ]);
        let expected = DiskUsage { bytes: 8 * ENTRY_BYTES + 6 * BLOCK_BYTES, inodes: 7 };
        assert_eq!(measure(&bytes, ROOM), expected);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&bytes).expect("written");
        assert_eq!(measure(&gzip.finish().expect("written"), ROOM), expected);
        assert_eq!(measure(&zstd::encode_all(&bytes[..], 1).expect("written"), ROOM), expected);
    }

    #[test]
    fn counting_stops_where_a_layer_exceeds_the_room() {
        use tar::EntryType::Regular;
        let mut bytes = layer(&[("a", Regular, 1), ("b", Regular, 9 << 20), ("c", Regular, 1)]);
        // The content is not read to its end: what is missing of it is not missed.
        bytes.truncate(2 << 20);
        let room = DiskUsage { bytes: 1 << 20, ..ROOM };
        assert!(measure(&bytes, room).bytes > 9 << 20);
        let many: Vec<_> = (0..100).map(|number| format!("{number}")).collect();
        let entries: Vec<_> = many.iter().map(|name| (name.as_str(), Regular, 0)).collect();
        assert_eq!(measure(&layer(&entries), DiskUsage { inodes: 50, ..ROOM }).inodes, 51);
    }

    #[test]
    fn names_and_sizes_that_containerd_accepts_are_counted() {
        // An absolute name, and a directory that states a size, after which no content follows.
        let mut bytes = layer(&[("abc/", tar::EntryType::Directory, 0), ("x", tar::EntryType::Regular, 1)]);
        for (at, text) in [(0, &b"/usr\0"[..]), (124, b"00000007777")] {
            bytes[at..at + text.len()].copy_from_slice(text);
        }
        bytes[148..156].fill(b' ');
        let sum: u32 = bytes[..512].iter().map(|byte| u32::from(*byte)).sum();
        bytes[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        assert_eq!(measure(&bytes, ROOM).inodes, 2);
        assert!(measure_layer(&b"no tar at all"[..], &ImportLimits::default(), ROOM).is_err());
    }
}
