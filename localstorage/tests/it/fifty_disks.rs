//! Disks whose owner could want them back: made by real tools, damaged at their heads, and never formatted over.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher as _};
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use nodekeel_localstorage::testing::{FileCryptsetup, RecordingMounter};
use nodekeel_localstorage::volume::{
    DataVolume, DiskVolume, ErasePolicy, LuksVolume, LuksVolumeConfig, VolumeEncryption, VolumeError,
};

use crate::fixture::{NodeDirs, temp_base};

mod guest;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Bytes at the head of a disk that are zeroed.
const DAMAGES: [u64; 4] = [0, 4 * KIB, 64 * KIB, MIB];

/// `all`, or the seed of a sample.
const COUNT_VARIABLE: &str = "NODEKEEL_FIFTY_DISKS";
/// The number of formats in a sample.
const SAMPLE: usize = 8;

/// The way a disk is made: its name, its size in MiB, and a script that knows the disk as `$DISK` and some files as
/// `$FILES`.
type DiskFormat = (&'static str, u64, &'static str);

const FORMATS: [DiskFormat; 44] = [
    ("ext2", 512, "mkfs.ext4 -q -F -t ext2 -d $FILES $DISK"),
    ("ext3", 512, "mkfs.ext4 -q -F -t ext3 -d $FILES $DISK"),
    ("ext4", 512, "mkfs.ext4 -q -F -d $FILES $DISK"),
    ("ext4 with blocks of 1 KiB", 256, "mkfs.ext4 -q -F -b 1024 -d $FILES $DISK"),
    ("ext4 with sparse_super2", 512, "mkfs.ext4 -q -F -O sparse_super2 -d $FILES $DISK"),
    ("xfs", 512, "mkfs.xfs -q -f -p $FILES/prototype $DISK"),
    ("xfs with blocks of 1 KiB", 512, "mkfs.xfs -q -f -b size=1024 -p $FILES/prototype $DISK"),
    ("btrfs", 512, "mkfs.btrfs -q -f --rootdir $FILES $DISK"),
    ("btrfs with mixed blocks", 256, "mkfs.btrfs -q -f --mixed --rootdir $FILES $DISK"),
    (
        "btrfs of two disks, the first",
        256,
        "truncate -s 256M $DISK.new && mkfs.btrfs -q -f -d raid1 -m raid1 $DISK $DISK.new",
    ),
    (
        "btrfs of two disks, the second",
        256,
        "truncate -s 256M $DISK.new && mkfs.btrfs -q -f -d raid1 -m raid1 $DISK.new $DISK",
    ),
    ("fat12", 16, "mkfs.vfat -F 12 $DISK && mcopy -s -i $DISK $FILES ::files"),
    ("fat16", 256, "mkfs.vfat -F 16 $DISK && mcopy -s -i $DISK $FILES ::files"),
    ("fat32", 512, "mkfs.vfat -F 32 $DISK && mcopy -s -i $DISK $FILES ::files"),
    ("ntfs", 512, "mkntfs -q -F -Q $DISK && ntfscp -f -q $DISK $FILES/photo photo"),
    ("exfat", 512, "mkfs.exfat $DISK"),
    ("f2fs", 512, "mkfs.f2fs -q -f $DISK && sload.f2fs -f $FILES $DISK"),
    ("nilfs2", 512, "mkfs.nilfs2 -q $DISK"),
    ("reiserfs", 512, "mkreiserfs -q -ff $DISK"),
    ("reiser4", 512, "mkfs.reiser4 -y -f $DISK"),
    ("jfs", 512, "mkfs.jfs -q $DISK"),
    ("apfs", 512, "mkapfs $DISK"),
    ("minix", 64, "mkfs.minix -3 $DISK"),
    ("bfs", 64, "mkfs.bfs $DISK"),
    ("udf", 512, "mkudffs -b 512 $DISK"),
    ("udf with blocks of 2 KiB", 512, "mkudffs -b 2048 $DISK"),
    ("ocfs2", 512, "echo y | mkfs.ocfs2 -q -M local --fs-features=local -F $DISK"),
    ("gfs2", 512, "mkfs.gfs2 -q -O -p lock_nolock -J 8 $DISK"),
    ("ufs", 64, "makefs -t ffs -s 64m $DISK.new $FILES && dd if=$DISK.new of=$DISK conv=notrunc"),
    (
        "squashfs",
        64,
        "mksquashfs $FILES $DISK.new -quiet -no-progress && dd if=$DISK.new of=$DISK conv=notrunc",
    ),
    ("erofs", 64, "mkfs.erofs --quiet $DISK.new $FILES && dd if=$DISK.new of=$DISK conv=notrunc"),
    ("romfs", 64, "genromfs -d $FILES -f $DISK.new && dd if=$DISK.new of=$DISK conv=notrunc"),
    ("cramfs", 64, "mkfs.cramfs $FILES $DISK.new && dd if=$DISK.new of=$DISK conv=notrunc"),
    ("iso9660", 64, "genisoimage -quiet -R -o $DISK.new $FILES && dd if=$DISK.new of=$DISK conv=notrunc"),
    ("tar", 64, "tar -C $FILES -cf - . | dd of=$DISK conv=notrunc"),
    ("luks1", 256, "echo key | cryptsetup luksFormat -q --disable-locks --type luks1 $PBKDF $DISK -"),
    (
        "luks2",
        512,
        "echo key | cryptsetup luksFormat -q --disable-locks --type luks2 --pbkdf pbkdf2 $PBKDF $DISK -",
    ),
    (
        "luks2 with metadata of 4 MiB",
        512,
        "echo key | cryptsetup luksFormat -q --disable-locks --type luks2 --luks2-metadata-size 4m \
         --luks2-keyslots-size 4m --pbkdf pbkdf2 $PBKDF $DISK -",
    ),
    ("dm-verity", 64, "veritysetup format $FILES/photo $DISK"),
    ("swap", 256, "mkswap $DISK"),
    ("gpt", 512, "sgdisk --new=1:0:+32M --new=2:0:0 $DISK"),
    ("drbd", 512, "yes yes | drbdmeta --force 0 v08 $DISK internal create-md 1"),
    ("bcache", 256, "make-bcache -B $DISK"),
    ("bcache cache", 256, "make-bcache -C $DISK"),
];

/// Some files, and a directory for disks.
struct Workshop(NodeDirs);

impl Workshop {
    fn new() -> Workshop {
        let workshop = Workshop(NodeDirs::new_in(&temp_base()));
        fs::create_dir_all(workshop.path("files/letters")).unwrap();
        // Bytes that no tool compresses or leaves out, in whole blocks.
        let photo: Vec<u8> = (0..3 * MIB / 8).flat_map(|at| hash_of(at).to_le_bytes()).collect();
        fs::write(workshop.path("files/photo"), photo).unwrap();
        fs::write(workshop.path("files/letters/first"), "Dear reader\n".repeat(4000)).unwrap();
        let prototype =
            format!("/\n0 0\nd--755 0 0\nphoto ---644 0 0 {}\n$\n", workshop.path("files/photo").display());
        fs::write(workshop.path("files/prototype"), prototype).unwrap();
        workshop
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    fn make_disk(&self, name: &str, mebibytes: u64, script: &str) -> PathBuf {
        let disk = self.path("made");
        File::create(&disk).unwrap().set_len(mebibytes * MIB).unwrap();
        self.run_script(name, script, &disk);
        let _ = fs::remove_file(self.path("made.new"));
        assert_eq!(disk.metadata().unwrap().len(), mebibytes * MIB, "{name}");
        disk
    }

    fn run_script(&self, name: &str, script: &str, disk: &Path) {
        let mut shell = Command::new("sh");
        shell.args(["-euc", script]).env("DISK", disk).env("FILES", self.path("files")).env("LC_ALL", "C");
        shell.env("LVM", guest::LVM).env("DM_DISABLE_UDEV", "1");
        shell.env("PBKDF", "--pbkdf-force-iterations=1000").stdin(Stdio::null()).current_dir(self.path(""));
        // Where a plain user's PATH does not look.
        let path = std::env::var("PATH").unwrap_or_default();
        let output = shell.env("PATH", format!("{path}:/usr/sbin:/sbin")).output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Zeroes the head of a disk.
    fn damage(&self, disk: &Path, bytes: u64) {
        File::options().write(true).open(disk).unwrap().write_all_at(&vec![0; bytes as usize], 0).unwrap();
    }

    fn volumes(&self, disk: &Path) -> [Box<dyn DataVolume>; 2] {
        let mounter = Arc::new(RecordingMounter::default());
        let luks = LuksVolumeConfig {
            mounter: mounter.clone(),
            cryptsetup: Arc::new(FileCryptsetup::new(self.path("mappings"))),
            ..self.0.luks_config(disk, VolumeEncryption::Encrypted)
        };
        [Box::new(DiskVolume::new(disk, self.path("data"), mounter)), Box::new(LuksVolume::new(luks))]
    }
}

/// A hash of all bytes; none for zeros alone.
fn hash_disk(disk: &Path) -> Option<u64> {
    let disk = File::open(disk).unwrap();
    let size = (&disk).seek(SeekFrom::End(0)).unwrap();
    let (mut hasher, mut has_data, zeros) = (DefaultHasher::new(), false, vec![0; MIB as usize]);
    let mut chunk = zeros.clone();
    for offset in (0..size).step_by(MIB as usize) {
        disk.read_exact_at(&mut chunk, offset).unwrap();
        if chunk != zeros {
            has_data = true;
            (offset, &chunk).hash(&mut hasher);
        }
    }
    has_data.then(|| hasher.finish())
}

fn hash_of(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The formats of this run: all, or a sample that a seed selects.
fn selected_formats() -> Vec<DiskFormat> {
    let count = std::env::var(COUNT_VARIABLE).unwrap_or_else(|_| "1".into());
    if count == "all" {
        return FORMATS.to_vec();
    }
    let mut keyed: Vec<_> = FORMATS.iter().map(|format| (hash_of((&count, format.0)), *format)).collect();
    keyed.sort_by_key(|(key, _)| *key);
    println!("{SAMPLE} of {} formats, by {COUNT_VARIABLE}={count}", FORMATS.len());
    keyed.into_iter().take(SAMPLE).map(|(_, format)| format).collect()
}

/// The result for the disks of a format.
#[derive(Debug, Default)]
struct Outcome {
    refused: usize,
    missed: Vec<String>,
}

/// Zeroes more and more of the head of a disk, and checks that both volumes refuse it.
fn check_damages(workshop: &Workshop, name: &str, disk: &Path) -> Outcome {
    let mut outcome = Outcome::default();
    for zeroed in DAMAGES {
        workshop.damage(disk, zeroed);
        let case = format!("{name}, {} KiB zeroed", zeroed / KIB);
        let Some(before) = hash_disk(disk) else {
            println!("{case}: nothing is left");
            break;
        };
        let known = outcome.missed.len();
        for volume in workshop.volumes(disk) {
            match volume.mount_new(ErasePolicy::Nothing) {
                Err(VolumeError::Occupied { found, .. }) => println!("{case}: {found}"),
                other => outcome.missed.push(format!("{case}: {other:?}")),
            }
        }
        if hash_disk(disk) != Some(before) {
            outcome.missed.push(format!("{case}: the disk has changed"));
        }
        if outcome.missed.len() > known {
            break;
        }
        outcome.refused += 1;
    }
    outcome
}

#[test]
#[ignore = "needs mkntfs: every program that formats a disk is installed with it"]
fn disks_that_somebody_could_want_back_are_refused_and_not_a_byte_changes() {
    let workshop = Workshop::new();
    let formats = selected_formats();
    // Of each format, at least the undamaged disk; of all of them together, far more than fifty.
    let least = if formats.len() == FORMATS.len() { 120 } else { formats.len() };
    let mut all = Outcome::default();
    for (name, mebibytes, script) in formats {
        let outcome = check_damages(&workshop, name, &workshop.make_disk(name, mebibytes, script));
        all.refused += outcome.refused;
        all.missed.extend(outcome.missed);
    }
    println!("{} disks refused", all.refused);
    assert_eq!(all.missed, Vec::<String>::new());
    assert!(all.refused >= least, "{} disks refused", all.refused);
}
