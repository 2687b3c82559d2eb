//! Data directories that can't be used: one line with a hint, and nothing changed.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use nix::mount::{MsFlags, mount, umount};
use testbed::ScratchDir;

use crate::harness::{Ended, EtcdPorts, NO_DAEMONS, PublicProgram, check, node_command};

#[test]
fn a_conflict_with_the_layout_is_one_line_and_nothing_is_touched() {
    let config = EtcdPorts::reserve().config_to_check();
    type Make = fn(&Path);
    let cases: [(Make, &str); 5] = [
        (|data| fs::write(data.join("run"), "").unwrap(), "/data/run is not a directory: move it away"),
        (|data| fs::write(data.join("esp"), "").unwrap(), "/data/esp is not a directory: move it away"),
        (
            |data| symlink("/tmp", data.join("run")).unwrap(),
            "/data/run is a symbolic link, and links below the data directory are not followed: replace it",
        ),
        (|data| symlink("/tmp", data.join("esp")).unwrap(), "/data/esp is a symbolic link"),
        (|data| symlink("/tmp", data.join("lock")).unwrap(), "/data/lock is a symbolic link"),
    ];
    for (make, says) in cases {
        let scratch = ScratchDir::new().unwrap();
        let data = scratch.path().join("data");
        fs::create_dir(&data).unwrap();
        make(&data);
        for verb in ["run", "check"] {
            let ended = Ended::of(&mut node_command(verb, scratch.path(), &config));
            ended.assert_fails_in_a_line(4, says);
        }
        assert_eq!(fs::read_dir(&data).unwrap().count(), 1, "something was created");
    }
}

/// Mounts a file system of this size in memory. It must be unmounted.
fn mount_small(directory: &Path, size: &str) {
    fs::create_dir(directory).unwrap();
    let options = format!("size={size}");
    mount(Some("tmpfs"), directory, Some("tmpfs"), MsFlags::empty(), Some(&*options)).unwrap();
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn an_etcd_with_data_needs_no_free_space_for_its_first_segments() {
    let scratch = ScratchDir::new().unwrap();
    let data = scratch.path().join("data");
    mount_small(&data, "4m");
    let config = EtcdPorts::reserve().config_to_check();
    let new = check(scratch.path(), &config, &[]);
    fs::create_dir_all(data.join("data/etcd/data/member")).unwrap();
    let old = check(scratch.path(), &config, &[]);
    umount(&data).unwrap();
    new.assert_fails(4, "not enough disk space for");
    assert_eq!((&*old.stderr, old.code), ("", Some(0)));
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn a_full_disk_is_rejected_before_anything_is_written() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.path().join("disk");
    mount_small(&disk, "64k");
    let ended = Ended::of(&mut node_command("run", &disk, NO_DAEMONS));
    let left: Vec<_> = fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    umount(&disk).unwrap();
    ended.assert_fails(4, "not enough disk space for");
    ended.assert_fails(4, "free some, or use another directory");
    assert_eq!(left, ["noded.toml"]);
}

#[test]
fn a_directory_without_permission_is_rejected() {
    let scratch = ScratchDir::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let data = scratch.path().join("data");
    let noded = PublicProgram::noded();
    let ended = Ended::of(&mut noded.command(&["run", "--dev", "--data", data.to_str().unwrap()]));
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let directory = scratch.path().display();
    ended.assert_fails(
        4,
        &format!("permission denied to write to {directory}: run noded as its owner or as root"),
    );
    assert!(!data.exists());
}
