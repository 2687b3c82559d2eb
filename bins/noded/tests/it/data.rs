//! Data directories that can't be used: one line with a hint, and nothing changed.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;

use nix::mount::{MsFlags, mount, umount};
use testbed::ScratchDir;

use crate::harness::{Ended, EtcdPorts, NO_DAEMONS, PLAIN_UID, PublicProgram, check, node_command};

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
    let options = format!("size={size},mode=755");
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
#[ignore = "needs root: it gives files to another user"]
fn what_another_user_could_have_written_is_named_and_nothing_is_touched() {
    let config = format!("{NO_DAEMONS}services.containerd.preseed = \"IMAGES\"\n");
    let config = config.replace("services.containerd.enable = false", "services.containerd.enable = true");
    for (name, is_ours, says) in [
        ("data", false, "belongs to user 65534, who decides what is there"),
        ("data/run", false, "belongs to user 65534"),
        ("data/run/processes", false, "belongs to user 65534"),
        ("data/esp", false, "belongs to user 65534"),
        ("data/data", false, "belongs to user 65534"),
        ("noded.toml", false, "belongs to user 65534"),
        ("images", false, "belongs to user 65534"),
        ("data", true, "can be changed by other users (its mode is 0777)"),
        ("data/run", true, "can be changed by other users (its mode is 0777)"),
        ("noded.toml", true, "can be changed by other users (its mode is 0777)"),
        ("images", true, "can be changed by other users (its mode is 0777)"),
        ("", true, "can be changed by other users (its mode is 0777)"),
    ] {
        let scratch = ScratchDir::new().unwrap();
        let (at, images) = (scratch.path().join(name), scratch.path().join("images"));
        let config = config.replace("IMAGES", images.to_str().unwrap());
        for directory in ["data/run/processes", "data/esp", "data/data", "images"] {
            fs::create_dir_all(scratch.path().join(directory)).unwrap();
        }
        for verb in ["run", "check", "reset"] {
            let mut command = node_command(verb, scratch.path(), &config);
            let mode = fs::Permissions::from_mode(if is_ours { 0o777 } else { 0o755 });
            fs::set_permissions(&at, mode).unwrap();
            chown(&at, (!is_ours).then_some(PLAIN_UID), None).unwrap();
            let ended = Ended::of(&mut command);
            ended.assert_fails(4, &format!("{} {says}", at.to_str().unwrap().trim_end_matches('/')));
            ended.assert_fails(4, if is_ours { "type: chmod go-w" } else { "type: chown " });
        }
        assert_eq!(fs::read_dir(scratch.path().join("data")).unwrap().count(), 3, "something was created");
    }
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
