//! A disk's owner decides: no byte of a disk changes unless all of it was read and is zero, or its owner gave it up.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nodekeel_localstorage::testing::{FileCryptsetup, RecordingMounter};
use nodekeel_localstorage::volume::{
    DataVolume, DigestScope, DiskVolume, ErasePolicy, LuksVolume, LuksVolumeConfig, VolumeContents,
    VolumeEncryption, VolumeError, inspect_disk,
};

use crate::fixture::{NodeDirs, temp_base};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Disk images in memory, and a mkfs.xfs that writes to any disk that it gets.
struct Desk {
    dirs: NodeDirs,
    mounter: Arc<RecordingMounter>,
}

impl Desk {
    fn new() -> Desk {
        let desk = Desk { dirs: NodeDirs::new_in(&temp_base()), mounter: Arc::default() };
        let script =
            "#!/bin/sh\nfor disk; do :; done\nprintf XFSB | dd of=\"$disk\" conv=notrunc status=none\n";
        testbed::write_program(&desk.path("mkfs"), script).unwrap();
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dirs.path(name)
    }

    fn make_disk(&self, name: &str, size: u64, parts: &[(u64, &[u8])]) -> PathBuf {
        let path = self.path(name);
        let disk = File::create(&path).unwrap();
        disk.set_len(size).unwrap();
        for (offset, bytes) in parts {
            disk.write_all_at(bytes, *offset).unwrap();
        }
        path
    }

    fn disk_volume(&self, disk: &str) -> DiskVolume {
        DiskVolume::new(self.path(disk), self.path("data"), self.mounter.clone()).with_mkfs(self.path("mkfs"))
    }

    fn luks_volume(&self, disk: &str, program: Option<&str>) -> LuksVolume {
        let mut tool = FileCryptsetup::new(self.path("mappings"));
        if let Some(program) = program {
            tool = tool.with_program(self.path(program));
        }
        let config = LuksVolumeConfig {
            mounter: self.mounter.clone(),
            cryptsetup: Arc::new(tool),
            ..self.dirs.luks_config(&self.path(disk), VolumeEncryption::Encrypted)
        };
        LuksVolume::new(config).with_mkfs(self.path("mkfs"))
    }
}

/// All data of a sparse file: offsets and bytes.
fn data_of(path: &Path) -> Vec<(u64, Vec<u8>)> {
    let mut disk = File::open(path).unwrap();
    let (size, mut offset, mut data) = (disk.metadata().unwrap().len(), 0, Vec::new());
    while let Ok(start) = rustix::fs::seek(&disk, rustix::fs::SeekFrom::Data(offset)) {
        let end = rustix::fs::seek(&disk, rustix::fs::SeekFrom::Hole(start)).unwrap_or(size);
        let mut bytes = vec![0; (end - start) as usize];
        disk.seek(SeekFrom::Start(start)).unwrap();
        disk.read_exact(&mut bytes).unwrap();
        for (at, block) in (start..).step_by(4096).zip(bytes.chunks(4096)) {
            if block.iter().any(|byte| *byte != 0) {
                data.push((at, block.to_vec()));
            }
        }
        offset = end;
    }
    data
}

/// A disk whose data no probe knows: its name, its size, and its data.
type UnknownDisk = (String, u64, Vec<(u64, Vec<u8>)>);

/// Bytes that no format has, behind those of a signature.
fn letters(magic: &[u8], length: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..length).map(|at| (at * 31 % 251) as u8 | 1).collect();
    bytes[..magic.len()].copy_from_slice(magic);
    bytes
}

/// Fifty disks of others: their heads were wiped, their data begin where no format of the whole disk has any, or all
/// that is left is one sector.
fn unknown_disks() -> Vec<UnknownDisk> {
    let mut disks = Vec::new();
    let mut add = |name: String, parts: Vec<(u64, Vec<u8>)>| {
        let size = [GIB, 3 * GIB + 68 * KIB][disks.len() % 2];
        disks.push((name, size, parts));
    };
    // The superblock is gone, with the first or the last MiB; the array's file system begins at the offset of its data.
    for version in ["0.90", "1.0", "1.1", "1.2"] {
        for offset in [MIB + 72 * KIB, 65 * MIB + 68 * KIB, 129 * MIB + 76 * KIB, 513 * MIB + 84 * KIB] {
            let file_system =
                vec![(offset, letters(b"", 8192)), (offset + 40 * KIB, letters(b"\x53\xef", 512))];
            add(format!("md {version} with data at {offset}"), file_system);
        }
    }
    // The allocation groups have the size of those that the disk had when it was small.
    for group in [75 * MIB + 20 * KIB, 75 * MIB + 36 * KIB, 99 * MIB + 68 * KIB, 101 * MIB + 20 * KIB]
        .into_iter()
        .chain([149 * MIB + 76 * KIB, 200 * MIB + 12 * KIB])
    {
        let headers = (1..4).map(|index| (index * group, letters(b"XFSB", 2048))).collect();
        add(format!("xfs that has grown, with groups of {group}"), headers);
    }
    for (index, magic) in
        [&b"\x53\xef"[..], b"XFSB", b"_BHRfS_M", b"NTFS    ", b"EXFAT   ", b"hsqs", b"LABELONE", b"EFI PART"]
            .into_iter()
            .chain([&b"LUKS\xba\xbe"[..], b"SWAPSPACE2"])
            .enumerate()
    {
        let offset = (index as u64 + 1) * 83 * MIB + 63 * 512 + 100 * KIB;
        add(
            format!("{} at an odd offset", String::from_utf8_lossy(magic)),
            vec![(offset, letters(magic, 4096))],
        );
    }
    for offset in [
        GIB / 2 + 76 * KIB,
        GIB / 3 + 36 * KIB,
        GIB / 7 + 36 * KIB,
        GIB - 2 * MIB - 100 * KIB,
        MIB + 68 * KIB,
        GIB / 2 - 76 * KIB,
    ]
    .into_iter()
    .chain([3 * MIB + 84 * KIB, 777 * MIB + 84 * KIB])
    {
        add(format!("one sector at {offset}"), vec![(offset / 512 * 512, letters(b"", 512))]);
    }
    for extent in [1, 5, 60, 200_u64] {
        add(format!("lvm, extent {extent}"), vec![(MIB + extent * 4 * MIB + 72 * KIB, letters(b"", 65536))]);
    }
    for offset in [4 * MIB + 68 * KIB, 260 * MIB + 84 * KIB, 900 * MIB + 76 * KIB] {
        add(format!("zfs without labels, block at {offset}"), vec![(offset, letters(b"", 131_072))]);
    }
    for bucket in [17, 33, 1000_u64] {
        add(format!("bcache, bucket {bucket}"), vec![(bucket * 512 * KIB + 84 * KIB, letters(b"", 16_384))]);
    }
    disks
}

#[test]
fn fifty_disks_whose_data_no_probe_knows_are_refused_without_a_byte_changed() {
    let disks = unknown_disks();
    assert!(disks.len() >= 50, "{}", disks.len());
    for (index, (name, size, parts)) in disks.into_iter().enumerate() {
        let desk = Desk::new();
        let parts: Vec<_> = parts.iter().map(|(offset, bytes)| (*offset, &bytes[..])).collect();
        let disk = desk.make_disk("disk", size, &parts);
        let before = data_of(&disk);
        assert!(!before.is_empty(), "{name}");
        let probed = inspect_disk(&disk).unwrap().contents;
        assert!(matches!(probed, VolumeContents::Unread { .. }), "{name} is known to a probe: {probed}");
        let volumes: [Box<dyn DataVolume>; 2] =
            [Box::new(desk.disk_volume("disk")), Box::new(desk.luks_volume("disk", None))];
        let found = volumes.map(|volume| match volume.mount_new(ErasePolicy::Nothing) {
            Err(VolumeError::Occupied { found, .. }) => found,
            other => panic!("{name}: {other:?}"),
        });
        assert!(data_of(&disk) == before, "{name}: the disk has changed");
        assert_eq!(found[0], found[1], "{name}: a disk has one token");
        let token = found[0].erase_token().unwrap();
        assert!(token.contains("-read-"), "{name}: {token}");
        if index % 10 != 0 {
            continue;
        }
        // One more byte, and the token is stale.
        File::options().write(true).open(&disk).unwrap().write_all_at(b"x", size / 2 + 123).unwrap();
        let stale = desk.disk_volume("disk").mount_new(ErasePolicy::Exactly(found[0].clone()));
        let Err(VolumeError::Occupied { found, .. }) = stale else { panic!("{name}: {stale:?}") };
        assert_eq!(data_of(&disk).len(), before.len() + 1, "{name}: the disk has changed");
        // Its owner gives it up.
        desk.disk_volume("disk").mount_new(ErasePolicy::Exactly(found)).unwrap();
    }
}

#[test]
fn a_disk_is_given_up_by_its_samples_without_a_wait_and_only_it() {
    let desk = Desk::new();
    let disk = desk.make_disk("disk", 2 * GIB, &[(GIB + 100 * KIB, &[7; 512])]);
    desk.make_disk("other", 2 * GIB, &[(GIB + 100 * KIB, &[7; 512])]);
    let contents = |disk: &str| inspect_disk(&desk.path(disk)).unwrap().contents;
    assert_eq!(contents("disk").digest().unwrap().scope(), DigestScope::Sampled);
    let agreed = ErasePolicy::Exactly(contents("other"));
    // The samples are the same, and the disk is not.
    let rejected = desk.disk_volume("disk").mount_new(agreed);
    assert!(matches!(rejected, Err(VolumeError::Occupied { .. })), "{rejected:?}");
    let reads = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&reads);
    let volume = desk.disk_volume("disk").with_reading_progress(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        ControlFlow::Continue(())
    });
    let contents = inspect_disk(&disk).unwrap().contents;
    volume.mount_new(ErasePolicy::Exactly(contents)).unwrap();
    assert_eq!(reads.load(Ordering::Relaxed), 0, "nothing is read for it");
}

/// A disk of 64 MiB of zeros that are not holes.
fn make_zeroed_disk(desk: &Desk) -> PathBuf {
    let disk = desk.make_disk("disk", 64 * MIB, &[]);
    let image = File::options().write(true).open(&disk).unwrap();
    image.write_all_at(&vec![0; 64 * MIB as usize], 0).unwrap();
    disk
}

/// Reads a disk until this many bytes were read. Returns the outcome and the progress.
fn read_until(desk: &Desk, end: u64) -> (Result<(), VolumeError>, Vec<u64>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let progress = Arc::clone(&seen);
    let volume =
        desk.disk_volume("disk").with_runtime(desk.dirs.dir("run")).with_reading_progress(move |read| {
            assert_eq!(read.disk_bytes, 64 * MIB);
            progress.lock().unwrap().push(read.read_bytes);
            if read.read_bytes < end { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
    let read = volume.read_disk();
    let seen = seen.lock().unwrap().clone();
    (read, seen)
}

#[test]
fn a_reading_that_was_canceled_resumes_unless_the_disk_was_written_to() {
    let desk = Desk::new();
    let disk = make_zeroed_disk(&desk);
    let (canceled, seen) = read_until(&desk, 24 * MIB);
    assert!(matches!(canceled, Err(VolumeError::ReadingCanceled { .. })), "{canceled:?}");
    assert_eq!(seen.last(), Some(&(24 * MIB)));
    let (canceled, seen) = read_until(&desk, 40 * MIB);
    assert!(matches!(canceled, Err(VolumeError::ReadingCanceled { .. })), "{canceled:?}");
    assert_eq!(seen[0], 28 * MIB, "it goes on: {seen:?}");
    let (read, seen) = read_until(&desk, u64::MAX);
    read.unwrap();
    assert_eq!((seen[0], seen.last()), (44 * MIB, Some(&(64 * MIB))), "{seen:?}");
    assert!(read_until(&desk, u64::MAX).1.is_empty(), "nothing has changed since");

    // What was read before may have changed.
    let (_, seen) = read_until(&desk, 0);
    assert!(seen.is_empty(), "{seen:?}");
    File::options().write(true).open(&disk).unwrap().write_all_at(b"x", MIB + 77 * KIB).unwrap();
    let (occupied, seen) = read_until(&desk, u64::MAX);
    let Err(VolumeError::Occupied { found, .. }) = occupied else { panic!("{occupied:?}") };
    assert_eq!((seen[0], found.to_string().as_str()), (4 * MIB, "data at byte 1127424"));
    // The record has the data, and the token of all of it.
    let (again, seen) = read_until(&desk, u64::MAX);
    let Err(VolumeError::Occupied { found: again, .. }) = again else { panic!("{again:?}") };
    assert_eq!((again, seen), (found.clone(), vec![]));
    let volume = desk.disk_volume("disk").with_runtime(desk.dirs.dir("run"));
    volume.mount_new(ErasePolicy::Exactly(found)).unwrap();
    assert_eq!(fs::read_dir(desk.path("run")).unwrap().count(), 0, "no record stays");
}

#[test]
fn a_disk_that_is_written_to_while_it_is_read_is_not_blank() {
    let desk = Desk::new();
    let disk = make_zeroed_disk(&desk);
    let is_written = AtomicBool::new(false);
    let volume = desk.disk_volume("disk").with_reading_progress(move |read| {
        if read.read_bytes > 32 * MIB && !is_written.swap(true, Ordering::Relaxed) {
            File::options().write(true).open(&disk).unwrap().write_all_at(b"x", MIB + 77 * KIB).unwrap();
        }
        ControlFlow::Continue(())
    });
    let error = volume.mount_new(ErasePolicy::Nothing).unwrap_err();
    assert!(matches!(error, VolumeError::Device { step: "read all of", .. }), "{error:?}");
    let error = volume.mount_new(ErasePolicy::Nothing).unwrap_err();
    assert!(matches!(error, VolumeError::Occupied { .. }), "{error:?}");
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
#[ignore = "needs root"]
fn a_disk_whose_writes_nobody_counts_is_not_read() {
    let desk = Desk::new();
    let disk = run("losetup", &["--find", "--show", make_zeroed_disk(&desk).to_str().unwrap()]);
    let switch = disk.replace("/dev/", "/sys/block/") + "/queue/iostats";
    let volume = DiskVolume::new(&disk, desk.path("data"), Arc::<RecordingMounter>::default());
    fs::write(&switch, "0").unwrap();
    let unread = volume.read_disk();
    fs::write(&switch, "1").unwrap();
    let read = volume.read_disk();
    drop(volume);
    run("losetup", &["--detach", &disk]);
    let error = unread.unwrap_err();
    assert!(matches!(error, VolumeError::Device { step: "read all of", .. }), "{error:?}");
    assert!(format!("{error:?}").contains("queue/iostats"), "{error:?}");
    read.unwrap();
}

/// What other programs write by way of the whole disk is in none of the counters of its partition.
#[test]
#[ignore = "needs root"]
fn a_partition_that_is_written_to_by_way_of_its_disk_is_not_blank() {
    let dirs = NodeDirs::new();
    let image = dirs.path("image");
    File::create(&image).unwrap().set_len(64 * MIB).unwrap();
    let disk = run("losetup", &["--find", "--show", "--partscan", image.to_str().unwrap()]);
    run("addpart", &[&disk, "1", "2048", "65536"]);
    let (whole, written) = (File::options().write(true).open(&disk).unwrap(), AtomicBool::new(false));
    let volume = DiskVolume::new(format!("{disk}p1"), dirs.path("data"), Arc::<RecordingMounter>::default())
        .with_reading_progress(move |_| {
            if !written.swap(true, Ordering::Relaxed) {
                whole.write_all_at(b"x", MIB + 77 * KIB).unwrap();
            }
            ControlFlow::Continue(())
        });
    let read = volume.read_disk();
    drop(volume);
    run("losetup", &["--detach", &disk]);
    assert!(matches!(read, Err(VolumeError::Device { step: "read all of", .. })), "{read:?}");
}

#[test]
fn a_volume_of_an_inspected_disk_uses_no_other_one() {
    let desk = Desk::new();
    desk.make_disk("disk", 512 * MIB, &[]);
    let other = desk.make_disk("other", 512 * MIB, &[]);
    symlink(desk.path("disk"), desk.path("link")).unwrap();
    let inspected = inspect_disk(&desk.path("link")).unwrap();
    flip_link(&desk);
    let volumes: [Box<dyn DataVolume>; 2] = [
        Box::new(desk.disk_volume("link").expecting(inspected.identity.clone())),
        Box::new(desk.luks_volume("link", None).expecting(inspected.identity)),
    ];
    for volume in volumes {
        for refused in [volume.mount_new(ErasePolicy::Nothing), volume.mount_existing()] {
            assert!(matches!(refused, Err(VolumeError::Replaced { .. })), "{refused:?}");
        }
    }
    assert!(data_of(&other).is_empty());
}

/// Turns the link from one disk to the other, at one instant.
fn flip_link(desk: &Desk) {
    let is_other = fs::read_link(desk.path("link")).unwrap() == desk.path("other");
    let to = desk.path(if is_other { "disk" } else { "other" });
    let new = desk.path("link.new");
    let _ = fs::remove_file(&new);
    symlink(to, &new).unwrap();
    fs::rename(new, desk.path("link")).unwrap();
}

/// A link to a disk of zeros, and another disk with an ext4.
fn desk_with_link() -> (Desk, Vec<(u64, Vec<u8>)>) {
    let desk = Desk::new();
    desk.make_disk("disk", 512 * MIB, &[]);
    let other = desk.make_disk("other", 512 * MIB, &[]);
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&other).status().unwrap();
    assert!(made.success());
    symlink(desk.path("disk"), desk.path("link")).unwrap();
    let before = data_of(&other);
    (desk, before)
}

fn create(desk: &Desk, encrypted: bool, tools: bool) -> Result<(), VolumeError> {
    if encrypted {
        desk.luks_volume("link", tools.then_some("cryptsetup")).mount_new(ErasePolicy::Nothing).map(drop)
    } else {
        desk.disk_volume("link").mount_new(ErasePolicy::Nothing).map(drop)
    }
}

fn starts_with_volume(disk: &Path, encrypted: bool) -> bool {
    let magic: &[u8] = if encrypted { b"LUKS\xba\xbe" } else { b"XFSB" };
    data_of(disk)[0].1.starts_with(magic)
}

/// Replaces a program by one that first turns the link to another disk.
fn write_flipping_program(desk: &Desk, name: &str, real: &str) {
    let [other, link] = ["other", "link"].map(|name| desk.path(name).display().to_string());
    let script = format!("#!/bin/sh\nln -sfn {other} {link}\nexec {real} \"$@\"\n");
    testbed::write_program(&desk.path(name), &script).unwrap();
}

#[test]
#[ignore = "needs cryptsetup"]
fn a_link_that_flips_when_a_tool_starts_changes_nothing_on_the_other_disk() {
    for encrypted in [false, true] {
        let (desk, before) = desk_with_link();
        // The file of a mapping is too small for an XFS.
        write_flipping_program(&desk, "mkfs", if encrypted { "true" } else { "mkfs.xfs -f" });
        write_flipping_program(&desk, "cryptsetup", "cryptsetup");
        let created = create(&desk, encrypted, true);
        assert_eq!(fs::read_link(desk.path("link")).unwrap(), desk.path("other"), "the link has not flipped");
        assert!(data_of(&desk.path("other")) == before, "the other disk has changed: {created:?}");
        created.unwrap();
        assert!(starts_with_volume(&desk.path("disk"), encrypted), "the inspected disk has the volume");
    }
}

/// `all`, or the first of the seeds of a slice.
const FLIPS_VARIABLE: &str = "NODEKEEL_LINK_FLIPS";

/// The link flips at a random instant of a format, that of the program or of one of its tools, and again and again after
/// that.
#[test]
#[ignore = "needs cryptsetup"]
fn a_link_that_flips_at_a_random_call_of_a_format_changes_nothing_on_the_other_disk() {
    let chosen = std::env::var(FLIPS_VARIABLE).unwrap_or_else(|_| "1".into());
    let seeds = match chosen.parse::<u64>() {
        Ok(first) => first..first + 12,
        Err(_) => 1..201,
    };
    println!("seeds {seeds:?}, by {FLIPS_VARIABLE}={chosen}");
    let mut longest = [Duration::from_millis(50); 2];
    let (mut created, mut refused) = (0, 0);
    for seed in seeds {
        let encrypted = seed % 2 == 1;
        let (desk, before) = desk_with_link();
        let mkfs = if encrypted { "true" } else { "mkfs.xfs -f" };
        testbed::write_program(&desk.path("mkfs"), &format!("#!/bin/sh\nexec {mkfs} \"$@\"\n")).unwrap();
        let has_ended = AtomicBool::new(false);
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut pause = |longest: Duration| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            #[expect(clippy::disallowed_methods, reason = "that time goes by is the event")]
            thread::sleep(longest.mul_f64((random >> 40) as f64 / (1 << 24) as f64));
        };
        let begun = Instant::now();
        let outcome = thread::scope(|scope| {
            scope.spawn(|| {
                pause(longest[usize::from(encrypted)]);
                while !has_ended.load(Ordering::Relaxed) {
                    flip_link(&desk);
                    pause(Duration::from_millis(5));
                }
            });
            let outcome = create(&desk, encrypted, false);
            has_ended.store(true, Ordering::Relaxed);
            outcome
        });
        longest[usize::from(encrypted)] = longest[usize::from(encrypted)].max(begun.elapsed());
        assert!(
            data_of(&desk.path("other")) == before,
            "seed {seed}: the other disk has changed: {outcome:?}"
        );
        match outcome {
            Ok(()) => {
                created += 1;
                assert!(starts_with_volume(&desk.path("disk"), encrypted), "seed {seed}");
            }
            // The link led to the other disk when it was opened.
            Err(error) => {
                refused += 1;
                assert!(matches!(error, VolumeError::Occupied { .. }), "seed {seed}: {error:?}");
            }
        }
    }
    println!("{created} created, {refused} refused");
    assert!(created > 0);
}
