//! The claim of a disk: the sector that marks an unfinished format by this crate.

use std::iter;

use super::probe::{DiskSignature, VolumeContents};
use super::uuid::Uuid;

/// The offset of the claim from the end of the disk. It is inside the last MiB, which is always read, and
/// outside the 128 KiB at each end that mkfs.xfs wipes.
const CLAIM_FROM_END: u64 = 512 << 10;

/// The start of a claim. One line follows for the file system to be created, and one for each signature to be
/// erased.
const CLAIM_HEADER: &str = "nodekeel data volume, format 1: being formatted\n";

/// A claim has one sector, which a disk writes completely or not at all.
pub(crate) const SECTOR_BYTES: usize = 512;

/// The prefix of the UUID of the file system to be created, in the second line of a claim.
const CLAIM_UUID_PREFIX: &str = "as ";

/// The lines of a claim that erases nothing: the header's, the UUID's, and that of the file system to be created.
const BLANK_CLAIM_LINES: usize = 3;

/// The line of a claim that erases data that nobody has seen.
const UNREAD_LINE: &str = "data that were not read";

/// The start of the sector that records the unmount of a new log, up to its magic number: cycle 1, eight bytes, by
/// `XFS_LOG`, `XLOG_UNMOUNT_TRANS`. *Source:* Linux `xfs_log_format.h`, `struct xlog_op_header`.
const UNMOUNT_RECORD: [u8; 12] = [0, 0, 0, 1, 0, 0, 0, 8, 0xaa, 0x20, 0, 0];

/// Encodes a claim.
///
/// Only the end of that format wipes it. So it names the signatures to be erased and the file system to be
/// created: any other signature was written to the disk since and must be kept, even if it is of the same
/// kind. A line that does not fit is omitted, and its signature is not covered.
pub(crate) fn encode_claim(uuid: Uuid, label: &str, erased: &VolumeContents) -> [u8; SECTOR_BYTES] {
    let mut text = format!("{CLAIM_HEADER}{CLAIM_UUID_PREFIX}{uuid}\n");
    let fingerprint = xfs_fingerprint(&uuid.0, label.as_bytes());
    let created = DiskSignature { name: "xfs", offset: 0, fingerprint, sector: fingerprint };
    let signatures = erased.signatures().iter().map(erased_line);
    // The owner gave up a disk that was not read: any data on it.
    let unread = matches!(erased, VolumeContents::Unread { .. }).then(|| UNREAD_LINE.to_owned());
    for line in iter::once(claim_line(&created)).chain(unread).chain(signatures) {
        // One byte is left for the newline.
        if text.len() + line.len() < SECTOR_BYTES {
            text.extend([&line, "\n"]);
        }
    }
    let mut sector = [0; SECTOR_BYTES];
    sector[..text.len()].copy_from_slice(text.as_bytes());
    sector
}

/// A claim that was read from a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskClaim<'a>(&'a str);

impl<'a> DiskClaim<'a> {
    /// `None` for a sector that is not a claim.
    pub(crate) fn parse(sector: &'a [u8]) -> Option<DiskClaim<'a>> {
        let text = std::str::from_utf8(sector).ok()?.trim_end_matches('\0');
        text.starts_with(CLAIM_HEADER).then_some(DiskClaim(text))
    }

    /// The UUID of the file system to be created.
    pub(crate) fn uuid(self) -> Option<Uuid> {
        self.0.lines().nth(1)?.strip_prefix(CLAIM_UUID_PREFIX)?.parse().ok()
    }

    /// Returns whether it names the signature: one to be erased, or that of the file system to be created.
    pub(crate) fn names(self, signature: &DiskSignature) -> bool {
        let (line, erased) = (claim_line(signature), erased_line(signature));
        self.0.lines().any(|named| named == line || named == erased)
    }

    /// Returns whether it names a signature to be erased by its own sector, even if the sectors around it have
    /// changed. The claims of earlier builds don't.
    pub(crate) fn names_sector(self, signature: &DiskSignature) -> bool {
        let (start, end) = (format!("{signature}, "), sector_suffix(signature));
        self.0.lines().any(|named| named.starts_with(&start) && named.ends_with(&end))
    }

    /// Returns whether the disk was blank when it was claimed.
    pub(crate) fn erases_nothing(self) -> bool {
        self.0.lines().count() == BLANK_CLAIM_LINES
    }

    /// Returns whether the format of this claim has written a block of 4 KiB. Every block that mkfs.xfs writes has
    /// the UUID of the file system, except for the end of a log record on disks with a stripe size: sectors that
    /// have only the number of its first cycle, of which the first may record the unmount.
    ///
    /// *Source:* Linux `xfs_format.h`, the UUID of each header; xfsprogs `libxfs_log_header`.
    pub(crate) fn explains_block(self, block: &[u8]) -> bool {
        let has_uuid = |uuid: Uuid| block.windows(uuid.0.len()).any(|bytes| bytes == uuid.0);
        let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        let is_first_cycle =
            |sector: &[u8]| sector.starts_with(&1_u32.to_be_bytes()) && is_zero(&sector[4..]);
        // Two bytes of magic number follow, in the byte order of the host.
        let is_unmount = |sector: &[u8]| {
            sector.starts_with(&UNMOUNT_RECORD) && sector.get(UNMOUNT_RECORD.len() + 2..).is_some_and(is_zero)
        };
        let (first, rest) = block.split_at(SECTOR_BYTES.min(block.len()));
        self.uuid().is_some_and(has_uuid)
            || (is_first_cycle(first) || is_unmount(first)) && rest.chunks(SECTOR_BYTES).all(is_first_cycle)
    }
}

/// The line of a claim that names a signature.
pub(crate) fn claim_line(signature: &DiskSignature) -> String {
    format!("{signature}, {:08x}", signature.fingerprint)
}

/// The line of a claim that names a signature to be erased, also by its own sector.
fn erased_line(signature: &DiskSignature) -> String {
    claim_line(signature) + &sector_suffix(signature)
}

fn sector_suffix(signature: &DiskSignature) -> String {
    format!(", sector {:08x}", signature.sector)
}

/// The fingerprint of an XFS, which mounting does not change.
pub(crate) fn xfs_fingerprint(uuid: &[u8], label: &[u8]) -> u32 {
    let end = label.iter().position(|byte| *byte == 0).unwrap_or(label.len());
    crc32c::crc32c_append(crc32c::crc32c(uuid), &label[..end])
}

/// The offset of the claim on a disk of this size.
pub(crate) fn claim_offset(size: u64) -> u64 {
    size.saturating_sub(CLAIM_FROM_END) / 4096 * 4096
}
