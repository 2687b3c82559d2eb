//! What the header of an encrypted volume says of it, before its policy is checked.

use super::super::VolumeError;
use super::super::disk::Disk;
use super::super::inspection::DiskFinding;
use super::header::{COPIES_BYTES, LuksHeader};
use super::policy::read_volume_token;
use super::token::VolumeProgress;

/// The volume that the header of a disk describes; none if it has no header of this crate.
pub(in super::super) fn describe_header(disk: &Disk) -> Result<Option<DiskFinding>, VolumeError> {
    let start = disk.read_start(COPIES_BYTES as u64)?;
    let token = LuksHeader::parse(&start).ok().and_then(|header| read_volume_token(&header.json));
    Ok(token.map(|token| match token.state {
        VolumeProgress::Unfinished => DiskFinding::Unfinished,
        VolumeProgress::Complete => {
            DiskFinding::Encrypted { encryption: token.encryption, keys: token.keys, node: token.node }
        }
    }))
}
