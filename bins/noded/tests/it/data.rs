//! Data directories that can't be used: one line with a hint, and nothing changed.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use testbed::{ScratchDir, reserve_port};

use crate::harness::{NO_DAEMONS, PublicProgram, noded_command, stderr_and_code};

#[test]
fn a_file_in_place_of_a_data_subdirectory_is_rejected() {
    for name in ["run", "etcd"] {
        let scratch = ScratchDir::new().unwrap();
        let data = scratch.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::write(data.join(name), "").unwrap();
        let (client, peer) = (reserve_port().unwrap(), reserve_port().unwrap());
        let config = format!(
            "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {}\npeer_port = {}\n",
            client.number(),
            peer.number()
        );
        let file = scratch.path().join("noded.toml");
        fs::write(&file, config).unwrap();
        let args = ["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
        let (text, code) = stderr_and_code(&noded_command(&args).output().unwrap());
        assert_eq!(code, Some(4), "{text}");
        assert!(text.contains(&format!("/data/{name} is not a directory: move it away")), "{text}");
        assert_eq!(fs::read_dir(&data).unwrap().count(), 1, "something was created");
    }
}

#[test]
fn a_conflict_with_the_layout_is_one_line_and_nothing_is_touched() {
    let (client, peer) = (reserve_port().unwrap(), reserve_port().unwrap());
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {}\npeer_port = {}\n",
        client.number(),
        peer.number()
    );
    let link =
        |name: &'static str| move |data: &Path| std::os::unix::fs::symlink("/tmp", data.join(name)).unwrap();
    type Make<'a> = &'a dyn Fn(&Path);
    let cases: [(Make<'_>, &str); 3] = [
        (
            &link("run"),
            "/data/run is a symbolic link, and links below the data directory are not followed: replace it",
        ),
        (&link("esp"), "/data/esp is a symbolic link"),
        (&link("lock"), "/data/lock is a symbolic link"),
    ];
    for (make, says) in cases {
        let scratch = ScratchDir::new().unwrap();
        let data = scratch.path().join("data");
        fs::create_dir(&data).unwrap();
        make(&data);
        let file = scratch.path().join("noded.toml");
        fs::write(&file, &config).unwrap();
        let args = ["--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
        for command in ["run", "check"] {
            let (text, code) =
                stderr_and_code(&noded_command(&[&[command], &args[..]].concat()).output().unwrap());
            assert_eq!(code, Some(4), "{text}");
            assert!(text.contains(says) && text.lines().count() == 1, "{text}");
        }
        assert_eq!(fs::read_dir(&data).unwrap().count(), 1, "something was created");
    }
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn an_etcd_with_data_needs_no_free_space_for_its_first_segments() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.path().join("disk");
    fs::create_dir(&disk).unwrap();
    nix::mount::mount(Some("tmpfs"), &disk, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("size=4m"))
        .unwrap();
    let (client, peer) = (reserve_port().unwrap(), reserve_port().unwrap());
    let file = scratch.path().join("noded.toml");
    let config = format!(
        "services.containerd.enable = false\n[services.etcd]\nbinary = \"/bin/true\"\nclient_port = {}\npeer_port = {}\n",
        client.number(),
        peer.number()
    );
    fs::write(&file, config).unwrap();
    let check = || {
        let args = ["check", "--config", file.to_str().unwrap(), "--data", disk.to_str().unwrap()];
        stderr_and_code(&noded_command(&args).output().unwrap())
    };
    let (new, new_code) = check();
    fs::create_dir_all(disk.join("data/etcd/data/member")).unwrap();
    let (old, old_code) = check();
    nix::mount::umount(&disk).unwrap();
    assert_eq!(new_code, Some(4), "{new}");
    assert!(new.contains("not enough disk space for"), "{new}");
    assert_eq!((old.as_str(), old_code), ("", Some(0)));
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn a_full_disk_is_rejected_before_anything_is_written() {
    let scratch = ScratchDir::new().unwrap();
    let disk = scratch.path().join("disk");
    fs::create_dir(&disk).unwrap();
    nix::mount::mount(Some("tmpfs"), &disk, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("size=64k"))
        .unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, NO_DAEMONS).unwrap();
    let data = disk.join("data");
    let output =
        noded_command(&["run", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()])
            .output();
    let (text, code) = stderr_and_code(&output.unwrap());
    let left: Vec<_> = fs::read_dir(&disk).unwrap().collect();
    nix::mount::umount(&disk).unwrap();
    assert_eq!(code, Some(4), "{text}");
    assert!(
        text.contains("not enough disk space for") && text.contains("free some, or use another directory"),
        "{text}"
    );
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_directory_without_permission_is_rejected() {
    let scratch = ScratchDir::new().unwrap();
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o555)).unwrap();
    let data = scratch.path().join("data");
    let noded = PublicProgram::noded();
    let mut command = noded.command(&["run", "--dev", "--data", data.to_str().unwrap()]);
    let (text, code) = stderr_and_code(&command.output().unwrap());
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(code, Some(4), "{text}");
    let says = format!(
        "permission denied to write to {}: run noded as its owner or as root",
        scratch.path().display()
    );
    assert!(text.contains(&says), "{text}");
    assert!(!data.exists());
}
