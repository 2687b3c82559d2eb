//! The contents of a disk, read without a key, a journal or a mount: for people who decide about it.

use std::fmt;
use std::path::Path;

use super::VolumeError;
use super::disk::{Disk, DiskAccess};
use super::filesystem::DEFAULT_LABEL;
use super::identity::DiskIdentity;
#[cfg(feature = "luks")]
use super::luks::{KeyPolicy, VolumeEncryption, VolumeProgress, VolumeToken, read_volume_of};
use super::probe::VolumeContents;

/// The contents of a disk, and the volume on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskReport {
    /// The size, in bytes.
    pub size_bytes: u64,
    /// The disk: a volume that is [expected](super::DiskVolume::expecting) on it is created and opened on no other.
    pub identity: DiskIdentity,
    /// The contents, by their signatures.
    pub contents: VolumeContents,
    /// The volume on it, as it describes itself. Only opening it shows whether that is true.
    pub volume: DiskFinding,
    /// Who uses it, with what to type: the mounts of it, and the devices on top of it.
    pub users: Option<String>,
}

/// The volume on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskFinding {
    /// None, and no data where a probe looks: only a reading of the whole disk shows whether it is blank.
    Unread,
    /// One whose creation was interrupted.
    Unfinished,
    /// One whose creation was interrupted, in the place of contents that may still be there: the node that began it knows
    /// whether they were given up.
    Erasing,
    /// One that is not encrypted: an XFS with our label.
    Plain,
    /// One that is encrypted.
    #[cfg(feature = "luks")]
    Encrypted {
        /// The UUID of the volume.
        volume: String,
        /// The encryption of its blocks.
        encryption: VolumeEncryption,
        /// The keys that open it.
        keys: KeyPolicy,
        /// The node that created it.
        node: Option<String>,
    },
    /// Something else.
    Foreign,
}

/// As the end of a sentence about the disk: "is blank", "has …".
impl fmt::Display for DiskReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.volume {
            DiskFinding::Unfinished => f.write_str("has a data volume whose creation was interrupted"),
            DiskFinding::Erasing => f.write_str("has other contents, whose erasure was interrupted"),
            DiskFinding::Plain => f.write_str("has a data volume that is not encrypted"),
            #[cfg(feature = "luks")]
            DiskFinding::Encrypted { encryption, keys, node, .. } => {
                write!(f, "has a data volume that is {encryption}, with {keys} keys")?;
                node.as_ref().map_or(Ok(()), |node| write!(f, ", of node {node}"))
            }
            DiskFinding::Unread | DiskFinding::Foreign => write!(f, "has {}", self.contents),
        }
    }
}

/// Reads the contents of a disk or disk image, and changes nothing. It may take a second, and up to five more while
/// another program has locked the disk.
///
/// # Errors
/// [`VolumeError::Device`].
pub fn inspect_disk(path: &Path) -> Result<DiskReport, VolumeError> {
    let disk = Disk::open(path, DiskAccess::Read)?;
    let contents = disk.probe_contents()?;
    let volume = match &contents {
        VolumeContents::Unread { .. } => DiskFinding::Unread,
        VolumeContents::Interrupted if disk.is_claimed_to_erase()? => DiskFinding::Erasing,
        VolumeContents::Interrupted => DiskFinding::Unfinished,
        // No configuration is known here, and so no other label: such a volume counts as foreign.
        VolumeContents::Xfs { label, .. } if label == DEFAULT_LABEL => DiskFinding::Plain,
        #[cfg(feature = "luks")]
        VolumeContents::Occupied { .. } => match read_volume_of(&disk)? {
            None => DiskFinding::Foreign,
            Some((_, token)) if token.state == VolumeProgress::Unfinished => DiskFinding::Unfinished,
            Some((uuid, VolumeToken { encryption, keys, node, .. })) => {
                DiskFinding::Encrypted { volume: uuid.to_string(), encryption, keys, node }
            }
        },
        _ => DiskFinding::Foreign,
    };
    let (size_bytes, identity, users) = (disk.size(), disk.identity().clone(), disk.describe_users());
    Ok(DiskReport { size_bytes, identity, contents, volume, users })
}

impl VolumeContents {
    /// A word that names these contents of this disk, and no others: a person who has seen them copies it, to agree that
    /// they are erased. It says which part of the disk it covers: `ext-sampled-0123456789abcdef` the places that a
    /// probe reads, `data-read-0123456789abcdef` every byte. None if there is nothing to erase.
    pub fn erase_token(&self) -> Option<String> {
        if let VolumeContents::Files { entries } = self {
            return Some(format!("files-{entries}"));
        }
        let name = self.signatures().first().map_or("unread", |signature| signature.name);
        Some(format!("{name}-{}", self.digest()?))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use super::super::claim::{claim_offset, encode_claim};
    use super::*;

    fn inspect(writes: &[(u64, &[u8])]) -> DiskReport {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let disk = File::create(&path).unwrap();
        disk.set_len(8 << 20).unwrap();
        for (offset, bytes) in writes {
            disk.write_all_at(bytes, *offset).unwrap();
        }
        inspect_disk(&path).unwrap()
    }

    #[test]
    fn a_disk_is_described_without_a_key() {
        let blank = inspect(&[]);
        assert_eq!((blank.size_bytes, &blank.volume), (8 << 20, &DiskFinding::Unread));
        assert_eq!(blank.to_string(), "has no data where it was sampled");
        assert!(blank.contents.erase_token().unwrap().starts_with("unread-sampled-"));
        let mut superblock = [0; 512];
        superblock[..4].copy_from_slice(b"XFSB");
        superblock[108..116].copy_from_slice(b"nodekeel");
        let plain = inspect(&[(0, &superblock)]);
        assert_eq!(plain.volume, DiskFinding::Plain);
        superblock[108] = b'N';
        let foreign = inspect(&[(0, &superblock)]);
        assert_eq!(foreign.volume, DiskFinding::Foreign);
        assert_eq!(foreign.to_string(), "has an XFS labelled \"Nodekeel\"");
        // A header that cannot be read describes no volume.
        let damaged = inspect(&[(0, b"LUKS\xba\xbe")]);
        assert_eq!(
            (damaged.volume, damaged.contents.to_string().as_str()),
            (DiskFinding::Foreign, "luks at byte 0")
        );
    }

    #[test]
    fn an_interrupted_erasure_is_not_an_interrupted_creation_on_a_blank_disk() {
        let uuid = super::super::uuid::Uuid([1; 16]);
        let mut superblock = [0; 2048];
        superblock[1080..1082].copy_from_slice(b"\x53\xef");
        let claim = |erased: &VolumeContents| encode_claim(uuid, DEFAULT_LABEL, erased);
        let blank = inspect(&[(claim_offset(8 << 20), &claim(&VolumeContents::Blank))]);
        assert_eq!(blank.volume, DiskFinding::Unfinished);
        let claim = claim(&inspect(&[(0, &superblock)]).contents);
        let erasing = inspect(&[(0, &superblock), (claim_offset(8 << 20), &claim)]);
        assert_eq!(erasing.volume, DiskFinding::Erasing);
    }

    #[test]
    fn a_token_names_one_content_of_one_disk() {
        let directory = tempfile::tempdir().unwrap();
        let disk = File::create(directory.path().join("disk")).unwrap();
        disk.set_len(8 << 20).unwrap();
        let token_of =
            |name: &str| inspect_disk(&directory.path().join(name)).unwrap().contents.erase_token().unwrap();
        let mut known = vec![token_of("disk")];
        // A superblock, its counters, files next to it, other data, and another size.
        for (offset, bytes) in [(1080, b"\x53\xef"), (1036, b"12"), (500_000, b"ab"), (1080, b"xx")] {
            disk.write_all_at(bytes, offset).unwrap();
            known.push(token_of("disk"));
        }
        disk.set_len(9 << 20).unwrap();
        known.push(token_of("disk"));
        let names: Vec<_> = known.iter().map(|token| token.rsplit_once('-').unwrap().0).collect();
        assert_eq!(
            names,
            ["unread-sampled", "ext-sampled", "ext-sampled", "ext-sampled", "data-sampled", "data-sampled"]
        );
        // A copy is another disk.
        std::fs::copy(directory.path().join("disk"), directory.path().join("copy")).unwrap();
        known.push(token_of("copy"));
        for (at, token) in known.iter().enumerate() {
            assert!(!known[..at].contains(token), "{known:?}");
        }
        assert_eq!(token_of("disk"), known[5], "an unchanged disk keeps its token");
        assert_eq!(VolumeContents::Files { entries: 3 }.erase_token().as_deref(), Some("files-3"));
    }

    #[test]
    fn a_disk_that_is_not_there_is_an_error() {
        let error = inspect_disk(Path::new("/dev/nowhere")).unwrap_err();
        assert!(matches!(error, VolumeError::Device { step: "open", .. }), "{error}");
    }
}
