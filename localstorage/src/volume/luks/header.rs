//! The binary header of LUKS2: two copies, each with a checksum over its metadata in JSON.
//!
//! ```text
//!  offset  0                16 KiB             32 KiB                       16 MiB
//!          first copy       second copy        areas of the key slots       data
//!          4 KiB | JSON     4 KiB | JSON
//! ```
//!
//! The sizes are those that this crate passes to cryptsetup. A header with others is rejected.
//!
//! *Source:* "LUKS2 On-Disk Format Specification", version 1.1.2, §2.

use sha2::{Digest as _, Sha256};

use super::super::uuid::Uuid;

/// The bytes before the data: both copies, and the areas of the key slots.
pub(super) const HEADER_AREA_BYTES: u64 = 16 << 20;

pub(super) const COPY_BYTES: usize = 16 << 10;
/// The bytes of a copy before its JSON.
const BINARY_BYTES: usize = 4 << 10;
/// The bytes of the JSON area of a copy, as the metadata repeat them.
pub(super) const JSON_BYTES: usize = COPY_BYTES - BINARY_BYTES;
pub(super) const COPIES_BYTES: usize = 2 * COPY_BYTES;

const MAGICS: [&[u8; 6]; 2] = [b"LUKS\xba\xbe", b"SKUL\xba\xbe"];
const SEQUENCE_AT: usize = 16;
const UUID_AT: usize = 168;
const OFFSET_AT: usize = 256;
const CHECKSUM_AT: usize = 448;
const CHECKSUM_BYTES: usize = 64;

/// A defect of the LUKS2 header at the start of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Neither place of a copy has the magic bytes of LUKS2.
    #[error("the disk has no LUKS2 header")]
    Absent,
    /// There are magic bytes, but no copy that is complete and correct.
    #[error("both copies of the LUKS2 header are damaged")]
    Damaged,
    /// Both copies are correct, equally new, and differ: no program writes that.
    #[error("the two copies of the LUKS2 header contradict each other")]
    Contradiction,
}

/// A header whose checksum is right. Its metadata are not checked yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LuksHeader {
    pub(super) uuid: Uuid,
    /// Grows with each change.
    pub(super) sequence: u64,
    pub(super) json: Vec<u8>,
    /// True for each copy that is correct and has this sequence number.
    pub(super) current_copies: [bool; 2],
}

impl LuksHeader {
    /// Reads both copies from the start of a disk.
    pub(super) fn parse(start: &[u8]) -> Result<LuksHeader, HeaderError> {
        let bytes_of = |index: usize| start.get(index * COPY_BYTES..(index + 1) * COPY_BYTES);
        let copies = [0, 1].map(|index| parse_copy(index, bytes_of(index)));
        let has_magic =
            [0, 1].map(|index| bytes_of(index).is_some_and(|bytes| bytes.starts_with(MAGICS[index])));
        // cryptsetup writes one copy after the other, with the same number: a kill in between leaves an older one.
        let newest = copies.iter().flatten().max_by_key(|copy| copy.sequence);
        let Some(newest) = newest.cloned() else {
            return Err(if has_magic == [false; 2] { HeaderError::Absent } else { HeaderError::Damaged });
        };
        let is_newest = |copy: &&LuksHeader| copy.sequence == newest.sequence;
        // Of two headers with the same number, cryptsetup could choose the one that was not checked.
        if copies.iter().flatten().filter(is_newest).any(|copy| *copy != newest) {
            return Err(HeaderError::Contradiction);
        }
        let current_copies = [0, 1].map(|index| copies[index].as_ref().is_some_and(|copy| is_newest(&copy)));
        Ok(LuksHeader { current_copies, ..newest })
    }

    /// Replaces in the header area of a disk what was not read as this header, an older or damaged copy, by the other
    /// copy: cryptsetup could otherwise choose it. It repairs a header alike.
    pub(super) fn keep_only_current(&self, area: &mut [u8]) {
        let Some((first, second)) =
            area.get_mut(..COPIES_BYTES).and_then(|copies| copies.split_at_mut_checked(COPY_BYTES))
        else {
            return;
        };
        let (index, from, to) = match self.current_copies {
            [true, false] => (1, first, second),
            [false, true] => (0, second, first),
            _ => return,
        };
        to.copy_from_slice(from);
        complete_copy(index, to);
    }

    /// Replaces the metadata in both copies of a header area, as the next change of this header. They are shorter than their
    /// area.
    pub(super) fn replace_metadata(&self, area: &mut [u8], json: &[u8]) {
        let Some(copies) = area.get_mut(..COPIES_BYTES) else { return };
        for (index, copy) in copies.chunks_mut(COPY_BYTES).enumerate() {
            copy[SEQUENCE_AT..SEQUENCE_AT + 8].copy_from_slice(&(self.sequence + 1).to_be_bytes());
            let (text, padding) = copy[BINARY_BYTES..].split_at_mut(json.len());
            text.copy_from_slice(json);
            padding.fill(0);
            complete_copy(index, copy);
        }
    }
}

/// Returns whether the start of a disk has a header, complete or damaged, that a format with this UUID has not
/// written, not even in part: cryptsetup writes version and UUID in the sector of the magic bytes.
///
/// *Source:* cryptsetup `luks2_disk_metadata.c`, `hdr_write_disk`.
pub(super) fn has_foreign_magic(start: &[u8], uuid: Uuid) -> bool {
    let is_ours = |name: &str| name.is_empty() || name.parse::<Uuid>() == Ok(uuid);
    let is_foreign = |bytes: &[u8]| {
        bytes.get(6..8) != Some(&[0, 2][..]) || !text_at(bytes, UUID_AT, 40).is_some_and(is_ours)
    };
    let copies = [0, 1].map(|index| start.get(index * COPY_BYTES..).unwrap_or_default());
    copies.into_iter().zip(MAGICS).any(|(bytes, magic)| bytes.starts_with(magic) && is_foreign(bytes))
}

/// `None` for a copy that is missing or damaged.
fn parse_copy(index: usize, bytes: Option<&[u8]>) -> Option<LuksHeader> {
    let bytes = bytes.filter(|bytes| bytes.starts_with(MAGICS[index]))?;
    let number = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let is_version_2 = bytes[6..8] == [0, 2];
    let is_expected_size =
        number(8)? == COPY_BYTES as u64 && number(OFFSET_AT)? == (index * COPY_BYTES) as u64;
    if !is_version_2 || !is_expected_size || text_at(bytes, 72, 32) != Some("sha256") {
        return None;
    }
    // The field has 64 bytes, of which SHA-256 uses 32.
    let (stored, rest) = bytes[CHECKSUM_AT..CHECKSUM_AT + CHECKSUM_BYTES].split_at(32);
    if stored != &checksum(bytes)[..] || rest.iter().any(|byte| *byte != 0) {
        return None;
    }
    let (json, padding) = split_at_nul(&bytes[BINARY_BYTES..])?;
    let is_padded = padding.iter().all(|byte| *byte == 0);
    Some(LuksHeader {
        uuid: text_at(bytes, UUID_AT, 40)?.parse().ok()?,
        sequence: number(SEQUENCE_AT)?,
        json: is_padded.then(|| json.to_vec())?,
        current_copies: [true; 2],
    })
}

/// Writes the parts in which a copy differs from the other one.
fn complete_copy(index: usize, copy: &mut [u8]) {
    copy[..6].copy_from_slice(MAGICS[index]);
    copy[OFFSET_AT..OFFSET_AT + 8].copy_from_slice(&((index * COPY_BYTES) as u64).to_be_bytes());
    let sum = checksum(copy);
    copy[CHECKSUM_AT..CHECKSUM_AT + 32].copy_from_slice(&sum);
}

/// The SHA-256 of a copy, in which the checksum counts as zeros.
fn checksum(copy: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(&copy[..CHECKSUM_AT]);
    hash.update([0; CHECKSUM_BYTES]);
    hash.update(&copy[CHECKSUM_AT + CHECKSUM_BYTES..]);
    hash.finalize().into()
}

fn text_at(bytes: &[u8], at: usize, length: usize) -> Option<&str> {
    let (text, padding) = split_at_nul(bytes.get(at..at + length)?)?;
    (padding.iter().all(|byte| *byte == 0)).then_some(())?;
    std::str::from_utf8(text).ok()
}

fn split_at_nul(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    bytes.iter().position(|byte| *byte == 0).map(|end| bytes.split_at(end))
}

/// Writes both copies of a header, as cryptsetup would.
#[cfg(any(test, feature = "testing"))]
pub(super) fn encode_header(uuid: Uuid, sequence: u64, json: &[u8]) -> Vec<u8> {
    let mut area = vec![0; COPIES_BYTES];
    for (index, copy) in area.chunks_mut(COPY_BYTES).enumerate() {
        let mut write = |at: usize, bytes: &[u8]| copy[at..at + bytes.len()].copy_from_slice(bytes);
        write(6, &[0, 2]);
        write(8, &(COPY_BYTES as u64).to_be_bytes());
        write(SEQUENCE_AT, &sequence.to_be_bytes());
        write(72, b"sha256");
        write(UUID_AT, uuid.to_string().as_bytes());
        write(BINARY_BYTES, json);
        complete_copy(index, copy);
    }
    area
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UUID: Uuid = Uuid([9; 16]);

    fn sequence_of(start: &[u8]) -> Result<(u64, [bool; 2]), HeaderError> {
        LuksHeader::parse(start).map(|header| (header.sequence, header.current_copies))
    }

    #[test]
    fn a_header_is_read_from_its_newest_correct_copy() {
        let (old, new) = (encode_header(UUID, 6, b"{}"), encode_header(UUID, 7, b"{ }"));
        assert_eq!(LuksHeader::parse(&new).unwrap().json, b"{ }");
        assert_eq!(sequence_of(&new), Ok((7, [true; 2])));
        let (first, second) = (COPY_BYTES, COPY_BYTES);
        // The power failed between both copies.
        assert_eq!(sequence_of(&[&new[..first], &old[second..]].concat()), Ok((7, [true, false])));
        assert_eq!(sequence_of(&[&old[..first], &new[second..]].concat()), Ok((7, [false, true])));
        let other = encode_header(UUID, 7, b"{  }");
        let contradiction = sequence_of(&[&new[..first], &other[second..]].concat());
        assert_eq!(contradiction, Err(HeaderError::Contradiction));
        assert_eq!(sequence_of(&[0; COPIES_BYTES]), Err(HeaderError::Absent));
        assert_eq!(sequence_of(&new[..100]), Err(HeaderError::Absent));
    }

    #[test]
    fn a_header_of_another_volume_or_version_is_foreign_also_if_it_is_damaged() {
        let ours = encode_header(UUID, 1, b"{}");
        let changed = |at: usize, bytes: &[u8]| {
            let mut area = ours.clone();
            area[at..at + bytes.len()].copy_from_slice(bytes);
            has_foreign_magic(&area, UUID)
        };
        assert!(!has_foreign_magic(&[0; COPIES_BYTES], UUID) && !has_foreign_magic(&ours, UUID));
        assert!(has_foreign_magic(&ours, Uuid([8; 16])));
        // Cut off after the first sector, or before its text.
        assert!(!changed(512, &[0; 512]) && !changed(UUID_AT, &[0; 40]));
        for (at, bytes) in
            [(6, &[0, 1][..]), (UUID_AT, b"x"), (COPY_BYTES + 6, &[0, 3]), (COPY_BYTES + UUID_AT, b"x")]
        {
            assert!(changed(at, bytes), "{at}");
        }
    }

    #[test]
    fn a_copy_that_was_not_read_is_replaced_by_the_other_one() {
        let (old, new) = (encode_header(UUID, 6, b"{}"), encode_header(UUID, 7, b"{ }"));
        let whole = [&new[..], b"areas"].concat();
        for torn in [
            [&new[..COPY_BYTES], &old[COPY_BYTES..], b"areas"].concat(),
            [&[0; COPY_BYTES], &new[COPY_BYTES..], b"areas"].concat(),
            whole.clone(),
        ] {
            let mut area = torn;
            LuksHeader::parse(&area).unwrap().keep_only_current(&mut area);
            assert!(area == whole);
        }
    }

    #[test]
    fn replaced_metadata_are_the_next_header_also_if_only_one_copy_of_it_is_written() {
        let old = encode_header(UUID, 7, b"{\"a\":\"long\"}");
        let mut new = old.clone();
        LuksHeader::parse(&old).unwrap().replace_metadata(&mut new, b"{}");
        assert!(new == encode_header(UUID, 8, b"{}"));
        for torn in [
            [&old[..COPY_BYTES], &new[COPY_BYTES..]].concat(),
            [&new[..COPY_BYTES], &old[COPY_BYTES..]].concat(),
        ] {
            assert_eq!(LuksHeader::parse(&torn).unwrap().json, b"{}");
        }
    }

    proptest! {
        #[test]
        fn a_changed_byte_never_changes_what_is_read(at in 0..COPY_BYTES, bit in 0..8_u32) {
            let mut area = encode_header(UUID, 7, b"{\"tokens\":{}}");
            let before = LuksHeader::parse(&area).unwrap();
            area[at] ^= 1 << bit;
            let read = LuksHeader::parse(&area).unwrap();
            prop_assert_eq!(read.current_copies, [false, true]);
            prop_assert_eq!((read.uuid, read.json), (before.uuid, before.json));
            area[COPY_BYTES + at] ^= 1 << bit;
            let both = LuksHeader::parse(&area).unwrap_err();
            prop_assert_eq!(both, if at < 6 { HeaderError::Absent } else { HeaderError::Damaged });
        }
    }
}
