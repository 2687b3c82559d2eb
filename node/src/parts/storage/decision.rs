//! Decides the step with a disk by its contents, and by the volume that this node has had.

use std::path::Path;

use nodekeel_localstorage::volume::{DiskFinding, DiskReport, VolumeEncryption, VolumeError};

use super::error::StorageError;
use super::record::VolumeRecord;

/// The disk, as the configuration and the node's record describe it.
#[derive(Debug)]
pub(super) struct Expectation<'a> {
    pub(super) device: &'a Path,
    /// `None` if the volume is not to be encrypted.
    pub(super) encryption: Option<VolumeEncryption>,
    /// The record of the volume that this node has had.
    pub(super) record: Option<VolumeRecord>,
    /// The token of the contents that an operator has agreed to erase.
    pub(super) erase_permit: Option<&'a str>,
    /// The disk whose volume is to be copied to this one. `None` once this one has the node's volume.
    pub(super) copy: Option<ExpectedCopy<'a>>,
}

/// The disk that a copy is made from, and what it has.
#[derive(Debug)]
pub(super) struct ExpectedCopy<'a> {
    pub(super) from: &'a Path,
    pub(super) report: Result<DiskReport, VolumeError>,
}

/// How far an attempt to open the volume may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt<'a> {
    /// It opens the node's volume, and creates, grows and records nothing: an operator is about to decide.
    Open,
    /// It creates a volume where the node has had none.
    OpenOrCreate {
        /// The token of the contents that an operator has agreed to erase.
        erase_permit: Option<&'a str>,
    },
}

impl<'a> Attempt<'a> {
    pub(super) fn erase_permit(self) -> Option<&'a str> {
        match self {
            Self::Open => None,
            Self::OpenOrCreate { erase_permit } => erase_permit,
        }
    }
}

/// The next step with a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskStep {
    /// Open the volume.
    Open,
    /// Create a volume, or complete one. Only a disk that was read and is blank is written to, and what an interrupted
    /// creation has left.
    Create,
    /// Create a volume in the place of the contents.
    Erase,
    /// Copy the node's volume from its disk.
    Copy,
    /// Complete the copy that the record names: all of it is copied.
    CompleteCopy,
}

/// Decides what to do with a disk. Only what was seen is ever erased, and only if its token was given.
pub(super) fn decide_step(
    report: &DiskReport,
    mut expected: Expectation<'_>,
) -> Result<DiskStep, StorageError> {
    if let Some(copy) = expected.copy.take()
        && let Some(step) = decide_copy(report, &expected, copy)?
    {
        return Ok(step);
    }
    let token = report.contents.erase_token();
    // The operator's permit comes before all checks: it names exactly these contents.
    if token.is_some() && token.as_deref() == expected.erase_permit {
        return Ok(DiskStep::Erase);
    }
    // The disk still has the contents that the operator gave up. A new erasure needs a new permit.
    if expected.record.as_ref().is_some_and(|record| record.gives_up(report)) {
        let (device, found) = (expected.device.to_owned(), report.contents.clone());
        return Err(StorageError::Occupied { device, found });
    }
    let record = expected.record.as_ref().filter(|record| record.given_up.is_none());
    let was_given_up = expected.record.is_some() && record.is_none();
    let lost = || {
        let (device, report) = (expected.device.to_owned(), Box::new(report.clone()));
        Err(StorageError::Lost { device, report })
    };
    let is_expected = match &report.volume {
        DiskFinding::Plain => expected.encryption.is_none(),
        DiskFinding::Encrypted { encryption, .. } => expected.encryption == Some(*encryption),
        // A disk of the recorded size whose header is gone is rather the node's own than another one.
        DiskFinding::Unread | DiskFinding::Foreign
            if expected.encryption.is_some()
                && record.is_some_and(|record| record.disk_bytes == Some(report.size_bytes)) =>
        {
            let (device, report) = (expected.device.to_owned(), Box::new(report.clone()));
            return Err(StorageError::HeaderLost { device, report });
        }
        // All of a copy is there, which its creation knows by the journal.
        DiskFinding::Unfinished if record.is_some_and(|record| record.volume.is_some()) => {
            return Ok(DiskStep::CompleteCopy);
        }
        _ if record.is_some() => return lost(),
        // Another node's operator gave up what this disk had, or may still have.
        DiskFinding::Erasing if !was_given_up => {
            return Err(StorageError::OtherErasure { device: expected.device.to_owned() });
        }
        // It is neither read nor written to while something uses it.
        DiskFinding::Unread if report.users.is_some() => {
            let (path, users) = (expected.device.to_owned(), report.users.clone().unwrap_or_default());
            return Err(StorageError::Open(VolumeError::InUse { path, users }));
        }
        // The remains of an interrupted creation may have no name yet: the creation knows them by its journal. It removes the
        // mappings that it has left.
        _ => return Ok(DiskStep::Create),
    };
    match record {
        _ if !is_expected => {
            let (device, report) = (expected.device.to_owned(), Box::new(report.clone()));
            let configured = describe_mode(expected.encryption);
            Err(StorageError::OtherEncryption { device, report, configured })
        }
        // Compared before any key is tried.
        Some(record) if record.other_volume(report).is_some() => {
            let recorded = record.other_volume(report).unwrap_or_default().to_owned();
            let (device, report) = (expected.device.to_owned(), Box::new(report.clone()));
            Err(StorageError::OtherVolume { device, report, recorded })
        }
        Some(record) if record.disk_bytes > Some(report.size_bytes) => Err(StorageError::Shrunk {
            device: expected.device.to_owned(),
            found: report.size_bytes,
            recorded: record.disk_bytes.unwrap_or_default(),
        }),
        // The mark distinguishes the node's own disk from that of another node.
        Some(record) if !record.is_of(report) => lost(),
        _ => Ok(DiskStep::Open),
    }
}

/// Decides about a copy to a disk that does not have the node's volume. None if there is nothing to copy to it: then its
/// contents decide.
fn decide_copy(
    report: &DiskReport,
    expected: &Expectation<'_>,
    copy: ExpectedCopy<'_>,
) -> Result<Option<DiskStep>, StorageError> {
    let (device, from) = (expected.device.to_owned(), copy.from.to_owned());
    let Some(record) = expected.record.as_ref().filter(|record| record.given_up.is_none()) else {
        return match report.volume {
            DiskFinding::Encrypted { .. } => Ok(None),
            _ => Err(StorageError::NothingToCopy { from }),
        };
    };
    let source = match &copy.report {
        Ok(source) => match &source.volume {
            DiskFinding::Encrypted { encryption, .. } if record.is_of(source) => Some(*encryption),
            _ => None,
        },
        Err(_) => None,
    };
    match (&report.volume, copy.report) {
        // It is committed: without the disk that it was made from, its creation knows it by the journal.
        (DiskFinding::Unfinished, _) if source.is_none() => Ok(Some(DiskStep::CompleteCopy)),
        (_, Ok(report)) if source.is_some() && source != expected.encryption => {
            let (report, configured) = (Box::new(report), describe_mode(expected.encryption));
            Err(StorageError::OtherEncryption { device: from, report, configured })
        }
        (DiskFinding::Unread, _) if source.is_some() && report.users.is_some() => {
            let users = report.users.clone().unwrap_or_default();
            Err(StorageError::Open(VolumeError::InUse { path: device, users }))
        }
        // A format that was cut off has no name yet: its creation knows it by the journal, and writes to no other data.
        (DiskFinding::Unread | DiskFinding::Unfinished | DiskFinding::Foreign, _) if source.is_some() => {
            Ok(Some(DiskStep::Copy))
        }
        // It may be the newest volume of the node, whose record is an older one.
        (DiskFinding::Encrypted { .. }, _) => Ok(None),
        (_, Ok(_)) if source.is_some() => Err(StorageError::CopyTarget { device, found: report.to_string() }),
        (DiskFinding::Unread, Ok(source)) => {
            Err(StorageError::NoCopySource { device, from, report: Box::new(source) })
        }
        (DiskFinding::Unread | DiskFinding::Foreign, Err(error)) => Err(StorageError::Open(error)),
        _ => Ok(None),
    }
}

/// Returns whether an interrupted creation may be the node's, which has no volume yet. The record of given up contents is
/// not the record of a volume.
pub(super) fn may_complete(record: Option<&VolumeRecord>) -> bool {
    record.is_none_or(|record| record.given_up.is_some())
}

/// The value of `storage.encryption`.
fn describe_mode(encryption: Option<VolumeEncryption>) -> &'static str {
    match encryption {
        Some(VolumeEncryption::EncryptedAndAuthenticated) => "\"encrypted-and-authenticated\"",
        Some(_) => "\"encrypted\"",
        None => "\"none\"",
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use nodekeel_localstorage::volume::{KeyPolicy, inspect_disk};

    use super::*;
    use crate::error_chain::error_chain;

    const MODES: [Option<VolumeEncryption>; 3] =
        [None, Some(VolumeEncryption::Encrypted), Some(VolumeEncryption::EncryptedAndAuthenticated)];

    /// The report of an image with these bytes at its start.
    fn report_of(start: &[u8]) -> DiskReport {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("disk");
        let disk = File::create(&path).expect("created");
        disk.set_len(4 << 20).expect("grown");
        disk.write_all_at(start, 0).expect("written");
        inspect_disk(&path).expect("read")
    }

    fn with_volume(volume: DiskFinding) -> DiskReport {
        let mut report = report_of(b"LUKS\xba\xbe");
        report.volume = volume;
        report
    }

    fn expect(encryption: Option<VolumeEncryption>) -> Expectation<'static> {
        Expectation {
            device: Path::new("/dev/sdb"),
            encryption,
            record: None,
            erase_permit: None,
            copy: None,
        }
    }

    #[test]
    fn a_volume_is_opened_only_as_it_is_encrypted() {
        let encrypted = |encryption| DiskFinding::Encrypted {
            volume: "1".into(),
            encryption,
            keys: KeyPolicy::Local,
            node: None,
        };
        for (volume, right) in [
            (DiskFinding::Plain, MODES[0]),
            (encrypted(VolumeEncryption::Encrypted), MODES[1]),
            (encrypted(VolumeEncryption::EncryptedAndAuthenticated), MODES[2]),
        ] {
            let report = with_volume(volume);
            for mode in MODES {
                let step = decide_step(&report, expect(mode));
                if mode == right {
                    assert!(matches!(step, Ok(DiskStep::Open)), "{step:?}")
                } else {
                    assert!(matches!(step, Err(StorageError::OtherEncryption { .. })), "{step:?}")
                }
            }
        }
    }

    #[test]
    fn a_node_that_has_had_a_volume_creates_no_other_one() {
        let record = Some(VolumeRecord::default());
        for volume in
            [DiskFinding::Unread, DiskFinding::Unfinished, DiskFinding::Foreign, DiskFinding::Erasing]
        {
            let report = with_volume(volume);
            let is_erasing = report.volume == DiskFinding::Erasing;
            assert!(
                is_erasing || matches!(decide_step(&report, expect(None)), Ok(DiskStep::Create)),
                "{report:?}"
            );
            let lost = decide_step(&report, Expectation { record: record.clone(), ..expect(None) })
                .expect_err("lost");
            assert!(matches!(lost, StorageError::Lost { .. }), "{lost:?}");
            assert!(lost.to_string().ends_with("type: nodectl reset"), "{lost}");
        }
    }

    #[test]
    fn what_the_node_recorded_of_its_volume_is_compared_before_any_key() {
        let volume = |uuid: &str| DiskFinding::Encrypted {
            volume: uuid.into(),
            encryption: VolumeEncryption::Encrypted,
            keys: KeyPolicy::Local,
            node: Some("node-2".into()),
        };
        let size = 4 << 20;
        let recorded =
            VolumeRecord { disk_bytes: Some(size), volume: Some("1".into()), ..VolumeRecord::default() };
        let decide = |finding, size_bytes| {
            let mut report = with_volume(finding);
            report.size_bytes = size_bytes;
            let record = Some(recorded.clone());
            decide_step(&report, Expectation { record, ..expect(MODES[1]) })
                .map_err(|error| error.to_string())
        };
        assert!(matches!(decide(volume("1"), size), Ok(DiskStep::Open)));
        assert!(matches!(decide(volume("1"), size + 1), Ok(DiskStep::Open)), "it has grown");
        for (finding, size, says) in [
            (volume("1"), size - 512, "has 4193792 bytes, 512 fewer than the 4194304 that esp/ records"),
            (volume("2"), size, "of node node-2, and is volume 2, but esp/ records volume 1"),
            (volume("2"), size - 512, "is volume 2, but esp/ records volume 1"),
            (DiskFinding::Foreign, size, "type: nodectl storage header restore FILE"),
            (DiskFinding::Unread, size, "type: nodectl storage header restore FILE"),
            // Rather another disk.
            (DiskFinding::Unread, size + 512, "attach its disk"),
            (DiskFinding::Foreign, size - 512, "attach its disk"),
        ] {
            let error = decide(finding, size).expect_err(says);
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_blank_disk_that_something_uses_is_left_alone() {
        let mut report = report_of(b"");
        assert!(matches!(decide_step(&report, expect(None)), Ok(DiskStep::Create)));
        report.users = Some("mounted on /srv: `umount /srv`".into());
        let refused = decide_step(&report, expect(None));
        assert!(matches!(&refused, Err(StorageError::Open(VolumeError::InUse { .. }))), "{refused:?}");
        report.volume = DiskFinding::Unfinished;
        assert!(matches!(decide_step(&report, expect(None)), Ok(DiskStep::Create)), "by its creation");
    }

    #[test]
    fn an_erasure_is_completed_only_by_a_node_whose_operator_gave_the_contents_up() {
        let report = with_volume(DiskFinding::Erasing);
        let error = decide_step(&report, expect(None)).expect_err("another node's");
        assert!(matches!(error, StorageError::OtherErasure { .. }), "{error}");
        let record = Some(VolumeRecord { given_up: Some(0), ..VolumeRecord::default() });
        let own = decide_step(&report, Expectation { record, ..expect(None) });
        assert!(matches!(own, Ok(DiskStep::Create)), "{own:?}");
    }

    #[test]
    fn the_volume_of_another_node_is_not_opened_in_the_place_of_the_own_one() {
        let mut superblock = [0; 512];
        superblock[..4].copy_from_slice(b"XFSB");
        superblock[108..116].copy_from_slice(b"nodekeel");
        let own = report_of(&superblock);
        superblock[32] = 1;
        let other = report_of(&superblock);
        let expected = || Expectation { record: Some(VolumeRecord::of_disk(&own)), ..expect(None) };
        assert!(matches!(decide_step(&own, expected()), Ok(DiskStep::Open)));
        assert!(matches!(decide_step(&other, expected()), Err(StorageError::Lost { .. })));
        assert!(matches!(decide_step(&other, expect(None)), Ok(DiskStep::Open)), "it has had no volume yet");
    }

    #[test]
    fn a_volume_that_was_given_up_and_not_erased_is_not_opened_in_the_place_of_the_own_one() {
        let mut superblock = [0; 512];
        superblock[..4].copy_from_slice(b"XFSB");
        superblock[108..116].copy_from_slice(b"nodekeel");
        let other = report_of(&superblock);
        superblock[32] = 1;
        let new = report_of(&superblock);
        let token = other.contents.erase_token();
        let record = Some(VolumeRecord::of_given_up(&other));
        let expected = || Expectation { record: record.clone(), ..expect(None) };
        assert!(matches!(decide_step(&other, expected()), Err(StorageError::Occupied { .. })));
        let again = Expectation { erase_permit: token.as_deref(), ..expected() };
        assert!(matches!(decide_step(&other, again), Ok(DiskStep::Erase)));
        // A volume in the place of the erased contents opens, or its creation resumes.
        assert!(matches!(decide_step(&new, expected()), Ok(DiskStep::Open)));
        assert!(matches!(decide_step(&report_of(b""), expected()), Ok(DiskStep::Create)));
    }

    #[test]
    fn only_the_contents_whose_token_was_given_are_erased() {
        let (report, other) = (report_of(b"LUKS\xba\xbe"), report_of(b"LUKS\xba\xbe\0\x01"));
        let token = report.contents.erase_token();
        let permitted = || Expectation { erase_permit: token.as_deref(), ..expect(None) };
        assert!(matches!(decide_step(&report, permitted()), Ok(DiskStep::Erase)));
        assert!(
            matches!(decide_step(&other, permitted()), Ok(DiskStep::Create)),
            "which then finds it occupied"
        );
        assert!(
            matches!(decide_step(&report_of(b""), permitted()), Ok(DiskStep::Create)),
            "it has no data that were seen"
        );
        let empty = Expectation { erase_permit: Some(""), ..expect(None) };
        assert!(matches!(decide_step(&report, empty), Ok(DiskStep::Create)));
    }

    #[test]
    fn a_volume_is_copied_only_from_the_disk_that_has_it_and_only_to_a_blank_one() {
        let volume = |uuid: &str| DiskFinding::Encrypted {
            volume: uuid.into(),
            encryption: VolumeEncryption::Encrypted,
            keys: KeyPolicy::Local,
            node: None,
        };
        let record = |uuid: &str| VolumeRecord {
            disk_bytes: Some(4 << 20),
            volume: Some(uuid.into()),
            ..VolumeRecord::default()
        };
        let blank = || report_of(b"");
        let decide =
            |mut target: DiskReport, finding: DiskFinding, source: Option<&str>, known: Option<&str>| {
                target.volume = finding;
                let report = match source {
                    Some(uuid) => Ok(with_volume(volume(uuid))),
                    None => Err(VolumeError::Absent { path: "/dev/sda".into() }),
                };
                let copy = Some(ExpectedCopy { from: Path::new("/dev/sda"), report });
                let expected = Expectation { record: known.map(record), copy, ..expect(MODES[1]) };
                decide_step(&target, expected).map_err(|error| error_chain(&error))
            };
        let step = |finding, source, known| decide(blank(), finding, source, known);
        assert_eq!(step(DiskFinding::Unread, Some("1"), Some("1")), Ok(DiskStep::Copy));
        assert_eq!(step(DiskFinding::Unfinished, Some("1"), Some("1")), Ok(DiskStep::Copy), "it goes on");
        assert_eq!(
            step(DiskFinding::Foreign, Some("1"), Some("1")),
            Ok(DiskStep::Copy),
            "its format was cut off"
        );
        // The record names the copy, and the disk that it was made from may be gone.
        assert_eq!(step(DiskFinding::Unfinished, Some("1"), Some("2")), Ok(DiskStep::CompleteCopy));
        assert_eq!(step(DiskFinding::Unfinished, None, Some("2")), Ok(DiskStep::CompleteCopy));
        for (finding, source, known, says) in [
            (DiskFinding::Unread, Some("3"), Some("1"), "name the disk that has it"),
            (DiskFinding::Unread, None, Some("1"), "no data volume on /dev/sda"),
            (DiskFinding::Unread, Some("1"), None, "has no record of a volume"),
            (DiskFinding::Unfinished, Some("1"), None, "has no record of a volume"),
            (DiskFinding::Plain, Some("1"), Some("1"), "name a blank disk"),
            (DiskFinding::Erasing, Some("1"), Some("1"), "name a blank disk"),
            (DiskFinding::Foreign, None, Some("1"), "no data volume on /dev/sda"),
            // Never a reason to clear it: it may be a copy that is newer than the record.
            (volume("4"), Some("1"), Some("1"), "is volume 4, but esp/ records volume 1"),
            (volume("4"), Some("3"), Some("1"), "is volume 4, but esp/ records volume 1"),
        ] {
            let error = step(finding.clone(), source, known).expect_err(says);
            assert!(error.contains(says), "{finding:?}: {error}");
        }
        // Also once the configuration does not name the former disk any more.
        let mut half = blank();
        half.volume = DiskFinding::Unfinished;
        let expected = Expectation { record: Some(record("2")), ..expect(MODES[1]) };
        assert!(matches!(decide_step(&half, expected), Ok(DiskStep::CompleteCopy)));
        let other = Expectation {
            copy: Some(ExpectedCopy { from: Path::new("/dev/sda"), report: Ok(with_volume(volume("1"))) }),
            record: Some(record("1")),
            ..expect(MODES[2])
        };
        let refused = decide_step(&blank(), other);
        assert!(matches!(refused, Err(StorageError::OtherEncryption { .. })), "{refused:?}");
        // Without a record, a volume that is there is opened as without a copy.
        assert_eq!(step(volume("4"), Some("1"), None), Ok(DiskStep::Open));
        let mut used = blank();
        used.users = Some("mounted on /srv: `umount /srv`".into());
        let refused = decide(used, DiskFinding::Unread, Some("1"), Some("1")).expect_err("in use");
        assert!(refused.contains("umount /srv"), "{refused}");
    }
}
