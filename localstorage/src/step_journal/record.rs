//! The format of a record.

use thiserror::Error;

/// The longest content of a record: 1 MiB. A step's state is a few names and numbers.
pub const MAX_CONTENT_BYTES: usize = 1 << 20;

/// Magic, version, length, generation, checksum.
pub(super) const HEADER_BYTES: usize = 28;
const MAGIC: &[u8; 8] = b"NKEELJNL";
const VERSION: u32 = 1;
/// The bytes of the checksum.
const CHECKSUM_RANGE: std::ops::Range<usize> = 24..28;

/// A record as in a file; the [module](super) describes its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JournalRecord<'a> {
    /// Grows by one with each record.
    pub generation: u64,
    /// The committed state.
    pub content: &'a [u8],
}

/// A defect of the bytes of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecordFormatError {
    /// The record is truncated.
    #[error("damaged record: it is truncated; the journal's other file may hold a complete one")]
    Truncated,
    /// The magic bytes are missing.
    #[error("the file is not a step journal")]
    BadMagic,
    /// The length or the generation is out of range.
    #[error("damaged record: its header is out of range; the journal's other file may hold a complete one")]
    OutOfRange,
    /// The checksum does not match: some bytes were changed.
    #[error("damaged record: its checksum does not match; the journal's other file may hold a complete one")]
    ChecksumMismatch,
    /// The record is complete, but of an unknown version.
    #[error("record has format version {version}, written by a newer release: run that release")]
    NewerVersion {
        /// The version.
        version: u32,
    },
}

impl<'a> JournalRecord<'a> {
    /// Parses the record at the start of the bytes. Every version has this header and this checksum.
    ///
    /// # Errors
    /// [`RecordFormatError`]. Any prefix of a record, and any record with a changed byte, is an error.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, RecordFormatError> {
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES).ok_or(RecordFormatError::Truncated)?;
        if !header.starts_with(MAGIC) {
            return Err(RecordFormatError::BadMagic);
        }
        let (version, length, generation) = (u32_at(header, 8), u32_at(header, 12), u64_at(header, 16));
        let length = usize::try_from(length)
            .ok()
            .filter(|&length| length <= MAX_CONTENT_BYTES)
            .ok_or(RecordFormatError::OutOfRange)?;
        let content = rest.get(..length).ok_or(RecordFormatError::Truncated)?;
        // Before the version: damaged bytes must not be reported as the record of a newer release.
        if u32_at(header, CHECKSUM_RANGE.start) != checksum(header, content) {
            return Err(RecordFormatError::ChecksumMismatch);
        }
        // The last generation would have no successor.
        if generation == u64::MAX {
            return Err(RecordFormatError::OutOfRange);
        }
        if version != VERSION {
            return Err(RecordFormatError::NewerVersion { version });
        }
        Ok(Self { generation, content })
    }

    /// The bytes to write; none if the content is longer than [`MAX_CONTENT_BYTES`].
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let length =
            u32::try_from(self.content.len()).ok().filter(|_| self.content.len() <= MAX_CONTENT_BYTES)?;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.content.len());
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

/// The length of the record that begins with these bytes; that of its header if they are not a header.
pub(super) fn record_bytes(start: &[u8]) -> usize {
    let is_header = start.len() >= HEADER_BYTES && start.starts_with(MAGIC);
    // A torn header may hold any length: the reader must not allocate memory for it.
    let content = is_header.then(|| u32_at(start, 12) as usize).filter(|&length| length <= MAX_CONTENT_BYTES);
    HEADER_BYTES + content.unwrap_or_default()
}

/// The checksum of all fields but itself.
fn checksum(header: &[u8], content: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&header[..CHECKSUM_RANGE.start]), content)
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
        fn a_written_record_is_read_back_whatever_follows(
            generation in 0..u64::MAX,
            content in prop::collection::vec(any::<u8>(), 0..300),
            follows in prop::collection::vec(any::<u8>(), 0..300),
        ) {
            let record = JournalRecord { generation, content: &content };
            let bytes = [record.to_bytes().unwrap(), follows].concat();
            prop_assert_eq!(JournalRecord::from_bytes(&bytes), Ok(record));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = JournalRecord::from_bytes(&bytes);
            let _ = JournalRecord::from_bytes(&[MAGIC.as_slice(), &bytes].concat());
        }
    }

    #[test]
    fn a_record_cut_at_any_byte_is_detected() {
        let bytes = JournalRecord { generation: 7, content: &[0; 1000] }.to_bytes().unwrap();
        for length in 0..bytes.len() {
            assert_eq!(
                JournalRecord::from_bytes(&bytes[..length]),
                Err(RecordFormatError::Truncated),
                "{length}"
            );
            // A file system may have made the file longer before it wrote the rest.
            let mut torn = JournalRecord { generation: 7, content: &[0xa5; 1000] }.to_bytes().unwrap();
            torn[length..].fill(0);
            assert!(JournalRecord::from_bytes(&torn).is_err(), "{length}");
        }
    }

    #[test]
    fn a_record_with_any_byte_changed_is_detected() {
        let bytes = JournalRecord { generation: 7, content: b"a content" }.to_bytes().unwrap();
        for at in 0..bytes.len() {
            for change in 1..=u8::MAX {
                let mut changed = bytes.clone();
                changed[at] ^= change;
                assert!(JournalRecord::from_bytes(&changed).is_err(), "{at}: {change}");
            }
        }
    }

    #[test]
    fn a_record_mixed_from_two_records_is_detected() {
        let old = JournalRecord { generation: 7, content: &[1; 500] }.to_bytes().unwrap();
        let new = JournalRecord { generation: 9, content: &[2; 500] }.to_bytes().unwrap();
        for at in 1..old.len() {
            for (head, tail) in [(&old, &new), (&new, &old)] {
                let torn = [&head[..at], &tail[at..]].concat();
                assert!(torn == old || torn == new || JournalRecord::from_bytes(&torn).is_err(), "{at}");
            }
        }
    }

    #[test]
    fn a_whole_record_of_another_version_is_not_torn() {
        let mut bytes = JournalRecord { generation: 7, content: b"x" }.to_bytes().unwrap();
        bytes[8] = 2;
        let sum = checksum(&bytes[..HEADER_BYTES], b"x");
        bytes[CHECKSUM_RANGE].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(JournalRecord::from_bytes(&bytes), Err(RecordFormatError::NewerVersion { version: 2 }));
    }

    #[test]
    fn a_record_that_is_too_long_is_not_written() {
        let content = vec![0; MAX_CONTENT_BYTES + 1];
        assert_eq!(JournalRecord { generation: 0, content: &content }.to_bytes(), None);
        assert!(JournalRecord { generation: 0, content: &content[1..] }.to_bytes().is_some());
    }
}
