//! Journals, replaced files and credentials on the file systems of a node.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use nodekeel_localstorage::mount::{MountFlags, MountSpec};
use nodekeel_localstorage::step_journal::StepJournal;
use nodekeel_localstorage::tree::LayoutTarget;
use nodekeel_localstorage::{Dir, FileMode, OsFileStore};
use testbed::command_output;
use testbed::power_cut::{CutMoments, CutPlan, PowerCut, RecordedDisk};

use super::{MIB, MountedPart, XFS_BYTES, start_memory};
use crate::fixture::{in_child_process, raw_names};
use crate::monogon_root::DataPartition;
use crate::pki::TestCa;

/// The number of states that are recorded.
const STATES: usize = 10;

/// A file system whose writes are recorded.
#[derive(Clone, Copy)]
struct RecordedFileSystem {
    spec: MountSpec,
    bytes: u64,
    mkfs: &'static [&'static str],
    torn_bytes: u64,
}

// Clusters of one sector, so that each file has many.
const SYNCHRONOUS_VFAT: RecordedFileSystem = RecordedFileSystem {
    spec: MountSpec::ESP,
    bytes: 8 * MIB,
    mkfs: &["mkfs.vfat", "-s", "1"],
    torn_bytes: 512,
};
const VFAT: RecordedFileSystem = RecordedFileSystem {
    spec: MountSpec { flags: MountFlags::NOSUID, ..MountSpec::ESP },
    ..SYNCHRONOUS_VFAT
};
const XFS: RecordedFileSystem = RecordedFileSystem {
    spec: MountSpec::DATA,
    bytes: XFS_BYTES,
    mkfs: &["mkfs.xfs", "-q", "-f"],
    torn_bytes: 4096,
};

/// Records numbered operations on a new file system, and checks what each cut leaves.
fn check_operations(
    file_system: RecordedFileSystem,
    plan: &CutPlan<'_>,
    prepare: impl FnOnce(&Dir) -> Result<()>,
    operate: impl Fn(&Dir, usize) -> Result<()>,
    check: impl Fn(&Dir, usize) -> Result<()>,
) -> Result<()> {
    let disk = RecordedDisk::acquire(&[file_system.bytes])?;
    let memory = start_memory();
    let mount = |part: &Path| MountedPart::mount(&file_system.spec, part, memory.path("data"));
    let (program, arguments) = file_system.mkfs.split_first().context("a program")?;
    command_output(Command::new(program).args(arguments).arg(disk.part(0)))?;
    let mounted = mount(disk.part(0))?;
    prepare(&mounted.dir()?)?;
    disk.mark("prepared")?;
    for number in 1..=STATES {
        operate(&mounted.dir()?, number)?;
        disk.mark(&format!("done-{number}"))?;
    }
    drop(mounted);
    let recording = disk.finish()?;
    let plan = CutPlan { torn_bytes: file_system.torn_bytes, ..*plan };
    recording.check_cuts(&plan, |cut: &PowerCut| {
        let mounted = mount(recording.part(0))?;
        check(&mounted.dir()?, cut.last_number("done"))
    })
}

/// States of different lengths: within a cluster and over many, longer and shorter than the one before.
fn numbered_state(number: usize) -> Vec<u8> {
    let length = [20, 600, 3000, 100, 5000, 4000, 9000, 30, 15_000, 60_000][number % 10];
    vec![number as u8; length]
}

fn recorded_number(journal: &StepJournal) -> Result<usize> {
    let Some(state) = journal.committed_state() else { return Ok(0) };
    let number = usize::from(state[0]);
    ensure!(state == numbered_state(number), "state {number} is mixed");
    Ok(number)
}

/// The journal has the last committed state or the next one, and can be continued.
fn check_journal(dir: &Dir, committed: usize) -> Result<()> {
    let mut journal = StepJournal::open(dir, "journal")?;
    let recorded = recorded_number(&journal)?;
    ensure!((committed..=committed + 1).contains(&recorded), "state {recorded} is recorded, not {committed}");
    for next in [recorded + 1, recorded + 2] {
        journal.commit(&numbered_state(next))?;
        drop(journal);
        journal = StepJournal::open(dir, "journal")?;
        ensure!(recorded_number(&journal)? == next, "the next commit was lost");
    }
    Ok(())
}

fn check_journal_on(file_system: RecordedFileSystem, operation: &str, counts: [usize; 2]) {
    let commit = |dir: &Dir, number: usize| {
        let mut journal = StepJournal::open(dir, "journal")?;
        Ok(journal.commit(&numbered_state(number))?)
    };
    check_operations(file_system, &CutPlan::new(operation, counts), |_| Ok(()), commit, check_journal)
        .unwrap();
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn a_journal_on_vfat_has_its_last_state_after_power_cuts() {
    in_child_process(a_journal_on_vfat_has_its_last_state_after_power_cuts, || {
        check_journal_on(VFAT, "a step journal on vfat", [20, 150]);
    });
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn a_journal_on_a_synchronous_vfat_has_its_last_state_after_power_cuts() {
    in_child_process(a_journal_on_a_synchronous_vfat_has_its_last_state_after_power_cuts, || {
        check_journal_on(SYNCHRONOUS_VFAT, "a step journal on a synchronous vfat", [10, 150]);
    });
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn a_journal_on_xfs_has_its_last_state_after_power_cuts() {
    in_child_process(a_journal_on_xfs_has_its_last_state_after_power_cuts, || {
        check_journal_on(XFS, "a step journal on XFS", [3, 150]);
    });
}

fn replace(dir: &Dir, number: usize) -> Result<()> {
    Ok(dir.write("file", &numbered_state(number), FileMode::PRIVATE_FILE)?)
}

/// The file has its last content or the next one, in a directory that has nothing else, and can be replaced.
fn check_replacement(dir: &Dir, written: usize) -> Result<()> {
    let content = dir.read("file")?;
    let is_known = content == numbered_state(written) || content == numbered_state(written + 1);
    ensure!(is_known, "the file has {} other bytes, not those of {written}", content.len());
    dir.remove_stale_files()?;
    replace(dir, written + 2)?;
    ensure!(dir.read("file")? == numbered_state(written + 2), "the next replacement was lost");
    ensure!(raw_names(dir.path()) == ["file"], "{:?}", raw_names(dir.path()));
    Ok(())
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn a_replaced_file_on_xfs_has_its_old_or_its_new_content_after_power_cuts() {
    in_child_process(a_replaced_file_on_xfs_has_its_old_or_its_new_content_after_power_cuts, || {
        let plan = CutPlan::new("Dir::write on XFS", [5, 200]);
        check_operations(XFS, &plan, |dir| replace(dir, 0), replace, check_replacement).unwrap();
    });
}

/// In the middle of a replacement a rename is not atomic there: cuts come right behind each.
#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn a_replaced_file_on_vfat_has_its_new_content_after_power_cuts() {
    in_child_process(a_replaced_file_on_vfat_has_its_new_content_after_power_cuts, || {
        for (file_system, operation) in
            [(VFAT, "Dir::write on vfat"), (SYNCHRONOUS_VFAT, "Dir::write on a synchronous vfat")]
        {
            let plan = CutPlan { moments: CutMoments::AtMarks, ..CutPlan::new(operation, [20, 20]) };
            check_operations(
                file_system,
                &plan,
                |dir| replace(dir, 0),
                replace,
                |dir, written| {
                    ensure!(dir.read("file")? == numbered_state(written), "not the content of {written}");
                    Ok(())
                },
            )
            .unwrap();
        }
    });
}

fn create_layout(dir: &Dir) -> Result<DataPartition> {
    Ok(LayoutTarget::new(Arc::new(OsFileStore::new(dir.try_clone()?)), "/").create_layout()?)
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn credentials_on_xfs_are_all_old_or_all_new_after_power_cuts() {
    in_child_process(credentials_on_xfs_are_all_old_or_all_new_after_power_cuts, || {
        let ca = TestCa::new(true);
        let store = |dir: &Dir, number: usize| {
            Ok(create_layout(dir)?.node.credentials.store_credentials(&ca.issue(number as u64 + 1))?)
        };
        let check = |dir: &Dir, stored: usize| {
            let found = create_layout(dir)?.node.credentials.load_credentials()?.context("no credentials")?;
            let serial = found
                .certificate
                .serial_number()
                .iter()
                .fold(0, |number, byte| number << 8 | usize::from(*byte));
            ensure!(
                (stored..=stored + 1).contains(&(serial - 1)),
                "credentials {serial} are stored, not {stored}"
            );
            store(dir, stored + 2)
        };
        let plan = CutPlan::new("PKI writes on XFS", [3, 150]);
        check_operations(XFS, &plan, |dir| store(dir, 0), store, check).unwrap();
    });
}
