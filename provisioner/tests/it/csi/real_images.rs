//! Block and strict volumes with real loop devices and mounts, in a private mount namespace.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nodekeel_provisioner::ImageFormat;
use nodekeel_provisioner::csi::testing::{ConformanceSetup, conformance};
use nodekeel_provisioner::csi::{
    BindMounter, MountRestrictions, TargetConflict, TargetMountError, VolumeMounter,
};

use super::harness::MountSite;
use super::real_mounts::{bind_mount, run_in_mount_namespace};

mod life;
mod writer;

const MIB: u64 = 1 << 20;
const WRITABLE: MountRestrictions =
    MountRestrictions { read_only: false, no_suid: true, no_dev: true, no_exec: false };
const READ_ONLY: MountRestrictions = MountRestrictions { read_only: true, ..WRITABLE };

/// Waits until no file below a directory has a loop device. Other tests look at all of them, and may hold one for a moment.
pub(crate) fn wait_detached(directory: &Path) {
    let left = || devices_below(directory);
    let check = || {
        anyhow::ensure!(left().is_empty(), "{:?} are left", left());
        Ok(())
    };
    testbed::wait_until(Duration::from_secs(10), "the loop devices to go", check).expect("no device is left");
}

/// The loop devices whose files are below a directory, also of files that were removed.
pub(crate) fn devices_below(directory: &Path) -> Vec<String> {
    testbed::leftovers::find_loop_devices(directory).expect("sysfs")
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn the_os_mounter_keeps_the_contract_for_block_and_strict_volumes() {
    run_in_mount_namespace(|| {
        for format in ImageFormat::ALL {
            let fixture = MountSite::new();
            let (one, two) = (fixture.create(1, format), fixture.create(2, format));
            let kubelet = fixture.path("kubelet");
            conformance(&fixture.mounts, ConformanceSetup { volumes: [&one, &two], kubelet: &kubelet });
            assert_eq!(fs::read_dir(fixture.path("kubelet/pods")).expect("list").count(), 0);
            fixture.wait_detached();
        }
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_block_volume_is_one_device_at_all_targets_and_keeps_its_data() {
    run_in_mount_namespace(|| {
        let fixture = MountSite::new();
        let volume = fixture.create(1, ImageFormat::Block);
        for pod in ["pods/a", "pods/b"] {
            fixture.mount(&volume, pod, WRITABLE);
        }
        let stat = |pod| fs::metadata(fixture.target_path(pod)).expect("stat");
        assert!(stat("pods/a").file_type().is_block_device());
        assert_eq!(stat("pods/a").rdev(), stat("pods/b").rdev());
        assert_eq!(fixture.devices().len(), 1);
        let mut device = File::options().write(true).open(fixture.target_path("pods/a")).expect("open");
        assert_eq!(device.seek(std::io::SeekFrom::End(0)).expect("a size"), 16 * MIB);
        device
            .rewind()
            .and_then(|()| device.write_all(b"data"))
            .and_then(|()| device.sync_all())
            .expect("write");
        drop(device);
        let targets = fixture.mounts.list_targets(&volume).expect("list");
        assert_eq!(targets, ["pods/a", "pods/b"].map(|pod| fixture.target(pod)));
        fixture.unmount("pods/a");
        assert!(!fixture.target_path("pods/a").exists());
        assert_eq!(fixture.devices().len(), 1, "the other target shows it");
        fixture.unmount("pods/b");
        fixture.wait_detached();
        let mut data = [0; 4];
        File::open(fixture.image_path(1)).and_then(|mut file| file.read_exact(&mut data)).expect("read");
        assert_eq!(&data, b"data");
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_block_volume_is_read_only_or_writable_at_all_targets() {
    run_in_mount_namespace(|| {
        let fixture = MountSite::new();
        let volume = fixture.create(1, ImageFormat::Block);
        let mount = |pod, flags| fixture.mounts.mount(&volume, &fixture.target(pod), flags);
        let unmount = |pod| fixture.unmount(pod);
        for (first, second) in [(WRITABLE, READ_ONLY), (READ_ONLY, WRITABLE)] {
            mount("pods/a", first).expect("mount");
            let open = File::options().write(true).open(fixture.target_path("pods/a"));
            let written = open.and_then(|mut device| device.write_all(b"x").and_then(|()| device.sync_all()));
            assert_eq!(written.is_err(), first.read_only);
            let conflict = mount("pods/b", second);
            assert!(matches!(conflict, Err(TargetMountError::AccessConflict { .. })), "{conflict:?}");
            assert!(!fixture.target_path("pods/b").exists(), "nothing is left");
            mount("pods/b", first).expect("in the same way");
            unmount("pods/a");
            unmount("pods/b");
            mount("pods/b", second).expect("in the other way, once it is free");
            unmount("pods/b");
        }
        fixture.wait_detached();
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_device_that_is_attached_and_not_mounted_is_used_again_or_released() {
    run_in_mount_namespace(|| {
        let fixture = MountSite::new();
        let volume = fixture.create(1, ImageFormat::Block);
        let attach = |access: &[&str]| {
            let done = Command::new("losetup").args(access).arg("-f").arg(fixture.image_path(1)).status();
            assert!(done.expect("losetup").success());
        };
        attach(&[]);
        let before = fixture.devices();
        fixture.mount(&volume, "pods/a", WRITABLE);
        assert_eq!(fixture.devices(), before, "it is used again");
        fixture.mounts.release(&volume).expect("release");
        assert_eq!(fixture.devices(), before, "it is mounted");
        fixture.unmount("pods/a");
        fixture.mounts.release(&volume).expect("release");
        fixture.wait_detached();
        // In the other way, it is of no use.
        attach(&["-r"]);
        fixture.mount(&volume, "pods/a", WRITABLE);
        fixture.unmount("pods/a");
        attach(&[]);
        fixture.mounts.release(&volume).expect("release");
        fixture.wait_detached();
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_grown_block_volume_has_its_size_when_it_is_mounted_again() {
    run_in_mount_namespace(|| {
        let fixture = MountSite::new();
        let volume = fixture.create(1, ImageFormat::Block);
        fixture.mount(&volume, "pods/a", WRITABLE);
        let file = File::options().write(true).open(fixture.image_path(1)).expect("open");
        file.set_len(24 * MIB).expect("grow");
        fixture.mount(&volume, "pods/b", WRITABLE);
        let mut device = File::open(fixture.target_path("pods/a")).expect("open");
        assert_eq!(device.seek(std::io::SeekFrom::End(0)).expect("a size"), 24 * MIB);
        drop(device);
        for pod in ["pods/a", "pods/b"] {
            fixture.unmount(pod);
        }
        fixture.wait_detached();
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_strict_volume_is_one_file_system_that_goes_with_its_last_mount() {
    run_in_mount_namespace(|| {
        for format in [ImageFormat::Ext4, ImageFormat::Xfs] {
            let fixture = MountSite::new();
            let volume = fixture.create(1, format);
            fixture.mount(&volume, "pods/a", WRITABLE);
            fs::write(fixture.target_path("pods/a").join("file"), "data").expect("write");
            // After a restart.
            let again = BindMounter::new(fixture.path("kubelet"));
            again.mount(&fixture.open(1, format), &fixture.target("pods/b"), READ_ONLY).expect("mount");
            assert_eq!(fixture.devices().len(), 1, "one device");
            let seen = fs::read_to_string(fixture.target_path("pods/b").join("file")).expect("read");
            assert_eq!(seen, "data");
            let error = fs::write(fixture.target_path("pods/b").join("new"), "").expect_err("read-only");
            assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
            fs::write(fixture.target_path("pods/a").join("new"), "").expect("the other mount is writable");
            fixture.unmount("pods/a");
            assert_eq!(fixture.devices().len(), 1, "the other target shows it");
            fixture.unmount("pods/b");
            fixture.wait_detached();
            fixture.mount(&volume, "pods/a", WRITABLE);
            assert_eq!(fs::read_to_string(fixture.target_path("pods/a").join("file")).expect("read"), "data");
            fixture.unmount("pods/a");
        }
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_directory_within_a_strict_volume_that_is_mounted_is_a_use_of_it() {
    run_in_mount_namespace(|| {
        let fixture = MountSite::new();
        let volume = fixture.create(1, ImageFormat::Ext4);
        fixture.mount(&volume, "pods/a", WRITABLE);
        let sub_path = fixture.path("kubelet/sub-path");
        fs::create_dir(&sub_path)
            .and_then(|()| fs::create_dir(fixture.target_path("pods/a/sub")))
            .expect("create");
        let bind = |source: &Path| {
            bind_mount(source, &sub_path);
        };
        bind(&fixture.target_path("pods/a/sub"));
        fixture.unmount("pods/a");
        assert_eq!(fixture.mounts.list_targets(&volume).expect("list"), []);
        assert_eq!(fixture.mounts.list_nested(&volume).expect("list"), std::slice::from_ref(&sub_path));
        nix::mount::umount(&sub_path).expect("unmount");
        assert_eq!(fixture.mounts.list_nested(&volume).expect("list"), Vec::<PathBuf>::new());
        fixture.wait_detached();
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn the_kubelets_mounts_of_a_device_are_uses_of_its_volume() {
    run_in_mount_namespace(|| {
        let fixture = MountSite::new();
        let volume = fixture.create(1, ImageFormat::Block);
        fixture.mount(&volume, "pods/a", WRITABLE);
        // As the kubelet's global map of a block volume.
        let global = fixture.path("kubelet/global");
        File::create(&global).expect("create");
        let source = fixture.target_path("pods/a");
        bind_mount(&source, &global);
        fixture.unmount("pods/a");
        fixture.mounts.release(&volume).expect("release");
        assert_eq!(fixture.mounts.list_targets(&volume).expect("list"), [fixture.target("global")]);
        assert_eq!(fixture.devices().len(), 1);
        nix::mount::umount(&global).expect("unmount");
        fixture.mounts.release(&volume).expect("release");
        fixture.wait_detached();
    });
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn conflicting_targets_are_kept_and_a_file_that_can_not_be_mounted_leaves_nothing() {
    run_in_mount_namespace(|| {
        let fixture = MountSite::new();
        let (block, strict) = (fixture.create(1, ImageFormat::Block), fixture.create(2, ImageFormat::Ext4));
        fs::create_dir(fixture.target_path("pods/directory")).expect("create");
        File::create(fixture.target_path("pods/file")).expect("create");
        let mount = |volume, pod| fixture.mounts.mount(volume, &fixture.target(pod), WRITABLE);
        let rejected = mount(&block, "pods/directory");
        assert!(matches!(rejected, Err(TargetMountError::NotFile { .. })), "{rejected:?}");
        let rejected = mount(&strict, "pods/file");
        assert!(matches!(rejected, Err(TargetMountError::NotDirectory { .. })), "{rejected:?}");
        assert!(fixture.target_path("pods/directory").exists() && fixture.target_path("pods/file").exists());
        // A file without a file system.
        fs::write(fixture.image_path(2), vec![0; 1 << 20]).expect("write");
        let failed = mount(&strict, "pods/a");
        assert!(matches!(failed, Err(TargetMountError::Mount { .. })), "{failed:?}");
        assert!(!fixture.target_path("pods/a").exists());
        mount(&block, "pods/file").expect("an empty file is as good as none");
        let stacked = mount(&block, "pods/file");
        assert!(
            matches!(stacked, Err(TargetMountError::Occupied { source: TargetConflict::Mount, .. })),
            "{stacked:?}"
        );
        fixture.unmount("pods/file");
        fixture.wait_detached();
    });
}
