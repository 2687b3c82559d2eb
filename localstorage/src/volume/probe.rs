//! The contents of a disk, derived only from its bytes. Only this module decides whether a disk may be
//! formatted.

use std::fmt;
use std::io::{self, Read, Seek};

use super::claim::{DiskClaim, claim_line};
use super::digest::{ContentsDigest, DigestScope};
use super::disk_ends::DiskEnds;
#[cfg(any(test, feature = "testing"))]
use super::disk_ends::WINDOW_BYTES;
use super::places;

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
    /// The CRC-32C of its sector of 512 bytes, which a disk writes completely or not at all; for an XFS, the
    /// fingerprint.
    pub(super) sector: u32,
}

impl DiskSignature {
    /// The name for unknown data: bytes other than zero, found where a blank disk has none.
    pub const DATA: &'static str = "data";

    fn is_xfs(&self) -> bool {
        self.name == "xfs" && self.offset == 0
    }

    pub(super) fn is_data(&self) -> bool {
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
    /// Nothing but zeros: all of it was read.
    Blank,
    /// Nothing but zeros in the first and the last MiB, where file systems, partition tables and encrypted
    /// devices keep copies of their headers, and in 4 KiB at each of 4,096 even places. The rest was not read, so
    /// it proves nothing: another disk may have its data elsewhere.
    Unread {
        /// Of these places.
        digest: ContentsDigest,
    },
    /// The claim of an interrupted format by this crate, and no data written since: as far as the disk was blank
    /// when it was claimed, only what that format writes is in the places that [`Unread`](Self::Unread) names.
    Interrupted,
    /// An XFS whose superblock is complete, with its label.
    Xfs {
        /// The label, without its zero padding; invalid UTF-8 is replaced.
        label: String,
        /// All signatures found, in the order of their offsets.
        found: Vec<DiskSignature>,
        /// Of the places that were read.
        digest: ContentsDigest,
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
        /// Of the places that were read, or of the whole disk.
        digest: ContentsDigest,
    },
}

impl VolumeContents {
    pub(super) fn signatures(&self) -> &[DiskSignature] {
        match self {
            VolumeContents::Xfs { found, .. } | VolumeContents::Occupied { found, .. } => found,
            _ => &[],
        }
    }

    /// The digest of what was read; none if there is nothing to erase, and for a directory.
    pub fn digest(&self) -> Option<ContentsDigest> {
        match self {
            VolumeContents::Unread { digest }
            | VolumeContents::Xfs { digest, .. }
            | VolumeContents::Occupied { digest, .. } => Some(*digest),
            _ => None,
        }
    }

    /// A number that names the file systems and other contents that were recognized, on this disk and on a copy; none
    /// if none was. It stays the same when files change.
    pub fn mark(&self) -> Option<u32> {
        let lines: Vec<_> = self.signatures().iter().map(claim_line).collect();
        (!lines.is_empty()).then(|| crc32c::crc32c(lines.join("\n").as_bytes()))
    }

    /// The same contents, on the disk with this identity.
    pub(super) fn bound_to(mut self, identity: &[u8]) -> VolumeContents {
        if let VolumeContents::Unread { digest }
        | VolumeContents::Xfs { digest, .. }
        | VolumeContents::Occupied { digest, .. } = &mut self
        {
            *digest = digest.bound_to(identity);
        }
        self
    }
}

impl fmt::Display for VolumeContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VolumeContents::Blank => f.write_str("nothing"),
            VolumeContents::Unread { .. } => f.write_str("no data where it was sampled"),
            VolumeContents::Interrupted => f.write_str("an interrupted format"),
            VolumeContents::Xfs { label, .. } => write!(f, "an XFS labelled {label:?}"),
            VolumeContents::Files { entries } => write!(f, "{entries} files"),
            VolumeContents::Occupied { found, .. } => {
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
/// never reported as one without data.
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
        && found.iter().all(|signature| ends.is_claimed(claim, signature))
    {
        let Some(foreign) = find_foreign_data(disk, &ends, claim, readahead)? else {
            return Ok(VolumeContents::Interrupted);
        };
        // This was written after the claim, so the disk may not be formatted again without consent.
        found.retain(|signature| !signature.is_data());
        found.push(foreign);
        let digest = ends.sampled_digest(&found);
        return Ok(VolumeContents::Occupied { found, digest });
    }
    match found.first() {
        // The ends alone prove nothing: they may have been overwritten, and the rest can be recovered.
        None => Ok(match places::find_hidden_data(disk, ends.size, |_, _| false, readahead)? {
            Some(signature) => {
                found.push(signature);
                let digest = ends.sampled_digest(&found);
                VolumeContents::Occupied { found, digest }
            }
            None => VolumeContents::Unread { digest: ends.sampled_digest(&found) },
        }),
        Some(first) if first.is_xfs() && !ends.xfs_in_progress() => {
            let digest = ends.sampled_digest(&found);
            Ok(VolumeContents::Xfs { label: ends.xfs_label(), found, digest })
        }
        Some(_) => {
            let digest = ends.sampled_digest(&found);
            Ok(VolumeContents::Occupied { found, digest })
        }
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

/// Returns whether the disk holds only the remains of an interrupted LUKS format with this claim: a LUKS header,
/// data before `end`, and the contents that the claim names. The caller checks whose header it is. As with a file
/// system, the claim of contents to be erased also covers data without a signature.
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
        // The two places of a LUKS2 header whose copies have the size that this crate chooses.
        let is_header = found.name == "luks" && matches!(found.offset, 0 | 0x4000);
        is_header || ends.is_claimed(claim, found)
    };
    if !ends.find_signatures().iter().all(is_ours) {
        return Ok(false);
    }
    if !claim.erases_nothing() {
        return Ok(true);
    }
    let hidden = places::find_hidden_data(disk, ends.size, |offset, _| offset < end, readahead)?;
    Ok(hidden.is_none() && ends.is_tail_blank_from(end))
}

/// Returns whether a disk has the contents that it had before it was claimed, apart from the claim.
pub(crate) fn is_unchanged_but_for_claim(
    disk: &mut (impl Read + Seek),
    before: &VolumeContents,
    readahead: impl Fn(&[u64]),
) -> io::Result<bool> {
    let ends = DiskEnds::read(disk)?;
    let mut found = ends.find_signatures();
    // As when the disk was probed: only one with blank ends is searched further.
    if found.is_empty() {
        found.extend(places::find_hidden_data(disk, ends.size, |_, _| false, readahead)?);
    }
    // Data that only a reading of the whole disk finds is in none of these places.
    let is_read_whole = before.digest().is_some_and(|digest| digest.scope() == DigestScope::Read);
    Ok(found == before.signatures() || (found.is_empty() && is_read_whole))
}

/// Checks that probing never panics, and that only zeros are reported as no data.
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
        if let Ok(VolumeContents::Unread { .. }) = probe_disk(&mut io::Cursor::new(&image)) {
            let (head, tail) =
                (&image[..WINDOW_BYTES as usize], &image[image.len() - WINDOW_BYTES as usize..]);
            assert!([head, tail].concat().iter().all(|byte| *byte == 0), "a disk with data shows them");
        }
    }
}

#[cfg(test)]
#[path = "probe_test.rs"]
mod tests;
