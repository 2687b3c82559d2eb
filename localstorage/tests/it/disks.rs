//! Volumes and mounts on real disks, by a real kernel.

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nodekeel_localstorage::mount::{MountError, MountFlags, MountSpec, Mounter as _, OsMounter};
use nodekeel_localstorage::testing::volume_conformance;
use nodekeel_localstorage::tree::{LayoutEntry, LayoutTarget, MountPoint};
use nodekeel_localstorage::volume::{
    DataVolume as _, DiskVolume, ErasePolicy, VolumeContents, VolumeError, inspect_disk,
};
use nodekeel_localstorage::{Dir, FileMode, OsFileStore};
use rustix::fs::{FallocateFlags, fallocate};
use tempfile::TempDir;
use testbed::guest::disk::{FileSystem, GuestDisk};

use crate::fixture::{in_child_process, runs_whole_counts};
use crate::monogon_root::{DataPartition, NodeRoot};

const MIB: usize = 1 << 20;

/// A disk of the guest, and its mount point.
struct DiskFixture {
    temporary: TempDir,
    disk: GuestDisk,
}

impl DiskFixture {
    /// Wipes the disk: earlier tests have left data on it.
    fn new() -> DiskFixture {
        let (temporary, disk) = (tempfile::tempdir().unwrap(), GuestDisk::acquire().unwrap());
        let fixture = DiskFixture { temporary, disk };
        fs::create_dir(fixture.target()).unwrap();
        fixture.wipe();
        fixture
    }

    fn target(&self) -> PathBuf {
        self.temporary.path().canonicalize().unwrap().join("data")
    }

    fn volume(&self) -> DiskVolume {
        DiskVolume::new(self.disk.device_path(), self.target(), Arc::new(OsMounter))
    }

    fn wipe(&self) {
        let size = File::open(self.disk.device_path()).unwrap().seek(SeekFrom::End(0)).unwrap();
        self.zero_head(size);
    }

    fn zero_head(&self, bytes: u64) {
        let disk = File::options().write(true).open(self.disk.device_path()).unwrap();
        fallocate(&disk, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, bytes).unwrap();
        disk.sync_all().unwrap();
    }

    /// Formats the disk with the first of the words, a program.
    fn run_mkfs(&self, words: &[&str]) {
        testbed::command_output(Command::new(words[0]).args(&words[1..]).arg(self.disk.device_path()))
            .unwrap();
    }

    /// The first and the last MiB.
    fn ends(&self) -> Vec<u8> {
        let disk = File::open(self.disk.device_path()).unwrap();
        let size = std::io::Seek::seek(&mut &disk, std::io::SeekFrom::End(0)).unwrap();
        let mut ends = vec![0; 2 * MIB];
        disk.read_exact_at(&mut ends[..MIB], 0).unwrap();
        disk.read_exact_at(&mut ends[MIB..], size - MIB as u64).unwrap();
        ends
    }

    fn contents(&self) -> VolumeContents {
        inspect_disk(self.disk.device_path()).unwrap().contents
    }

    /// A replacement for mkfs.xfs.
    fn script(&self, script: &str) -> PathBuf {
        let path = self.temporary.path().join("mkfs");
        testbed::write_program(&path, script).unwrap();
        path
    }
}

impl Drop for DiskFixture {
    fn drop(&mut self) {
        let _ = OsMounter.unmount(&self.target());
    }
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_disk_volume_keeps_the_volume_contract() {
    in_child_process(a_disk_volume_keeps_the_volume_contract, || {
        let fixture = DiskFixture::new();
        volume_conformance(&fixture.volume());
        assert!(matches!(fixture.contents(), VolumeContents::Xfs { label, .. } if label == "nodekeel"));
        assert_eq!(OsMounter.mount_info(&fixture.target()).unwrap(), None);
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_new_volume_enforces_project_quotas_and_holds_the_layout() {
    in_child_process(a_new_volume_enforces_project_quotas_and_holds_the_layout, || {
        let fixture = DiskFixture::new();
        let top = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap();
        let mounted = OsMounter.mount_info(&fixture.target()).unwrap().unwrap();
        assert!(mounted.matches_spec(&MountSpec::DATA, None), "{mounted:?}");
        let output =
            Command::new("xfs_quota").args(["-x", "-c", "state -p"]).arg(fixture.target()).output().unwrap();
        let state = String::from_utf8(output.stdout).unwrap();
        assert_eq!(state.matches(": ON").count(), 2, "accounting and enforcement: {state}");

        let data: DataPartition =
            LayoutTarget::new(Arc::new(OsFileStore::new(top)), fixture.target()).create_layout().unwrap();
        data.node.roles.write(b"all").unwrap();
        let mode = fs::metadata(fixture.target().join("node/roles.pb")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o400);
        drop(data);
        // Another process finds the volume mounted and uses it.
        let again = fixture.volume().mount_existing().unwrap();
        assert_eq!(again.read("node/roles.pb").unwrap(), b"all");
        drop(again);
        OsMounter.unmount(&fixture.target()).unwrap();
        assert_eq!(fixture.volume().mount_existing().unwrap().read("node/roles.pb").unwrap(), b"all");
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn foreign_file_systems_are_rejected_and_left_unchanged() {
    in_child_process(foreign_file_systems_are_rejected_and_left_unchanged, || {
        let fixture = DiskFixture::new();
        for (kind, name) in [
            (FileSystem::Xfs, "an XFS labelled \"\""),
            (FileSystem::Ext4, "ext at byte 1080"),
            (FileSystem::PlainExt4, "ext at byte 1080"),
            (FileSystem::Vfat, "vfat at byte"),
        ] {
            fixture.wipe();
            kind.format_device(fixture.disk.device_path()).unwrap();
            let before = fixture.ends();
            let rejected = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap_err();
            assert!(matches!(rejected, VolumeError::Occupied { .. }), "{rejected:?}");
            assert!(rejected.to_string().contains(name), "{rejected}");
            assert!(matches!(fixture.volume().mount_existing(), Err(VolumeError::ForeignData { .. })));
            assert!(before == fixture.ends(), "{name} has changed");
            let top = fixture.volume().mount_new(ErasePolicy::Exactly(fixture.contents())).unwrap();
            drop(top);
            OsMounter.unmount(&fixture.target()).unwrap();
        }
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn disks_whose_heads_were_zeroed_are_occupied_and_left_unchanged() {
    in_child_process(disks_whose_heads_were_zeroed_are_occupied_and_left_unchanged, || {
        const KIB: u64 = 1 << 10;
        let fixture = DiskFixture::new();
        let key = fixture.temporary.path().join("key");
        fs::write(&key, "a key of a test").unwrap();
        let luks = ["cryptsetup", "luksFormat", "--type=luks2", "--batch-mode", "--pbkdf=pbkdf2"];
        let iterations = ["--pbkdf-force-iterations=1000", "--key-file", key.to_str().unwrap()];
        let luks = [&luks[..], &iterations].concat();
        // The largest metadata area, whose copy lies behind the zeros.
        let large_luks = [&luks[..], &["--luks2-metadata-size=4m", "--luks2-keyslots-size=4m"]].concat();
        let ext4 = ["mkfs.ext4", "-q", "-F"];
        for (format, zeroed, found) in [
            // The first bytes are random, and may be zero.
            (&luks[..], 64 * KIB, "data at byte 655"),
            (&large_luks, 64 * KIB, "luks at byte 4194304"),
            (&large_luks, 1024 * KIB, "luks at byte 4194304"),
            (&ext4, 64 * KIB, "data at byte 65536"),
            (&ext4, 16 << 20, "ext at byte 134217784"),
            (&["mkfs.ext4", "-q", "-F", "-b", "1024"], 1024 * KIB, "ext at byte 8389688"),
            (&["mkfs.xfs", "-q", "-f"], 64 * KIB, "data at byte 65536"),
            // Where the second allocation group starts depends on the size of the disk.
            (&["mkfs.xfs", "-q", "-f"], 16 << 20, "xfs at byte "),
            (&["mkfs.btrfs", "-q", "-f"], 128 * KIB, "btrfs at byte 67108928"),
            (&["mkfs.btrfs", "-q", "-f"], 1024 * KIB, "btrfs at byte 67108928"),
        ] {
            fixture.wipe();
            fixture.run_mkfs(format);
            fixture.zero_head(zeroed);
            let before = fixture.ends();
            let rejected = fixture.volume().mount_new(ErasePolicy::Nothing);
            let Err(VolumeError::Occupied { found: contents, .. }) = rejected else {
                panic!("{format:?}, {zeroed} bytes zeroed: {rejected:?}");
            };
            println!("{format:?}, {zeroed} bytes zeroed: {contents}");
            assert!(contents.to_string().starts_with(found), "{format:?}, {zeroed} bytes zeroed: {contents}");
            assert!(matches!(fixture.volume().mount_existing(), Err(VolumeError::ForeignData { .. })));
            assert_eq!(fixture.contents(), contents, "{format:?} has changed");
            assert!(before == fixture.ends(), "{format:?} has changed");
            let top = fixture.volume().mount_new(ErasePolicy::Exactly(contents)).unwrap();
            drop(top);
            OsMounter.unmount(&fixture.target()).unwrap();
        }
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_real_mkfs_killed_at_many_times_is_run_again() {
    in_child_process(a_real_mkfs_killed_at_many_times_is_run_again, || {
        let fixture = DiskFixture::new();
        let mut killed = 0;
        let (step, at_least) = if runs_whole_counts() { (1, 2) } else { (12, 1) };
        for hundredths in (0..25).step_by(step) {
            fixture.wipe();
            // It is killed after this many hundredths of a second, and may complete before.
            let mkfs = fixture.script(&format!(
                "#!/bin/sh\nmkfs.xfs \"$@\" &\npid=$!\nsleep 0.{hundredths:02}\nkill -9 $pid && wait $pid\n"
            ));
            match fixture.volume().with_mkfs(mkfs).mount_new(ErasePolicy::Nothing) {
                Err(VolumeError::Format { .. }) => {
                    killed += 1;
                    // Killed before its first write, it leaves a blank disk, and after it an interrupted format.
                    let existing = fixture.volume().mount_existing();
                    let is_known =
                        matches!(existing, Err(VolumeError::Absent { .. } | VolumeError::Unfinished { .. }));
                    assert!(is_known, "{existing:?}");
                }
                Err(other) => panic!("{other:?}"),
                Ok(top) => {
                    drop(top);
                    OsMounter.unmount(&fixture.target()).unwrap();
                    continue;
                }
            }
            let top = fixture.volume().mount_new(ErasePolicy::Nothing).unwrap();
            top.write("a", b"b", FileMode::PRIVATE_FILE).unwrap();
            drop(top);
            OsMounter.unmount(&fixture.target()).unwrap();
            assert_eq!(fixture.volume().mount_existing().unwrap().read("a").unwrap(), b"b");
            OsMounter.unmount(&fixture.target()).unwrap();
        }
        // A fast machine has formatted the disk before the second time of a sample.
        assert!(killed >= at_least, "mkfs.xfs was killed {killed} times");
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn a_volume_in_use_or_mounted_with_other_options_stays_unchanged() {
    in_child_process(a_volume_in_use_or_mounted_with_other_options_stays_unchanged, || {
        let fixture = DiskFixture::new();
        let elsewhere = fixture.temporary.path().canonicalize().unwrap().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        FileSystem::Xfs.format_device(fixture.disk.device_path()).unwrap();
        let plain = MountSpec { options: &[], ..MountSpec::DATA };
        OsMounter.mount(&plain, Some(fixture.disk.device_path()), &elsewhere).unwrap();
        let in_use = fixture.volume().mount_new(ErasePolicy::Exactly(fixture.contents())).unwrap_err();
        let VolumeError::InUse { users, .. } = in_use else { panic!("{in_use:?}") };
        assert_eq!(users, format!("mounted on {0}: `umount {0}`", elsewhere.display()));
        OsMounter.unmount(&elsewhere).unwrap();

        fixture.volume().mount_new(ErasePolicy::Exactly(fixture.contents())).map(drop).unwrap();
        OsMounter.unmount(&fixture.target()).unwrap();
        OsMounter.mount(&plain, Some(fixture.disk.device_path()), &fixture.target()).unwrap();
        let conflict = fixture.volume().mount_existing().unwrap_err();
        let VolumeError::Mount(MountError::Conflict { existing: is, .. }) = conflict else {
            panic!("{conflict:?}")
        };
        assert_eq!(is.flags, MountFlags::NOSUID);
        OsMounter.unmount(&fixture.target()).unwrap();
        // That of an earlier release, which could not be unmounted, gets the flags of this one.
        let former = MountSpec { flags: MountFlags::NODEV | MountFlags::NOEXEC, ..MountSpec::DATA };
        OsMounter.mount(&former, Some(fixture.disk.device_path()), &fixture.target()).unwrap();
        let volume = fixture.volume();
        let top = volume.mount_existing().unwrap();
        assert_eq!(OsMounter.mount_info(&fixture.target()).unwrap().unwrap().flags, MountSpec::DATA.flags);
        // A volume in use is not unmounted, and stays mounted.
        assert!(matches!(volume.unmount(), Err(VolumeError::Mount(MountError::Unmount { .. }))));
        assert_eq!(volume.state(), nodekeel_localstorage::volume::MountState::Mounted);
        drop(top);
        volume.unmount().unwrap();
    });
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
fn the_esp_is_mounted_synchronously_and_holds_its_layout() {
    in_child_process(the_esp_is_mounted_synchronously_and_holds_its_layout, || {
        let fixture = DiskFixture::new();
        FileSystem::Vfat.format_device(fixture.disk.device_path()).unwrap();
        let root: NodeRoot =
            LayoutTarget::new(Arc::new(OsFileStore::new(Dir::open(fixture.temporary.path()).unwrap())), "/")
                .create_layout()
                .unwrap();
        let target = fixture.temporary.path().canonicalize().unwrap().join("esp");
        for round in 0..2 {
            OsMounter.mount(&MountSpec::ESP, Some(fixture.disk.device_path()), &target).unwrap();
            OsMounter.mount(&MountSpec::ESP, Some(fixture.disk.device_path()), &target).unwrap();
            let mounted = OsMounter.mount_info(&target).unwrap().unwrap();
            assert_eq!(mounted.flags.to_string(), "nosuid,nodev,noexec,sync");
            let esp = root.esp.create_layout_in(Dir::open(&target).unwrap()).unwrap();
            if round == 0 {
                esp.node.parameters.write(b"first").unwrap();
                esp.node.parameters.write(b"second").unwrap();
                esp.efi.images.a.write(&vec![7; 3 * MIB]).unwrap();
            }
            assert_eq!(esp.node.parameters.read().unwrap(), b"second");
            assert_eq!(esp.efi.images.a.read().unwrap().len(), 3 * MIB);
            drop(esp);
            OsMounter.unmount(&target).unwrap();
            assert_eq!(OsMounter.mount_info(&target).unwrap(), None, "the file system was mounted only once");
        }
    });
}

/// Mounts a tmpfs on a mount point of the layout, and creates the layout of the mount point in it.
fn mount_and_create_layout<T: LayoutEntry>(point: &MountPoint<T>, spec: &MountSpec, root: &Path) -> T {
    let target = root.join(point.path().strip_prefix("/").unwrap());
    OsMounter.mount(spec, None, &target).unwrap();
    point.create_layout_in(Dir::open(&target).unwrap()).unwrap()
}

#[test]
#[ignore = "needs root"]
fn ephemeral_directories_are_mounted_as_tmpfs_with_their_modes() {
    let temporary = tempfile::tempdir().unwrap();
    let top = temporary.path().canonicalize().unwrap();
    let root: NodeRoot =
        LayoutTarget::new(Arc::new(OsFileStore::new(Dir::open(&top).unwrap())), "/").create_layout().unwrap();
    mount_and_create_layout(&root.tmp, &MountSpec::TMP, &top);
    mount_and_create_layout(&root.run, &MountSpec::RUN, &top);
    mount_and_create_layout(&root.ephemeral, &MountSpec::EPHEMERAL, &top);
    for (path, mode, flags) in [
        ("tmp", 0o1777, "nosuid,nodev,noexec"),
        ("run", 0o755, "nosuid,nodev,noexec"),
        ("ephemeral", 0o755, "nosuid,nodev"),
    ] {
        let mounted = OsMounter.mount_info(&top.join(path)).unwrap().unwrap();
        assert_eq!((mounted.fstype.as_str(), mounted.flags.to_string().as_str()), ("tmpfs", flags));
        let is = fs::metadata(top.join(path)).unwrap().permissions().mode();
        assert_eq!(is & 0o7777, mode, "{path}");
    }
    for path in ["tmp", "run", "ephemeral"] {
        OsMounter.unmount(&top.join(path)).unwrap();
        assert_eq!(
            fs::read_dir(top.join(path)).unwrap().count(),
            0,
            "nothing was created below the mount points"
        );
    }
}
