//! The record that this node has a data volume on a device: a disk without data is then not the node's first one, but a wrong one.

use nodekeel_localstorage::volume::{DiskFinding, DiskReport, VolumeContents};
use nodekeel_localstorage::{Dir, FileMode};

use super::error::StorageError;

/// The name of the record, in `esp/`.
pub(super) const RECORD_FILE: &str = "data-volume.record";

const HEADER: &str = "nodekeel data volume on a device, format 1";
const DISK_BYTES: &str = "disk_bytes = ";
const FILE_SYSTEM: &str = "xfs = ";
const GIVEN_UP: &str = "given_up = ";
const VOLUME: &str = "volume = ";

/// The node's knowledge of its volume. A power cut may have damaged each line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct VolumeRecord {
    /// The size of the disk that the volume uses, in bytes.
    pub(super) disk_bytes: Option<u64>,
    /// The mark that distinguishes the file system of a volume that is not encrypted from that of another node. The keys of an
    /// encrypted one do.
    pub(super) file_system: Option<u32>,
    /// The UUID in the header of an encrypted volume.
    pub(super) volume: Option<String>,
    /// The mark of the contents in whose place a volume is being created: until then, the node has no volume.
    pub(super) given_up: Option<u32>,
}

impl VolumeRecord {
    /// The record of a disk with the node's volume.
    pub(super) fn of_disk(report: &DiskReport) -> Self {
        let (disk_bytes, file_system) = (Some(report.size_bytes), file_system_mark(report));
        Self { disk_bytes, file_system, volume: found_volume(report).map(str::to_owned), given_up: None }
    }

    /// The record of a node whose operator gave up the contents of a disk.
    pub(super) fn of_given_up(report: &DiskReport) -> Self {
        // Of data that a probe does not recognize, nothing is known later but that they were given up.
        Self { given_up: Some(report.contents.mark().unwrap_or_default()), ..Self::default() }
    }

    /// Returns whether the disk has the contents that the operator gave up: the erasure failed before it wrote.
    pub(super) fn gives_up(&self, report: &DiskReport) -> bool {
        let found = report.contents.mark();
        found.is_some() && self.given_up == found
    }

    /// Returns whether the disk may be that of the record.
    pub(super) fn is_of(&self, report: &DiskReport) -> bool {
        let (known, found) = (self.file_system, file_system_mark(report));
        (known.is_none() || found.is_none() || known == found) && self.other_volume(report).is_none()
    }

    /// The recorded volume, if the header of the disk is of another one.
    pub(super) fn other_volume(&self, report: &DiskReport) -> Option<&str> {
        let known = self.volume.as_deref()?;
        found_volume(report).is_some_and(|found| found != known).then_some(known)
    }

    /// The record by which the node knows its disk. One that has had a volume elsewhere has one without a disk; so has one
    /// that has recorded the id of its new volume, but not yet its disk in the place of contents that were given up.
    pub(super) fn of_node(on_device: Option<Self>, has_had_volume: bool) -> Option<Self> {
        let known = on_device.filter(|record| record.given_up.is_none() || !has_had_volume);
        known.or(has_had_volume.then(Self::default))
    }

    /// Reads the record of `esp/`; `None` if the node has had no volume.
    pub(super) fn read_from(esp: &Dir) -> Result<Option<Self>, StorageError> {
        match esp.read_at_most(RECORD_FILE, 4096) {
            // A damaged record is still a record: the node has had a volume.
            Ok(text) => Ok(Some(Self::parse(&String::from_utf8_lossy(&text)))),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(StorageError::Record(error)),
        }
    }

    /// Replaces the record, durably.
    pub(super) fn write_to(&self, esp: &Dir) -> Result<(), StorageError> {
        let mut text = format!("{HEADER}\n");
        text.extend(self.disk_bytes.map(|bytes| format!("{DISK_BYTES}{bytes}\n")));
        text.extend(self.file_system.map(|mark| format!("{FILE_SYSTEM}{mark:08x}\n")));
        text.extend(self.volume.as_ref().map(|volume| format!("{VOLUME}{volume}\n")));
        text.extend(self.given_up.map(|mark| format!("{GIVEN_UP}{mark:08x}\n")));
        esp.write(RECORD_FILE, text.as_bytes(), FileMode::PRIVATE_FILE).map_err(StorageError::Record)
    }

    /// The node has had no volume on a device from now on.
    pub(super) fn remove_from(esp: &Dir) -> Result<(), StorageError> {
        esp.remove_file(RECORD_FILE).map(drop).map_err(StorageError::Record)
    }

    fn parse(text: &str) -> Self {
        // A line without its end was cut off, and does not count.
        let mut lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        if lines.next() != Some(HEADER) {
            return Self::default();
        }
        let rest: Vec<_> = lines.collect();
        let value = |key: &str| rest.iter().find_map(|line| line.strip_prefix(key));
        Self {
            disk_bytes: value(DISK_BYTES).and_then(|bytes| bytes.parse().ok()),
            file_system: value(FILE_SYSTEM).and_then(parse_mark),
            volume: value(VOLUME).map(str::to_owned),
            given_up: value(GIVEN_UP).and_then(parse_mark),
        }
    }
}

fn parse_mark(text: &str) -> Option<u32> {
    u32::from_str_radix(text, 16).ok()
}

fn found_volume(report: &DiskReport) -> Option<&str> {
    match &report.volume {
        DiskFinding::Encrypted { volume, .. } => Some(volume),
        _ => None,
    }
}

/// The mark that distinguishes the file system of a volume that is not encrypted.
fn file_system_mark(report: &DiskReport) -> Option<u32> {
    match (&report.volume, &report.contents) {
        (DiskFinding::Plain, VolumeContents::Xfs { found, .. }) => Some(found.first()?.fingerprint),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_counts_until_the_new_volume_is_recorded() {
        let given_up = VolumeRecord { given_up: Some(1), ..VolumeRecord::default() };
        let disk = VolumeRecord { disk_bytes: Some(1), ..VolumeRecord::default() };
        for (on_device, has_had_volume, expected) in [
            (None, false, None),
            (None, true, Some(VolumeRecord::default())),
            (Some(disk.clone()), true, Some(disk.clone())),
            (Some(disk.clone()), false, Some(disk)),
            (Some(given_up.clone()), false, Some(given_up.clone())),
            (Some(given_up), true, Some(VolumeRecord::default())),
        ] {
            assert_eq!(VolumeRecord::of_node(on_device.clone(), has_had_volume), expected, "{on_device:?}");
        }
    }

    #[test]
    fn a_record_is_read_back_and_a_damaged_one_still_says_that_there_was_a_volume() {
        let scratch = tempfile::tempdir().expect("a directory");
        let esp = Dir::open(scratch.path()).expect("there");
        assert_eq!(VolumeRecord::read_from(&esp).expect("absent"), None);
        let given_up = VolumeRecord { given_up: Some(0x2b), ..VolumeRecord::default() };
        given_up.write_to(&esp).expect("written");
        assert_eq!(VolumeRecord::read_from(&esp).expect("read"), Some(given_up));
        let volume = Some("8f0f".to_owned());
        let record =
            VolumeRecord { disk_bytes: Some(1 << 30), file_system: Some(0x1a2b), volume, given_up: None };
        record.write_to(&esp).expect("written");
        assert_eq!(VolumeRecord::read_from(&esp).expect("read"), Some(record));
        let text = std::fs::read_to_string(scratch.path().join(RECORD_FILE)).expect("there");
        assert_eq!(
            text,
            "nodekeel data volume on a device, format 1\ndisk_bytes = 1073741824\nxfs = 00001a2b\nvolume = 8f0f\n"
        );
        for end in 0..text.len() {
            std::fs::write(scratch.path().join(RECORD_FILE), &text[..end]).expect("written");
            let found = VolumeRecord::read_from(&esp).expect("read").expect("there was a volume");
            assert!(found.disk_bytes.is_none_or(|bytes| bytes == 1 << 30), "cut at {end}: {found:?}");
            assert!(found.volume.is_none(), "cut at {end}: {found:?}");
        }
    }
}
