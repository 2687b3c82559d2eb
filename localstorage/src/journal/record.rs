//! The form of a record.

use thiserror::Error;

/// The longest content of a record: 1 MiB. A step's state is a few names and numbers.
pub const MAX_CONTENT: usize = 1 << 20;

/// Magic, version, length, generation, checksum.
pub(super) const HEADER: usize = 28;
const MAGIC: &[u8; 8] = b"NKEELJNL";
const VERSION: u32 = 1;
/// Where the checksum is.
const CHECKSUM: std::ops::Range<usize> = 24..28;

/// A record as it is in a file; the [module](super) has its form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record<'a> {
    /// Grows by one with each record.
    pub generation: u64,
    /// What was committed.
    pub content: &'a [u8],
}

/// What is not a whole record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Torn {
    /// It ends before its end.
    #[error("it is cut short")]
    Short,
    /// It doesn't begin as a record does.
    #[error("it is no record")]
    Magic,
    /// No record is that long, or has such a generation.
    #[error("its header is out of range")]
    Range,
    /// Part of it is not what was written.
    #[error("its checksum is wrong")]
    Checksum,
    /// It is whole, and of a version that this program doesn't know.
    #[error("it has version {version}")]
    Newer {
        /// That version.
        version: u32,
    },
}

impl<'a> Record<'a> {
    /// Reads the record with which the bytes begin. Every version has this header and this checksum.
    ///
    /// # Errors
    /// What is wrong. Any prefix of a record, and any record with a wrong byte, gives one.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Torn> {
        let (header, rest) = bytes.split_at_checked(HEADER).ok_or(Torn::Short)?;
        if !header.starts_with(MAGIC) {
            return Err(Torn::Magic);
        }
        let (version, length, generation) = (u32_at(header, 8), u32_at(header, 12), u64_at(header, 16));
        let length = usize::try_from(length).ok().filter(|&it| it <= MAX_CONTENT).ok_or(Torn::Range)?;
        let content = rest.get(..length).ok_or(Torn::Short)?;
        if u32_at(header, CHECKSUM.start) != checksum(header, content) {
            return Err(Torn::Checksum);
        }
        // The last one would have no successor.
        if generation == u64::MAX {
            return Err(Torn::Range);
        }
        if version != VERSION {
            return Err(Torn::Newer { version });
        }
        Ok(Self { generation, content })
    }

    /// The bytes to write; none where the content is longer than [`MAX_CONTENT`].
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let length = u32::try_from(self.content.len()).ok().filter(|_| self.content.len() <= MAX_CONTENT)?;
        let mut bytes = Vec::with_capacity(HEADER + self.content.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&self.generation.to_le_bytes());
        let checksum = checksum(&bytes, self.content);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes.extend_from_slice(self.content);
        Some(bytes)
    }
}

/// Of all but the checksum itself.
fn checksum(header: &[u8], content: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&header[..CHECKSUM.start]), content)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_whatever_follows(
            generation in 0..u64::MAX,
            content in prop::collection::vec(any::<u8>(), 0..300),
            follows in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let record = Record { generation, content: &content };
            let bytes = [record.to_bytes().unwrap(), follows].concat();
            prop_assert_eq!(Record::parse(&bytes), Ok(record));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Record::parse(&bytes);
            let _ = Record::parse(&[MAGIC.as_slice(), &bytes].concat());
        }
    }

    #[test]
    fn a_record_that_is_cut_at_any_byte_is_known_to_be() {
        let bytes = Record { generation: 7, content: &[0; 1000] }.to_bytes().unwrap();
        for length in 0..bytes.len() {
            assert_eq!(Record::parse(&bytes[..length]), Err(Torn::Short), "{length}");
            // A file system may have made the file longer before it wrote the rest.
            let mut torn = Record { generation: 7, content: &[0xa5; 1000] }.to_bytes().unwrap();
            torn[length..].fill(0);
            assert!(Record::parse(&torn).is_err(), "{length}");
        }
    }

    #[test]
    fn a_record_with_any_byte_changed_in_any_way_is_known_to_be() {
        let bytes = Record { generation: 7, content: b"a content" }.to_bytes().unwrap();
        for at in 0..bytes.len() {
            for change in 1..=u8::MAX {
                let mut changed = bytes.clone();
                changed[at] ^= change;
                assert!(Record::parse(&changed).is_err(), "{at}: {change}");
            }
        }
    }

    #[test]
    fn a_record_of_two_halves_is_known_to_be() {
        let old = Record { generation: 7, content: &[1; 500] }.to_bytes().unwrap();
        let new = Record { generation: 9, content: &[2; 500] }.to_bytes().unwrap();
        for at in 1..old.len() {
            for (head, tail) in [(&old, &new), (&new, &old)] {
                let torn = [&head[..at], &tail[at..]].concat();
                assert!(torn == old || torn == new || Record::parse(&torn).is_err(), "{at}");
            }
        }
    }

    #[test]
    fn a_whole_record_of_another_version_is_not_torn() {
        let mut bytes = Record { generation: 7, content: b"x" }.to_bytes().unwrap();
        bytes[8] = 2;
        let sum = checksum(&bytes[..HEADER], b"x");
        bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(Record::parse(&bytes), Err(Torn::Newer { version: 2 }));
    }

    #[test]
    fn what_is_too_long_is_not_written() {
        let content = vec![0; MAX_CONTENT + 1];
        assert_eq!(Record { generation: 0, content: &content }.to_bytes(), None);
        assert!(Record { generation: 0, content: &content[1..] }.to_bytes().is_some());
    }
}
