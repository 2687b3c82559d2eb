//! Files written by release 0.1.0 are read by this one; `testdata/golden/README.md` lists them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_localstorage::mount::OsMounter;
use nodekeel_localstorage::step_journal::{StepJournal, StepList};
use nodekeel_localstorage::tree::{BrandNames, LayoutEntry as _, LayoutTarget};
use nodekeel_localstorage::volume::{
    DataVolume as _, DirectoryVolume, DiskVolume, ErasePolicy, VolumeContents, VolumeError, probe_disk,
};
use nodekeel_localstorage::{Dir, OsFileStore};
use tempfile::TempDir;

use crate::fixture::{raw_names, scratch_dir};
use crate::monogon_root::{DataPartition, NodeRoot};

pub(crate) fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden").join(name)
}

/// A private copy of a golden directory.
fn copy_golden(name: &str) -> (TempDir, Dir) {
    let (temporary, dir) = scratch_dir();
    copy_tree(&golden_path(name), temporary.path());
    (temporary, dir)
}

fn copy_tree(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => {
                fs::create_dir(&target).unwrap();
                copy_tree(&entry.path(), &target);
            }
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

fn data_partition(root: &Path, dir: Dir) -> DataPartition {
    LayoutTarget::new(Arc::new(OsFileStore::new(dir)), root).create_layout().unwrap()
}

#[test]
fn a_step_journal_of_the_first_release_is_read_and_continued() {
    let (temporary, dir) = copy_golden("journal");
    let before = ["example.0", "example.1"].map(|slot| fs::read(temporary.path().join(slot)).unwrap());
    let mut journal = StepJournal::open(&dir, "example").unwrap();
    assert_eq!(journal.committed_state(), Some(&b"third state"[..]));
    journal.commit(b"fourth state").unwrap();
    drop(journal);
    let after = ["example.0", "example.1"].map(|slot| fs::read(temporary.path().join(slot)).unwrap());
    assert_eq!(before[1], after[1], "the newest record was overwritten");
    assert_ne!(before[0], after[0]);
    assert_eq!(StepJournal::open(&dir, "example").unwrap().committed_state(), Some(&b"fourth state"[..]));
}

#[test]
fn a_torn_step_journal_of_the_first_release_gives_its_older_state() {
    let (_temporary, dir) = copy_golden("journal-torn");
    let journal = StepJournal::open(&dir, "example").unwrap();
    assert_eq!(journal.committed_state(), Some(&b"older state"[..]));
}

#[test]
fn a_step_journal_is_written_as_by_the_first_release() {
    let (temporary, dir) = scratch_dir();
    let mut journal = StepJournal::open(&dir, "example").unwrap();
    for state in [&b"first state"[..], b"second state", b"third state"] {
        journal.commit(state).unwrap();
    }
    for slot in ["example.0", "example.1"] {
        let golden = fs::read(golden_path("journal").join(slot)).unwrap();
        let written = fs::read(temporary.path().join(slot)).unwrap();
        // The first release did not allocate the files in advance. It ignores what follows a record.
        let (record, rest) = written.split_at(golden.len());
        assert_eq!(record, golden, "{slot}");
        assert!(rest.iter().all(|byte| *byte == 0), "{slot}");
    }
}

#[test]
fn a_step_list_recorded_half_way_by_the_first_release_resumes_at_its_step() {
    let (_temporary, dir) = copy_golden("steps");
    let steps = StepList::try_new(["prepare", "copy", "switch", "clean-up"]).unwrap();
    let mut run = steps.start_run(StepJournal::open(&dir, "migration").unwrap(), b"ignored").unwrap();
    assert!(run.is_resumed());
    assert_eq!((run.current_step(), run.recorded_state()), (Some("switch"), &b"copied"[..]));
    run.complete_step(b"switched".as_slice()).unwrap();
    assert_eq!(run.current_step(), Some("clean-up"));
}

#[test]
fn credentials_of_the_first_release_are_loaded_and_not_replaced() {
    let (temporary, dir) = copy_golden("data");
    let data = data_partition(temporary.path(), dir);
    let credentials = data.node.credentials.load_credentials().unwrap().expect("the credentials exist");
    let expected = fs::read_to_string(golden_path("data/names.txt")).unwrap();
    assert_eq!(credentials.key.public_key().short_id(), expected.trim_end());
    let ensured = data.node.credentials.ensure_self_signed(&Default::default()).unwrap();
    assert_eq!(ensured.certificate, credentials.certificate);
    assert_eq!(data.node.roles.read().unwrap(), b"roles");
}

#[test]
fn a_credentials_change_that_the_first_release_did_not_finish_is_completed() {
    let (temporary, dir) = copy_golden("commit");
    let record = temporary.path().join("node/credentials/.commit");
    assert!(record.exists());
    let data = data_partition(temporary.path(), dir);
    let credentials = data.node.credentials.load_credentials().unwrap().expect("the credentials exist");
    let expected = fs::read_to_string(golden_path("commit/next.txt")).unwrap();
    assert_eq!(credentials.key.public_key().short_id(), expected.trim_end());
    assert!(!record.exists(), "the record is still there");
}

#[test]
fn a_temporary_file_that_a_killed_writer_of_the_first_release_has_left_is_removed() {
    let (temporary, dir) = copy_golden("temporary");
    assert_eq!(raw_names(temporary.path()).len(), 2);
    assert_eq!(dir.remove_stale_files().unwrap(), 1);
    assert_eq!(raw_names(temporary.path()), ["kept"]);
}

#[test]
fn volumes_marked_by_the_first_release_are_recognized() {
    let (_temporary, dir) = copy_golden("volume-complete");
    DirectoryVolume::new(dir).mount_existing().unwrap();
    let (temporary, dir) = copy_golden("volume-erasing");
    let volume = DirectoryVolume::new(dir);
    let error = volume.mount_existing().unwrap_err();
    assert!(matches!(error, VolumeError::Unfinished { .. }), "{error:?}");
    volume.mount_new(ErasePolicy::Nothing).unwrap();
    assert_eq!(raw_names(temporary.path()), [".data-volume"], "the erasure was not resumed");
}

#[test]
fn a_disk_claimed_by_the_first_release_is_formatted_again() {
    const DISK_BYTES: u64 = 16 << 20;
    let from_end = fs::read_to_string(golden_path("disk/claim-offset")).unwrap();
    let claim_offset = DISK_BYTES - from_end.trim_end().parse::<u64>().unwrap();
    for (claim, former) in [("claim-blank", None), ("claim-swap", Some("swap-page"))] {
        let (temporary, _dir) = scratch_dir();
        let image = temporary.path().join("image");
        let disk = fs::File::options().read(true).write(true).create_new(true).open(&image).unwrap();
        disk.set_len(DISK_BYTES).unwrap();
        let write = |name: &str, at: u64| {
            let bytes = fs::read(golden_path("disk").join(name)).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&disk, &bytes, at).unwrap();
        };
        if let Some(name) = former {
            write(name, 0);
            let contents = probe_disk(&mut &disk).unwrap();
            assert!(matches!(contents, VolumeContents::Occupied { .. }), "{contents:?}");
        }
        write(claim, claim_offset);
        assert_eq!(probe_disk(&mut &disk).unwrap(), VolumeContents::Interrupted, "{claim}");
        drop(disk);
        let volume = DiskVolume::new(&image, temporary.path(), Arc::new(OsMounter)).with_mkfs("/bin/false");
        let error = volume.mount_new(ErasePolicy::Nothing).unwrap_err();
        assert!(matches!(error, VolumeError::Format { .. }), "{claim}: {error:?}");
    }
}

#[test]
fn every_name_and_mode_of_the_first_releases_layout_is_unchanged() {
    let golden = fs::read_to_string(golden_path("layout/root.txt")).unwrap();
    assert_eq!(NodeRoot::SHAPE.render_outline(&BrandNames::default()), golden);
}
