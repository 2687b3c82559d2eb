//! Which data volume is the node's: an id on the volume, and the node's record of that id outside of it. For every kind of
//! volume, also one that the program provides.
//!
//! | record in `esp/` | volume | root.storage |
//! |---|---|---|
//! | none | blank | creates it, and records it |
//! | none | with an id, or of a release without ids | opens it, and records it |
//! | an id | with the same id | opens it |
//! | an id | blank, or with another id | waits: the node's volume is lost |
//!
//! The id is on the volume before it is recorded: a start that was killed in between finds a volume without a record.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nodekeel_localstorage::volume::{DataVolume, ErasePolicy, VolumeError};
use nodekeel_localstorage::{Dir, Error as DirError, FileMode, FileOperation};

use super::decision::Attempt;
use super::error::StorageError;
use crate::layout::ESP_DIR;

/// The name of the record, in `esp/`.
const RECORD_FILE: &str = "data-volume.id";

/// The name of the file with the id, in the root directory of the volume.
const ID_FILE: &str = ".data-volume-id";

const HEADER: &str = "nodekeel data volume id, format 1";
/// The start of the header in every format.
const ANY_HEADER: &str = "nodekeel data volume id, format ";

/// *Source:* random(4): a random UUID at each reading.
const NEW_UUID: &str = "/proc/sys/kernel/random/uuid";

/// The id of a data volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VolumeId(String);

impl VolumeId {
    fn generate() -> Result<Self, StorageError> {
        let failed = |source| StorageError::Identity(DirError::new(FileOperation::Read, NEW_UUID, source));
        let text = fs::read_to_string(NEW_UUID).map_err(failed)?;
        text.trim_end().parse().map_err(|()| failed(std::io::ErrorKind::InvalidData.into()))
    }

    fn write_to(&self, dir: &Dir, name: &str) -> Result<(), StorageError> {
        let text = format!("{HEADER}\n{self}\n");
        dir.write(name, text.as_bytes(), FileMode::PRIVATE_FILE).map_err(StorageError::Identity)
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for VolumeId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let is_uuid = text.len() == 36 && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        is_uuid.then(|| Self(text.to_owned())).ok_or(())
    }
}

/// The node's record of its volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RecordedVolume {
    /// It has had none.
    None,
    /// It has had this one.
    Id(VolumeId),
    /// It has had one: the record is damaged.
    Damaged,
}

impl RecordedVolume {
    pub(super) fn read_from(esp: &Dir) -> Result<Self, StorageError> {
        Ok(match read_id(esp, RECORD_FILE)? {
            None => Self::None,
            Some(Some(id)) => Self::Id(id),
            Some(None) => Self::Damaged,
        })
    }

    /// Returns whether the node has had a volume.
    pub(super) fn exists(&self) -> bool {
        *self != Self::None
    }
}

/// The id in a file: `None` without the file, `Some(None)` if it is damaged.
fn read_id(dir: &Dir, name: &str) -> Result<Option<Option<VolumeId>>, StorageError> {
    let text = match dir.read_at_most(name, 4096) {
        Ok(text) => String::from_utf8_lossy(&text).into_owned(),
        Err(error) if error.is_not_found() => return Ok(None),
        Err(error) => return Err(StorageError::Identity(error)),
    };
    match text.split_once('\n') {
        Some((header, id)) if header == HEADER => {
            Ok(Some(id.strip_suffix('\n').and_then(|id| id.parse().ok())))
        }
        Some((header, _)) if header.starts_with(ANY_HEADER) => {
            Err(StorageError::NewerIdentity { path: dir.path().join(name) })
        }
        _ => Ok(Some(None)),
    }
}

/// The step with a volume that has opened.
#[derive(Debug, Clone, PartialEq, Eq)]
enum IdentityStep {
    /// It is the node's, and recorded.
    Keep,
    /// Record this id.
    Record(VolumeId),
    /// Give it an id, and record that.
    Assign,
    /// Close it: it is another one than the node's.
    Refuse,
}

/// Decides by the record, and by the id of the volume that has opened.
fn decide_step(record: RecordedVolume, found: Option<VolumeId>) -> IdentityStep {
    match (record, found) {
        (RecordedVolume::None | RecordedVolume::Damaged, Some(id)) => IdentityStep::Record(id),
        (RecordedVolume::None, None) => IdentityStep::Assign,
        (RecordedVolume::Id(known), Some(id)) if known == id => IdentityStep::Keep,
        (RecordedVolume::Id(_) | RecordedVolume::Damaged, _) => IdentityStep::Refuse,
    }
}

/// Checks that a volume that has opened is the node's, and makes it that of a node that has had none, unless the attempt
/// changes nothing.
///
/// # Errors
/// [`StorageError::LostVolume`] if it is another one.
pub(super) fn settle_identity(esp: &Dir, volume: &Dir, attempt: Attempt<'_>) -> Result<(), StorageError> {
    let found = read_id(volume, ID_FILE)?.flatten();
    let recorded = match decide_step(RecordedVolume::read_from(esp)?, found) {
        IdentityStep::Keep => return Ok(()),
        IdentityStep::Record(_) | IdentityStep::Assign if attempt == Attempt::Open => return Ok(()),
        IdentityStep::Refuse => return Err(lost(volume.path(), "is another one")),
        IdentityStep::Record(id) => id.write_to(esp, RECORD_FILE),
        IdentityStep::Assign => {
            let id = VolumeId::generate()?;
            id.write_to(volume, ID_FILE).and_then(|()| id.write_to(esp, RECORD_FILE))
        }
    };
    match recorded {
        // The volume of an earlier release opens on a full disk, too. The next start tries again.
        Err(StorageError::Identity(error)) if error.is_full() => {
            tracing::warn!(
                "can't record which data volume is the node's: {}",
                crate::error_chain::error_chain(&error)
            );
            Ok(())
        }
        recorded => recorded,
    }
}

/// Returns whether there is no volume. An unfinished one was cut off before the last step of its creation, and has no data.
pub(super) fn is_absent<T>(opened: &Result<T, VolumeError>) -> bool {
    matches!(opened, Err(VolumeError::Absent { .. } | VolumeError::Unfinished { .. }))
}

/// Opens a volume. Creates it if it is blank, and the node has had none.
pub(super) fn open_or_create(
    esp: &Dir,
    volume: &dyn DataVolume,
    place: &Path,
    attempt: Attempt<'_>,
) -> Result<Dir, StorageError> {
    match volume.mount_existing() {
        opened if is_absent(&opened) => {
            if RecordedVolume::read_from(esp)?.exists() {
                return Err(lost(place, "is empty"));
            }
            if attempt == Attempt::Open {
                return Err(StorageError::NoVolume);
            }
            let dir = volume.mount_new(ErasePolicy::Nothing).map_err(StorageError::Open)?;
            tracing::info!("created the data volume");
            Ok(dir)
        }
        opened => opened.map_err(StorageError::Open),
    }
}

/// The operator has given up the volume: the node has had none from now on.
pub(super) fn forget_volume(esp: &Dir) -> Result<(), StorageError> {
    esp.remove_file(RECORD_FILE).map(drop).map_err(StorageError::Identity)
}

/// How the directory of the volume is not the node's volume, without a change. `None` also if that can't be found out:
/// root.storage reports it.
pub(super) fn describe_loss(data: &Path, volume: &Path) -> Option<&'static str> {
    let esp = Dir::open(data.join(ESP_DIR)).ok()?;
    let record = RecordedVolume::read_from(&esp).ok().filter(RecordedVolume::exists)?;
    let Ok(dir) = Dir::open(volume) else { return Some("is not there") };
    let found = read_id(&dir, ID_FILE).ok()?.flatten();
    match decide_step(record, found) {
        IdentityStep::Refuse if dir.list().is_ok_and(|entries| entries.is_empty()) => Some("is empty"),
        IdentityStep::Refuse => Some("is another one"),
        _ => None,
    }
}

fn lost(volume: &Path, found: &'static str) -> StorageError {
    StorageError::LostVolume { path: PathBuf::from(volume), found }
}

#[cfg(test)]
mod tests {
    use nodekeel_localstorage::volume::DirectoryVolume;

    use super::*;

    fn id(digit: char) -> VolumeId {
        "00000000-0000-4000-8000-00000000000x".replace('x', &digit.to_string()).parse().expect("an id")
    }

    #[test]
    fn a_node_opens_its_own_volume_and_takes_no_other_one_in_its_place() {
        use IdentityStep::{Assign, Keep, Record, Refuse};
        for (record, found, step) in [
            (RecordedVolume::None, None, Assign),
            (RecordedVolume::None, Some(id('1')), Record(id('1'))),
            (RecordedVolume::Id(id('1')), Some(id('1')), Keep),
            (RecordedVolume::Id(id('1')), Some(id('2')), Refuse),
            (RecordedVolume::Id(id('1')), None, Refuse),
            (RecordedVolume::Damaged, Some(id('2')), Record(id('2'))),
            (RecordedVolume::Damaged, None, Refuse),
        ] {
            assert_eq!(decide_step(record.clone(), found.clone()), step, "{record:?} {found:?}");
        }
    }

    #[test]
    fn an_attempt_that_changes_nothing_creates_and_records_no_volume() {
        let scratch = tempfile::tempdir().expect("a directory");
        let esp = Dir::open(scratch.path()).expect("there");
        let disk = esp.ensure_dir("disk", FileMode::PRIVATE_DIR).expect("made");
        let open = |attempt| {
            let volume = DirectoryVolume::new(disk.try_clone().expect("open"));
            let opened = open_or_create(&esp, &volume, disk.path(), attempt)?;
            settle_identity(&esp, &opened, attempt)
        };
        assert!(matches!(open(Attempt::Open), Err(StorageError::NoVolume)));
        assert_eq!(disk.list().expect("listed").len(), 0);
        let other = DirectoryVolume::new(disk.try_clone().expect("open"));
        other.mount_new(ErasePolicy::Nothing).expect("another node's");
        open(Attempt::Open).expect("opened");
        assert!(!RecordedVolume::read_from(&esp).expect("read").exists());
        assert_eq!(disk.list().expect("listed").len(), 1, "it got no id");
    }

    #[test]
    fn a_volume_that_is_gone_is_not_created_again_until_the_operator_gives_it_up() {
        let scratch = tempfile::tempdir().expect("a directory");
        let make = |name: &str| {
            let path = scratch.path().join(name);
            fs::create_dir(&path).expect("made");
            Dir::open(path).expect("there")
        };
        let (esp, disk, other) = (make("esp"), make("disk"), make("other"));
        let open = |dir: &Dir| {
            let volume = DirectoryVolume::new(dir.try_clone().expect("open"));
            let attempt = Attempt::OpenOrCreate { erase_permit: None };
            let opened = open_or_create(&esp, &volume, dir.path(), attempt)?;
            settle_identity(&esp, &opened, attempt)
        };
        open(&disk).expect("created");
        open(&disk).expect("opened");
        let says = |dir: &Dir, found: &str| {
            let error = open(dir).expect_err("another one").to_string();
            let starts = format!("the node's data volume is lost: {} {found}", dir.path().display());
            assert!(error.starts_with(&starts) && error.ends_with("type: nodectl reset"), "{error}");
        };
        says(&other, "is empty");
        assert!(other.list().expect("listed").is_empty(), "nothing is written");
        // A volume of an earlier release, or of another node.
        other
            .write(
                nodekeel_localstorage::volume::VOLUME_MARK_FILE,
                nodekeel_localstorage::volume::VOLUME_MARK.as_bytes(),
                FileMode::PRIVATE_FILE,
            )
            .expect("marked");
        says(&other, "is another one");
        open(&disk).expect("it is back");
        // A record that a power cut has damaged permits no new one.
        for damaged in ["", "nodekeel data volume id, format 1\n0000"] {
            fs::write(esp.path().join(RECORD_FILE), damaged).expect("written");
            says(&other, "is another one");
            open(&disk).expect("it has an id");
        }
        fs::write(esp.path().join(RECORD_FILE), "nodekeel data volume id, format 2\n").expect("written");
        assert!(matches!(open(&disk), Err(StorageError::NewerIdentity { .. })));
        forget_volume(&esp).expect("removed");
        open(&other).expect("the node's from now on");
        says(&disk, "is another one");
    }
}
