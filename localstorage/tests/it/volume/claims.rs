//! Formats that were interrupted, and data that was written since.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_localstorage::mount::{MountError, MountInfo, MountSpec, Mounter};
use nodekeel_localstorage::volume::{DataVolume as _, DiskVolume, ErasePolicy, VolumeContents, VolumeError};

use super::{MIB, MKFS_SCRIPT, VolumeFixture};

/// Is killed after its first bytes.
fn half_mkfs_script() -> String {
    MKFS_SCRIPT.replace("# Half of it is written.", "kill -9 $$")
}

#[test]
fn data_written_after_an_interrupted_format_is_never_erased() {
    for (name, offset, magic) in
        [("ext", 1080, &b"\x53\xef"[..]), ("gpt", 512, b"EFI PART"), ("XFS", 0, b"XFSB")]
    {
        let fixture = VolumeFixture::new();
        fixture.write_mkfs(&half_mkfs_script());
        assert!(matches!(fixture.volume().mount_new(ErasePolicy::Nothing), Err(VolumeError::Format { .. })));
        assert_eq!(fixture.contents(), VolumeContents::Interrupted);
        // Another program writes to the disk. Only the format of the claim wipes the claim.
        fixture.write(offset, magic);
        fixture.write_mkfs(MKFS_SCRIPT);
        let before = fixture.bytes();
        let rejected = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
        assert!(matches!(rejected, VolumeError::Occupied { .. }), "{name}: {rejected:?}");
        assert!(rejected.to_string().contains(name), "{rejected}");
        assert!(before == fixture.bytes(), "{name}: the disk has changed");
        fixture.volume().mount_new(ErasePolicy::Exactly(fixture.contents())).unwrap();
    }
}

/// Leaves a copy of the disk as it was when mkfs.xfs started, and fails before the first byte.
const COPY_AND_FAIL: &str = "#!/bin/sh\nfor disk; do :; done\ncp \"$disk\" \"$0.cut\"\nexit 1\n";

/// A power cut between the claim and the first byte of mkfs.xfs.
fn cut_before_first_byte(fixture: &VolumeFixture, erase: ErasePolicy) -> VolumeError {
    fixture.write_mkfs(COPY_AND_FAIL);
    let failed = fixture.volume().mount_new(erase).unwrap_err();
    fs::rename(fixture.path("mkfs.cut"), fixture.path("disk")).unwrap();
    failed
}

/// A power cut between the claim and the first byte of mkfs.xfs, and one in the middle of it.
#[test]
fn data_without_a_signature_written_after_a_claim_is_never_erased() {
    for is_started in [false, true] {
        for offset in [40_000, 2 * MIB + 5000, 4 * MIB - 10] {
            let fixture = VolumeFixture::new();
            if is_started {
                fixture.write_mkfs(&half_mkfs_script());
                fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
            } else {
                cut_before_first_byte(&fixture, ErasePolicy::Nothing);
            }
            assert_eq!(fixture.contents(), VolumeContents::Interrupted);
            fixture.write(offset, b"diary");
            fixture.write_mkfs(MKFS_SCRIPT);
            let before = fixture.bytes();
            let rejected = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
            assert!(matches!(rejected, VolumeError::Occupied { .. }), "{offset}: {rejected:?}");
            assert!(rejected.to_string().contains(&format!("data at byte {offset}")), "{rejected}");
            let existing = fixture.volume().mount_existing();
            assert!(matches!(existing, Err(VolumeError::ForeignData { .. })), "{existing:?}");
            assert!(before == fixture.bytes(), "{offset}: the disk has changed");
            fixture.volume().mount_new(ErasePolicy::Exactly(fixture.contents())).unwrap();
        }
    }
}

/// Between the probe and the claim.
#[test]
fn data_written_while_a_disk_is_claimed_is_never_erased() {
    #[derive(Debug)]
    struct ScribblingMounter(PathBuf);
    impl Mounter for ScribblingMounter {
        fn mount(&self, _: &MountSpec, _: Option<&Path>, _: &Path) -> Result<(), MountError> {
            panic!("the volume was mounted")
        }

        fn unmount(&self, _: &Path) -> Result<(), MountError> {
            Ok(())
        }

        /// A volume looks at the mounts after its probe.
        fn mount_info(&self, _: &Path) -> Result<Option<MountInfo>, MountError> {
            let disk = File::options().write(true).open(&self.0).unwrap();
            disk.write_all_at(b"diary", 2 * MIB + 5000).unwrap();
            Ok(None)
        }
    }
    let fixture = VolumeFixture::new();
    let mounter = Arc::new(ScribblingMounter(fixture.path("disk")));
    let volume =
        DiskVolume::new(fixture.path("disk"), fixture.path("data"), mounter).with_mkfs(fixture.path("mkfs"));
    let mut expected = fixture.bytes();
    let rejected = volume.mount_new(ErasePolicy::Nothing).unwrap_err();
    assert!(matches!(rejected, VolumeError::Occupied { .. }), "{rejected:?}");
    let at = (2 * MIB + 5000) as usize;
    expected[at..at + 5].copy_from_slice(b"diary");
    assert!(fixture.bytes() == expected, "the disk has its claim, or a file system");
}

#[test]
fn consent_to_erase_one_disk_does_not_apply_to_another() {
    // For each type, the bytes that differ between two disks. Device names can be swapped after a reboot.
    for (offset, magic, at) in
        [(1080, &b"\x53\xef"[..], 1128), (4 * MIB - 512, b"EFI PART", 4 * MIB - 456), (0, b"XFSB", 32)]
    {
        let disk = |uuid: &[u8]| {
            let fixture = VolumeFixture::new();
            fixture.write(offset, magic);
            fixture.write(at, uuid);
            fixture.write(108, b"nodekeel");
            fixture
        };
        let (erased, other) = (disk(b"the one"), disk(b"another"));
        let erase = ErasePolicy::Exactly(erased.contents());
        let before = other.bytes();
        // With a file on it, the volume must not be completed either.
        fs::write(other.path("data/letter"), "dear").unwrap();
        let rejected = other.volume().mount_new(erase.clone()).unwrap_err();
        assert!(matches!(rejected, VolumeError::Occupied { .. }), "{rejected:?}");
        assert!(before == other.bytes(), "the disk has changed");
        erased.volume().mount_new(erase.clone()).unwrap();

        // After an interrupted format, the consent does not apply to data written since.
        let (erased, other) = (disk(b"the one"), disk(b"another"));
        let erase = ErasePolicy::Exactly(erased.contents());
        cut_before_first_byte(&erased, erase.clone());
        assert_eq!(erased.contents(), VolumeContents::Interrupted);
        erased.write(at, &other.bytes()[at as usize..at as usize + 7]);
        erased.write_mkfs(MKFS_SCRIPT);
        fs::write(erased.path("data/letter"), "dear").unwrap();
        let before = erased.bytes();
        let rejected = erased.volume().mount_new(erase).unwrap_err();
        assert!(matches!(rejected, VolumeError::Occupied { .. }), "{rejected:?}");
        assert!(before == erased.bytes(), "the disk has changed");
    }
}

#[test]
fn an_erasing_format_killed_at_its_start_resumes() {
    for (offset, magic, label) in
        [(1080, &b"\x53\xef"[..], ""), (4 * MIB - 512, b"EFI PART", ""), (0, b"XFSB", "old")]
    {
        let fixture = VolumeFixture::new();
        fixture.write(offset, magic);
        fixture.write(108, label.as_bytes());
        let erase = ErasePolicy::Exactly(fixture.contents());
        for _ in 0..2 {
            let killed = cut_before_first_byte(&fixture, erase.clone());
            assert!(matches!(killed, VolumeError::Format { .. }), "{killed:?}");
            assert_eq!(fixture.contents(), VolumeContents::Interrupted);
        }
        fixture.write_mkfs(MKFS_SCRIPT);
        fixture.volume().mount_new(erase).unwrap();
        assert!(matches!(fixture.contents(), VolumeContents::Xfs { label, .. } if label == "nodekeel"));
    }
}

#[test]
fn a_volume_killed_at_any_point_of_its_creation_is_created_again() {
    // Before the first byte of the file system nothing has changed; these are the points after it.
    let fixture = VolumeFixture::new();
    for script in [half_mkfs_script(), format!("{MKFS_SCRIPT}kill -9 $$\n")] {
        fixture.write_mkfs(&script);
        let killed = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
        assert!(matches!(killed, VolumeError::Format { .. }), "{killed:?}");
        assert_eq!(fixture.contents(), VolumeContents::Interrupted);
        let unfinished = fixture.volume().mount_existing().unwrap_err();
        assert!(matches!(unfinished, VolumeError::Unfinished { .. }), "{unfinished:?}");
        assert_eq!(fixture.mounter.recorded_calls(), []);
    }
    // Formatted and released, but not mounted yet: the volume is completed, and not formatted again.
    fixture.write_mkfs(MKFS_SCRIPT);
    fixture.mounter.fail_next_mount(io::ErrorKind::Interrupted);
    let killed = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
    assert!(matches!(killed, VolumeError::Mount(_)), "{killed:?}");
    assert!(matches!(fixture.contents(), VolumeContents::Xfs { .. }));
    fixture.write_mkfs("#!/bin/sh\nexit 1\n");
    // Mounted, but without the marker: the mount of a killed process stays.
    let (disk, data) = (fixture.path("disk"), fixture.path("data"));
    fixture.mounter.mount(&MountSpec::DATA, Some(&disk), &data).unwrap();
    let volume = fixture.volume();
    let unfinished = volume.mount_existing().unwrap_err();
    assert!(matches!(unfinished, VolumeError::Unfinished { .. }), "{unfinished:?}");
    volume.mount_new(ErasePolicy::Nothing).unwrap();
    assert_eq!(fixture.mounter.recorded_calls().len(), 1, "the volume is mounted only once");
    volume.unmount().unwrap();
    volume.mount_existing().unwrap();
}

#[test]
fn a_format_that_wrote_nothing_leaves_the_disk_as_it_was() {
    let fixture = VolumeFixture::new();
    let blank = fixture.bytes();
    fixture.write_mkfs("#!/bin/sh\necho 'Filesystem must be larger than 300MB.' >&2\nexit 1\n");
    for mkfs in ["mkfs", "missing"] {
        let volume = fixture.volume().with_mkfs(fixture.path(mkfs));
        let failed = volume.mount_new(ErasePolicy::Nothing).unwrap_err();
        assert!(matches!(failed, VolumeError::Format { .. }), "{failed:?}");
        assert!(fixture.bytes() == blank, "{mkfs}: the disk has changed");
    }
    // Another program writes data without a signature, which a claim would cover.
    fixture.write(2 * MIB, b"diary");
    fixture.write(40_000, b"diary");
    fixture.write_mkfs(MKFS_SCRIPT);
    let before = fixture.bytes();
    let rejected = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
    assert!(matches!(rejected, VolumeError::Occupied { .. }), "{rejected:?}");
    assert!(before == fixture.bytes(), "the disk has changed");
}

/// The caller has agreed to erase it, and takes that back once the format has failed.
#[test]
fn a_failed_format_of_a_disk_to_be_erased_does_not_cover_what_is_written_later() {
    for mkfs in ["mkfs", "missing"] {
        let fixture = VolumeFixture::new();
        fixture.write(0, b"XFSB");
        fixture.write(108, b"photos");
        fixture.write(40_000, b"old");
        fixture.write_mkfs("#!/bin/sh\nexit 1\n");
        let (before, erase) = (fixture.bytes(), ErasePolicy::Exactly(fixture.contents()));
        let failed = fixture.volume().with_mkfs(fixture.path(mkfs)).mount_new(erase.clone()).unwrap_err();
        assert!(matches!(failed, VolumeError::Format { .. }), "{failed:?}");
        assert!(fixture.bytes() == before, "{mkfs}: the disk has changed");
        // Its file system is used again, with the same UUID and label.
        fixture.write(2 * MIB, b"new");
        fixture.write_mkfs(MKFS_SCRIPT);
        let rejected = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
        assert!(matches!(rejected, VolumeError::Occupied { .. }), "{rejected:?}");
        assert_eq!(&fixture.bytes()[2 * MIB as usize..][..3], b"new");
        fixture.volume().mount_new(erase).unwrap();
    }
}
