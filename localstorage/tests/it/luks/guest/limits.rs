//! Volumes that are full, that limit their directories, and that grow.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use nodekeel_localstorage::FileMode;
use nodekeel_localstorage::mount::OsMounter;
use nodekeel_localstorage::volume::{
    DataVolume as _, DiskVolume, ErasePolicy, KeyPolicy, UnlockSecret, VolumeEncryption,
};
use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use testbed::command_output;

use super::super::MIB;
use super::{NodeDisk, size_of_file_system};
use crate::fixture::in_child_process;

const ENOSPC: i32 = 28;

/// Writes until it fails, at most this many bytes; gives the number of the error.
fn write_until_error(path: &Path, bytes: u64) -> Option<i32> {
    let mut file = File::create(path).unwrap();
    let chunk = vec![7; MIB as usize];
    let failed = (0..bytes / MIB).find_map(|_| file.write_all(&chunk).err());
    failed.or_else(|| file.sync_all().err()).and_then(|error| error.raw_os_error())
}

/// Takes all space but this, without writing it.
fn reserve_all_but(path: &Path, bytes: u64) {
    let file = File::create(path).unwrap();
    let stat = fstatvfs(&file).unwrap();
    fallocate(&file, FallocateFlags::empty(), 0, stat.f_bavail * stat.f_frsize - bytes).unwrap();
}

/// Gives a directory a project with a limit of 4 MiB.
fn limit_directory(mount_point: &Path, directory: &Path) {
    for command in [format!("project -s -p {} 7", directory.display()), "limit -p bhard=4m 7".into()] {
        let mut quota = Command::new("xfs_quota");
        command_output(quota.args(["-x", "-c", &command]).arg(mount_point)).unwrap();
    }
}

fn check_limits(encryption: VolumeEncryption) {
    let node = NodeDisk::new(384);
    let volume = node.volume(encryption, KeyPolicy::Local).without_wipe();
    let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
    top.write("witness", b"before", FileMode::PRIVATE_FILE).unwrap();
    let limited = node.path("data/limited");
    fs::create_dir(&limited).unwrap();
    limit_directory(&node.path("data"), &limited);
    assert_eq!(write_until_error(&limited.join("file"), 8 * MIB), Some(ENOSPC));
    assert_eq!(write_until_error(&node.path("data/file"), 8 * MIB), None, "outside of the directory");

    reserve_all_but(&node.path("data/large"), 8 * MIB);
    assert_eq!(write_until_error(&node.path("data/rest"), 64 * MIB), Some(ENOSPC));
    let refused = top.write("witness", &vec![1; 16 << 20], FileMode::PRIVATE_FILE).unwrap_err();
    assert!(refused.is_full(), "{refused:?}");
    // The keys lie in the header and on the ESP.
    volume.rotate_keys(&UnlockSecret::Node).unwrap();
    drop(top);
    volume.unmount().unwrap();
    let top = volume.mount_existing().unwrap();
    assert_eq!(top.read("witness").unwrap(), b"before");
    fs::remove_file(node.path("data/large")).unwrap();
    top.write("witness", b"after", FileMode::PRIVATE_FILE).unwrap();
    assert_eq!(write_until_error(&limited.join("file"), 8 * MIB), Some(ENOSPC), "after it was opened again");
}

#[test]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
fn limits_bind_on_an_encrypted_volume_and_a_full_one_keeps_its_files_and_gets_new_keys() {
    in_child_process(
        limits_bind_on_an_encrypted_volume_and_a_full_one_keeps_its_files_and_gets_new_keys,
        || check_limits(VolumeEncryption::Encrypted),
    );
}

#[test]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
fn limits_bind_on_an_authenticated_volume_and_a_full_one_keeps_its_files_and_gets_new_keys() {
    in_child_process(
        limits_bind_on_an_authenticated_volume_and_a_full_one_keeps_its_files_and_gets_new_keys,
        || check_limits(VolumeEncryption::EncryptedAndAuthenticated),
    );
}

#[test]
#[ignore = "soak: needs kernel with a disk of 1 GiB"]
fn a_volume_without_encryption_grows_with_its_disk() {
    in_child_process(a_volume_without_encryption_grows_with_its_disk, || {
        let node = NodeDisk::new(448);
        let volume = DiskVolume::new(&node.part, node.path("data"), Arc::new(OsMounter));
        let top = volume.mount_new(ErasePolicy::Nothing).unwrap();
        top.write("witness", b"data", FileMode::PRIVATE_FILE).unwrap();
        let before = size_of_file_system(&node.path("data"));
        node.grow(960);
        for _ in 0..2 {
            volume.grow_volume().unwrap();
            let grown = size_of_file_system(&node.path("data")) - before;
            assert!(grown > 500 * MIB, "{grown} bytes");
        }
        assert_eq!(top.read("witness").unwrap(), b"data");
        drop(top);
        volume.unmount().unwrap();
    });
}
