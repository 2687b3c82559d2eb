//! The contents of a disk, read without a key, a journal or a mount: for people who decide about it.

use std::fmt;
use std::path::Path;

use super::VolumeError;
use super::claim::claim_line;
use super::disk::{Disk, DiskAccess};
use super::filesystem::DEFAULT_LABEL;
#[cfg(feature = "luks")]
use super::luks::{KeyPolicy, VolumeEncryption, VolumeProgress, VolumeToken, read_volume_token_of};
use super::probe::VolumeContents;

/// The contents of a disk, and the volume on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskReport {
    /// The size, in bytes.
    pub size_bytes: u64,
    /// The contents, by their signatures.
    pub contents: VolumeContents,
    /// The volume on it, as it describes itself. Only opening it shows whether that is true.
    pub volume: DiskFinding,
}

/// The volume on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskFinding {
    /// None: the disk is blank.
    Blank,
    /// One whose creation was interrupted.
    Unfinished,
    /// One that is not encrypted: an XFS with our label.
    Plain,
    /// One that is encrypted.
    #[cfg(feature = "luks")]
    Encrypted {
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
            DiskFinding::Blank => f.write_str("is blank"),
            DiskFinding::Unfinished => f.write_str("has a data volume whose creation was interrupted"),
            DiskFinding::Plain => f.write_str("has a data volume that is not encrypted"),
            #[cfg(feature = "luks")]
            DiskFinding::Encrypted { encryption, keys, node } => {
                write!(f, "has a data volume that is {encryption}, with {keys} keys")?;
                node.as_ref().map_or(Ok(()), |node| write!(f, ", of node {node}"))
            }
            DiskFinding::Foreign => write!(f, "has {}", self.contents),
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
        VolumeContents::Blank => DiskFinding::Blank,
        VolumeContents::Interrupted => DiskFinding::Unfinished,
        // No configuration is known here, and so no other label: such a volume counts as foreign.
        VolumeContents::Xfs { label, .. } if label == DEFAULT_LABEL => DiskFinding::Plain,
        #[cfg(feature = "luks")]
        VolumeContents::Occupied { .. } => match read_volume_token_of(&disk)? {
            None => DiskFinding::Foreign,
            Some(token) if token.state == VolumeProgress::Unfinished => DiskFinding::Unfinished,
            Some(VolumeToken { encryption, keys, node, .. }) => {
                DiskFinding::Encrypted { encryption, keys, node }
            }
        },
        _ => DiskFinding::Foreign,
    };
    Ok(DiskReport { size_bytes: disk.size(), contents, volume })
}

impl VolumeContents {
    /// A word that names these contents, and no others: a person who has seen them copies it, to agree that they are
    /// erased. None if there is nothing to erase.
    pub fn erase_token(&self) -> Option<String> {
        if let VolumeContents::Files { entries } = self {
            return Some(format!("files-{entries}"));
        }
        let found = self.signatures();
        let lines: Vec<_> = found.iter().map(claim_line).collect();
        let sum = crc32c::crc32c(lines.join("\n").as_bytes());
        Some(format!("{}-{sum:08x}", found.first()?.name))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

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
        assert_eq!((blank.size_bytes, &blank.volume), (8 << 20, &DiskFinding::Blank));
        assert_eq!((blank.to_string().as_str(), blank.contents.erase_token()), ("is blank", None));
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
    fn a_token_names_one_content_of_one_disk() {
        let tokens = [(1080, b"\x53\xef\x01"), (1080, b"\x53\xef\x02"), (1024, b"\x53\xef\x01")]
            .map(|(offset, bytes)| inspect(&[(offset, bytes)]).contents.erase_token().unwrap());
        assert!(tokens[0].starts_with("ext") && tokens[2].starts_with("data-"), "{tokens:?}");
        assert!(tokens[0] != tokens[1] && tokens[1] != tokens[2], "{tokens:?}");
        assert_eq!(VolumeContents::Files { entries: 3 }.erase_token().as_deref(), Some("files-3"));
    }

    #[test]
    fn a_disk_that_is_not_there_is_an_error() {
        let error = inspect_disk(Path::new("/dev/nowhere")).unwrap_err();
        assert!(matches!(error, VolumeError::Device { step: "open", .. }), "{error}");
    }
}
