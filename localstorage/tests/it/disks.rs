//! Volumes and mounts on real disks, by a real kernel.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, RwLockWriteGuard};

use nodekeel_localstorage::mount::{MountError, MountFlags, MountSpec, Mounter as _, OsMounter};
use nodekeel_localstorage::testing::volume_conformance;
use nodekeel_localstorage::tree::{Data, MountPoint, Node, Root, Site};
use nodekeel_localstorage::volume::{Contents, DataVolume as _, Erase, Plain, VolumeError, probe};
use nodekeel_localstorage::{Dir, Mode, OsPlacement};
use tempfile::TempDir;
use testbed::guest::inside::{Disk, FileSystem};

use crate::bed::no_forks;

const MIB: usize = 1 << 20;

/// A disk of the guest, and a directory to mount it on.
struct Bench {
    temporary: TempDir,
    disk: Disk,
    _no_forks: RwLockWriteGuard<'static, ()>,
}

impl Bench {
    /// With nothing on the disk: earlier tests have left something.
    fn new() -> Bench {
        let (temporary, disk) = (tempfile::tempdir().unwrap(), Disk::take().unwrap());
        let bench = Bench { temporary, disk, _no_forks: no_forks() };
        fs::create_dir(bench.target()).unwrap();
        bench.wipe();
        bench
    }

    fn target(&self) -> PathBuf {
        self.temporary.path().canonicalize().unwrap().join("data")
    }

    fn volume(&self) -> Plain {
        Plain::new(self.disk.path(), self.target(), Arc::new(OsMounter))
    }

    fn wipe(&self) {
        let disk = File::options().write(true).open(self.disk.path()).unwrap();
        let size = std::io::Seek::seek(&mut &disk, std::io::SeekFrom::End(0)).unwrap();
        for at in [0, size - MIB as u64] {
            disk.write_all_at(&vec![0; MIB], at).unwrap();
        }
        disk.sync_all().unwrap();
    }

    /// The first and the last MiB.
    fn ends(&self) -> Vec<u8> {
        let disk = File::open(self.disk.path()).unwrap();
        let size = std::io::Seek::seek(&mut &disk, std::io::SeekFrom::End(0)).unwrap();
        let mut ends = vec![0; 2 * MIB];
        disk.read_exact_at(&mut ends[..MIB], 0).unwrap();
        disk.read_exact_at(&mut ends[MIB..], size - MIB as u64).unwrap();
        ends
    }

    fn contents(&self) -> Contents {
        probe(&mut File::open(self.disk.path()).unwrap()).unwrap()
    }

    /// A program in the place of mkfs.xfs.
    fn script(&self, script: &str) -> PathBuf {
        let path = self.temporary.path().join("mkfs");
        testbed::write_program(&path, script).unwrap();
        path
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = OsMounter.unmount(&self.target());
    }
}

#[test]
#[ignore = "needs kernel with a disk of 1 GiB"]
fn a_disk_keeps_the_contract_of_volumes() {
    let bench = Bench::new();
    volume_conformance(&bench.volume());
    assert!(matches!(bench.contents(), Contents::Xfs { label, .. } if label == "nodekeel"));
    assert_eq!(OsMounter.mounted(&bench.target()).unwrap(), None);
}

#[test]
#[ignore = "needs kernel with a disk of 1 GiB"]
fn a_new_volume_enforces_project_quotas_and_takes_the_tree() {
    let bench = Bench::new();
    let top = bench.volume().mount_new(Erase::Nothing).unwrap();
    let mounted = OsMounter.mounted(&bench.target()).unwrap().unwrap();
    assert!(mounted.is(&MountSpec::DATA, None), "{mounted:?}");
    let output =
        Command::new("xfs_quota").args(["-x", "-c", "state -p"]).arg(bench.target()).output().unwrap();
    let state = String::from_utf8(output.stdout).unwrap();
    assert_eq!(state.matches(": ON").count(), 2, "accounting and enforcement: {state}");

    let data: Data = Site::new(Arc::new(OsPlacement::new(top)), bench.target()).place().unwrap();
    data.node.roles.write(b"all").unwrap();
    let mode = fs::metadata(bench.target().join("node/roles.pb")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o400);
    drop(data);
    // Another process finds it mounted, and takes it as it is.
    let again = bench.volume().mount_existing().unwrap();
    assert_eq!(again.read("node/roles.pb").unwrap(), b"all");
    drop(again);
    OsMounter.unmount(&bench.target()).unwrap();
    assert_eq!(bench.volume().mount_existing().unwrap().read("node/roles.pb").unwrap(), b"all");
}

#[test]
#[ignore = "needs kernel with a disk of 1 GiB"]
fn file_systems_of_others_are_refused_and_left_as_they_are() {
    let bench = Bench::new();
    for (kind, name) in [
        (FileSystem::Xfs, "an XFS labelled \"\""),
        (FileSystem::Ext4, "ext at byte 1080"),
        (FileSystem::PlainExt4, "ext at byte 1080"),
        (FileSystem::Vfat, "vfat at byte"),
    ] {
        bench.wipe();
        kind.make(bench.disk.path()).unwrap();
        let before = bench.ends();
        let refused = bench.volume().mount_new(Erase::Nothing).unwrap_err();
        assert!(matches!(refused, VolumeError::Occupied { .. }), "{refused:?}");
        assert!(refused.to_string().contains(name), "{refused}");
        assert!(matches!(bench.volume().mount_existing(), Err(VolumeError::NotOurs { .. })));
        assert!(before == bench.ends(), "{name} has changed");
        let top = bench.volume().mount_new(Erase::Exactly(bench.contents())).unwrap();
        drop(top);
        OsMounter.unmount(&bench.target()).unwrap();
    }
}

#[test]
#[ignore = "needs kernel with a disk of 1 GiB"]
fn a_real_mkfs_killed_at_many_times_is_run_again() {
    let bench = Bench::new();
    let mut killed = 0;
    for hundredths in 0..25 {
        bench.wipe();
        // Its time is over after that many hundredths of a second; it may be through before.
        let mkfs = bench.script(&format!(
            "#!/bin/sh\nmkfs.xfs \"$@\" &\npid=$!\nsleep 0.{hundredths:02}\nkill -9 $pid && wait $pid\n"
        ));
        match bench.volume().with_mkfs(mkfs).mount_new(Erase::Nothing) {
            Err(VolumeError::Format { .. }) => {
                killed += 1;
                assert_eq!(bench.contents(), Contents::Interrupted);
                assert!(matches!(bench.volume().mount_existing(), Err(VolumeError::Unfinished { .. })));
            }
            Err(other) => panic!("{other:?}"),
            Ok(top) => {
                drop(top);
                OsMounter.unmount(&bench.target()).unwrap();
                continue;
            }
        }
        let top = bench.volume().mount_new(Erase::Nothing).unwrap();
        top.write("a", b"b", Mode::PRIVATE_FILE).unwrap();
        drop(top);
        OsMounter.unmount(&bench.target()).unwrap();
        assert_eq!(bench.volume().mount_existing().unwrap().read("a").unwrap(), b"b");
        OsMounter.unmount(&bench.target()).unwrap();
    }
    assert!(killed >= 2, "mkfs.xfs was killed {killed} times");
}

#[test]
#[ignore = "needs kernel with a disk of 1 GiB"]
fn a_volume_that_is_in_use_or_mounted_otherwise_is_left_alone() {
    let bench = Bench::new();
    let elsewhere = bench.temporary.path().canonicalize().unwrap().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    FileSystem::Xfs.make(bench.disk.path()).unwrap();
    let plain = MountSpec { options: &[], ..MountSpec::DATA };
    OsMounter.mount(&plain, Some(bench.disk.path()), &elsewhere).unwrap();
    let in_use = bench.volume().mount_new(Erase::Exactly(bench.contents())).unwrap_err();
    assert!(matches!(in_use, VolumeError::Device { step: "open for itself", .. }), "{in_use:?}");
    OsMounter.unmount(&elsewhere).unwrap();

    bench.volume().mount_new(Erase::Exactly(bench.contents())).map(drop).unwrap();
    OsMounter.unmount(&bench.target()).unwrap();
    OsMounter.mount(&plain, Some(bench.disk.path()), &bench.target()).unwrap();
    let conflict = bench.volume().mount_existing().unwrap_err();
    let VolumeError::Mount(MountError::Conflict { is, .. }) = conflict else { panic!("{conflict:?}") };
    assert_eq!(is.flags, MountFlags::NOSUID | MountFlags::NOEXEC);
    // A volume that somebody works in is not unmounted from under him, and stays what it was.
    OsMounter.unmount(&bench.target()).unwrap();
    let volume = bench.volume();
    let top = volume.mount_existing().unwrap();
    assert!(matches!(volume.unmount(), Err(VolumeError::Mount(MountError::Unmount { .. }))));
    assert_eq!(volume.state(), nodekeel_localstorage::volume::State::Mounted);
    drop(top);
    volume.unmount().unwrap();
}

#[test]
#[ignore = "needs kernel with a disk of 1 GiB"]
fn the_esp_is_mounted_synchronously_and_holds_its_part_of_the_tree() {
    let bench = Bench::new();
    FileSystem::Vfat.make(bench.disk.path()).unwrap();
    let root: Root = Site::new(Arc::new(OsPlacement::new(Dir::open(bench.temporary.path()).unwrap())), "/")
        .place()
        .unwrap();
    let target = bench.temporary.path().canonicalize().unwrap().join("esp");
    for round in 0..2 {
        OsMounter.mount(&MountSpec::ESP, Some(bench.disk.path()), &target).unwrap();
        OsMounter.mount(&MountSpec::ESP, Some(bench.disk.path()), &target).unwrap();
        let mounted = OsMounter.mounted(&target).unwrap().unwrap();
        assert_eq!(mounted.flags.to_string(), "nosuid,nodev,noexec,sync");
        let esp = root.esp.enter(Dir::open(&target).unwrap()).unwrap();
        if round == 0 {
            esp.node.parameters.write(b"first").unwrap();
            esp.node.parameters.write(b"second").unwrap();
            esp.efi.images.a.write(&vec![7; 3 * MIB]).unwrap();
        }
        assert_eq!(esp.node.parameters.read().unwrap(), b"second");
        assert_eq!(esp.efi.images.a.read().unwrap().len(), 3 * MIB);
        drop(esp);
        OsMounter.unmount(&target).unwrap();
        assert_eq!(OsMounter.mounted(&target).unwrap(), None, "it was mounted once");
    }
}

/// Mounts a file system of memory on a mount point of the tree, and places in it what belongs there.
fn enter<T: Node>(point: &MountPoint<T>, spec: &MountSpec, root: &Path) -> T {
    let target = root.join(point.path().strip_prefix("/").unwrap());
    OsMounter.mount(spec, None, &target).unwrap();
    point.enter(Dir::open(&target).unwrap()).unwrap()
}

#[test]
#[ignore = "needs root"]
fn what_lasts_until_the_next_boot_is_mounted_in_memory_with_its_modes() {
    let temporary = tempfile::tempdir().unwrap();
    let top = temporary.path().canonicalize().unwrap();
    let root: Root = Site::new(Arc::new(OsPlacement::new(Dir::open(&top).unwrap())), "/").place().unwrap();
    enter(&root.tmp, &MountSpec::TMP, &top);
    enter(&root.run, &MountSpec::RUN, &top);
    enter(&root.ephemeral, &MountSpec::EPHEMERAL, &top);
    for (path, mode, flags) in [
        ("tmp", 0o1777, "nosuid,nodev,noexec"),
        ("run", 0o755, "nosuid,nodev,noexec"),
        ("ephemeral", 0o755, "nosuid,nodev"),
    ] {
        let mounted = OsMounter.mounted(&top.join(path)).unwrap().unwrap();
        assert_eq!((mounted.fstype.as_str(), mounted.flags.to_string().as_str()), ("tmpfs", flags));
        let is = fs::metadata(top.join(path)).unwrap().permissions().mode();
        assert_eq!(is & 0o7777, mode, "{path}");
    }
    for path in ["tmp", "run", "ephemeral"] {
        OsMounter.unmount(&top.join(path)).unwrap();
        assert_eq!(fs::read_dir(top.join(path)).unwrap().count(), 0, "nothing was made below the mounts");
    }
}
