//! What keeps a data directory from being used: a line that says what to do, and nothing touched.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use testbed::{Scratch, free_port};

use crate::harness::{BARE, as_plain_user, failed, noded};

#[test]
fn what_is_in_the_way_in_the_data_directory_is_refused() {
    for name in ["run", "etcd"] {
        let scratch = Scratch::new().unwrap();
        let data = scratch.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::write(data.join(name), "").unwrap();
        let (client, peer) = (free_port().unwrap(), free_port().unwrap());
        let config = format!(
            "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {}\npeer_port = {}\n",
            client.number(),
            peer.number()
        );
        let file = scratch.path().join("noded.toml");
        fs::write(&file, config).unwrap();
        let args = ["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
        let (text, code) = failed(&noded(&args).output().unwrap());
        assert_eq!(code, Some(4), "{text}");
        assert!(text.contains(&format!("/data/{name} is no directory; move it away")), "{text}");
        assert_eq!(fs::read_dir(&data).unwrap().count(), 1, "something was made");
    }
}

#[test]
fn what_is_in_the_way_of_the_layout_is_one_line_and_nothing_is_touched() {
    let (client, peer) = (free_port().unwrap(), free_port().unwrap());
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {}\npeer_port = {}\n",
        client.number(),
        peer.number()
    );
    let link =
        |name: &'static str| move |data: &Path| std::os::unix::fs::symlink("/tmp", data.join(name)).unwrap();
    let former = |data: &Path| fs::create_dir_all(data.join("etcd/member")).unwrap();
    type Make<'a> = &'a dyn Fn(&Path);
    let cases: [(Make<'_>, &str); 4] = [
        (
            &link("run"),
            "/data/run is a symbolic link, and none is followed below the data directory; replace it",
        ),
        (&link("etcd"), "/data/etcd is a symbolic link"),
        (&link("lock"), "/data/lock is a symbolic link"),
        (&former, "/data/etcd/member was made by an earlier noded, which kept etcd's data there; move it"),
    ];
    for (make, says) in cases {
        let scratch = Scratch::new().unwrap();
        let data = scratch.path().join("data");
        fs::create_dir(&data).unwrap();
        make(&data);
        let file = scratch.path().join("noded.toml");
        fs::write(&file, &config).unwrap();
        let args = ["--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
        for command in ["run", "check"] {
            let (text, code) = failed(&noded(&[&[command], &args[..]].concat()).output().unwrap());
            assert_eq!(code, Some(4), "{text}");
            assert!(text.contains(says) && text.lines().count() == 1, "{text}");
        }
        assert_eq!(fs::read_dir(&data).unwrap().count(), 1, "something was made");
    }
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn an_etcd_that_has_run_needs_no_room_for_its_first_segments() {
    let scratch = Scratch::new().unwrap();
    let disk = scratch.path().join("disk");
    fs::create_dir(&disk).unwrap();
    nix::mount::mount(Some("tmpfs"), &disk, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("size=4m"))
        .unwrap();
    let (client, peer) = (free_port().unwrap(), free_port().unwrap());
    let file = scratch.path().join("noded.toml");
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {}\npeer_port = {}\n",
        client.number(),
        peer.number()
    );
    fs::write(&file, config).unwrap();
    let check = || {
        let args = ["check", "--config", file.to_str().unwrap(), "--data", disk.to_str().unwrap()];
        failed(&noded(&args).output().unwrap())
    };
    let (new, new_code) = check();
    fs::create_dir_all(disk.join("etcd/data/member")).unwrap();
    let (old, old_code) = check();
    nix::mount::umount(&disk).unwrap();
    assert_eq!(new_code, Some(4), "{new}");
    assert!(new.contains("no room on the disk of"), "{new}");
    assert_eq!((old.as_str(), old_code), ("", Some(0)));
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn a_full_disk_is_refused_before_anything_is_written() {
    let scratch = Scratch::new().unwrap();
    let disk = scratch.path().join("disk");
    fs::create_dir(&disk).unwrap();
    nix::mount::mount(Some("tmpfs"), &disk, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("size=64k"))
        .unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, BARE).unwrap();
    let data = disk.join("data");
    let output =
        noded(&["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()]).output();
    let (text, code) = failed(&output.unwrap());
    let left: Vec<_> = fs::read_dir(&disk).unwrap().collect();
    nix::mount::umount(&disk).unwrap();
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("no room on the disk of") && text.contains("free some, or give another directory"),
        "{text}"
    );
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_directory_without_permission_is_refused() {
    let scratch = Scratch::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let data = scratch.path().join("data");
    let mut command = noded(&["run", "--dev", "--data", data.to_str().unwrap()]);
    let (text, code) = failed(&as_plain_user(&mut command).output().unwrap());
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(code, Some(4), "{text}");
    let says =
        format!("no permission to write to {}; run noded as its owner or as root", scratch.path().display());
    assert!(text.contains(&says), "{text}");
    assert!(!data.exists());
}
