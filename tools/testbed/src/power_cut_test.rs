use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use super::*;
use crate::ScratchDir;
use crate::guest::disk::{FileSystem, unmount_when_free};

const MIB: u64 = 1 << 20;

fn plan(operation: &'static str) -> CutPlan<'static> {
    CutPlan {
        operation,
        from: "prepared",
        moments: CutMoments::Any,
        sample_count: 25,
        whole_count: 100,
        torn_bytes: 512,
    }
}

/// Writes numbers to a part, each behind the one before.
fn record_numbers(is_synced: bool) -> DiskRecording {
    let disk = RecordedDisk::acquire(&[MIB, MIB]).unwrap();
    let part = OpenOptions::new().write(true).open(disk.part(1)).unwrap();
    disk.mark("prepared").unwrap();
    for number in 1..=5_u8 {
        part.write_all_at(&[number; 4096], u64::from(number) * 4096).unwrap();
        if is_synced {
            part.sync_all().unwrap();
        }
        disk.mark(&format!("written-{number}")).unwrap();
    }
    drop(part);
    disk.finish().unwrap()
}

fn check_numbers(path: &Path, cut: &PowerCut) -> Result<()> {
    let part = File::open(path)?;
    for number in 1..=cut.last_number("written") as u8 {
        let mut bytes = [0; 4096];
        part.read_exact_at(&mut bytes, u64::from(number) * 4096)?;
        ensure!(bytes == [number; 4096], "number {number} was lost");
    }
    Ok(())
}

#[test]
#[ignore = "needs kernel with 4 disks of 1 GiB"]
fn synced_writes_survive_every_cut_and_others_do_not() {
    // As a mapping that a failed test has left: the page cache keeps the first log below the second one.
    let disks = std::env::var(crate::guest::disk::DISKS).unwrap();
    let _held: Vec<File> = disks.split(':').map(|disk| File::open(disk).unwrap()).collect();
    let synced = record_numbers(true);
    synced.check_cuts(&plan("synced writes"), |cut| check_numbers(synced.part(1), cut)).unwrap();
    drop(synced);
    let unsynced = record_numbers(false);
    let checked =
        unsynced.check_cuts(&plan("writes without sync"), |cut| check_numbers(unsynced.part(1), cut));
    let error = checked.unwrap_err().to_string();
    assert!(error.contains("was lost") && error.contains("marks prepared"), "{error}");
}

/// Writes a number to one disk, and then to another one, whose flush does not make the first number durable.
fn record_numbers_on_two_disks(is_synced: bool) -> DiskRecording {
    let disk = RecordedDisk::acquire_separate(&[MIB, MIB]).unwrap();
    let [first, second] = [0, 1].map(|part| OpenOptions::new().write(true).open(disk.part(part)).unwrap());
    disk.mark("prepared").unwrap();
    for number in 1..=5_u8 {
        for (part, is_synced) in [(&first, is_synced), (&second, true)] {
            disk.mark_step().unwrap();
            part.write_all_at(&[number; 4096], 0).unwrap();
            disk.mark_step().unwrap();
            if is_synced {
                part.sync_all().unwrap();
            }
        }
    }
    drop((first, second));
    disk.finish().unwrap()
}

#[test]
#[ignore = "needs kernel with 4 disks of 1 GiB"]
fn a_disk_has_what_it_flushed_before_another_disk_was_written() {
    let check = |recording: &DiskRecording| {
        recording.check_cuts(&plan("two disks"), |_| {
            let number = |part| {
                let mut byte = [0];
                File::open(recording.part(part))?.read_exact_at(&mut byte, 0)?;
                anyhow::Ok(byte[0])
            };
            let (first, second) = (number(0)?, number(1)?);
            ensure!(first >= second, "the first disk has {first}, and the second {second}");
            Ok(())
        })
    };
    check(&record_numbers_on_two_disks(true)).unwrap();
    let error = check(&record_numbers_on_two_disks(false)).unwrap_err().to_string();
    assert!(error.contains("the first disk has") && !error.contains("step-"), "{error}");
}

#[test]
#[ignore = "needs kernel with 4 disks of 1 GiB"]
fn a_part_in_use_is_an_error() {
    let disk = RecordedDisk::acquire(&[MIB]).unwrap();
    let (part, soon) = (&disk.parts[0], Duration::from_millis(20));
    part.wait_until_free(soon).unwrap();
    let mapping =
        MappedDevice::create("user-of-a-part".into(), &linear_table(MIB, &part.device.path, 0)).unwrap();
    let error = part.wait_until_free(soon).unwrap_err();
    assert!(format!("{error:#}").contains("unmount it"), "{error:#}");
    mapping.remove().unwrap();
    part.wait_until_free(FREE_WITHIN).unwrap();
}

/// A file system whose files are written without fsync loses some, and is a sound one all the same.
#[test]
#[ignore = "needs kernel with 4 disks of 1 GiB"]
fn a_file_system_recovers_from_each_cut() {
    for (kind, size) in
        [(FileSystem::Xfs, 320 * MIB), (FileSystem::PlainExt4, 32 * MIB), (FileSystem::Vfat, 8 * MIB)]
    {
        let disk = RecordedDisk::acquire(&[size]).unwrap();
        let scratch = ScratchDir::new().unwrap();
        let mount = |part: &Path| {
            let mut command = Command::new("mount");
            command_output(command.args(["-t", kind.type_name()]).arg(part).arg(scratch.path())).map(drop)
        };
        kind.format_device(disk.part(0)).unwrap();
        mount(disk.part(0)).unwrap();
        disk.mark("prepared").unwrap();
        for number in 1..=5 {
            let mut file = File::create(scratch.path().join(format!("synced-{number}"))).unwrap();
            file.write_all(&[7; 5000]).unwrap();
            file.sync_all().unwrap();
            File::open(scratch.path()).unwrap().sync_all().unwrap();
            disk.mark(&format!("synced-{number}")).unwrap();
            fs::write(scratch.path().join(format!("other-{number}")), [8; 50_000]).unwrap();
        }
        unmount_when_free(scratch.path()).unwrap();
        let recording = disk.finish().unwrap();
        let plan = CutPlan { sample_count: 8, torn_bytes: 4096, ..plan(kind.type_name()) };
        let checked = recording.check_cuts(&plan, |cut| {
            mount(recording.part(0))?;
            let found = (1..=cut.last_number("synced")).try_for_each(|number| {
                let content = fs::read(scratch.path().join(format!("synced-{number}")))?;
                ensure!(content == [7; 5000], "file {number} has {} other bytes", content.len());
                Ok(())
            });
            unmount_when_free(scratch.path())?;
            found
        });
        checked.unwrap();
    }
}
