//! Tests in a guest whose kernel has project quotas.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use testbed::guest::disk::{FileSystem, GuestDisk, MountedDisk};

use crate::{path_text, run_dirquota, run_failing};

fn mount_disk(kind: FileSystem) -> MountedDisk {
    GuestDisk::acquire().unwrap().format_and_mount(kind, "prjquota").unwrap()
}

fn run_json(args: &[&str]) -> Value {
    let output = run_dirquota(&[args, &["-o", "json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stderr, b"");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn create_dir(mounted: &MountedDisk, name: &str) -> String {
    let path = mounted.mount_point().join(name);
    fs::create_dir(&path).unwrap();
    path_text(&path).to_owned()
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn limits_are_set_shown_listed_and_cleared() {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mounted = mount_disk(kind);
        let (mount, dir) = (path_text(mounted.mount_point()), create_dir(&mounted, "dir"));
        let set = run_json(&["set", &dir, "--bytes", "10Mi", "--inodes", "1k"]);
        assert_eq!((&set["bytes"]["limit"], &set["inodes"]["limit"]), (&(10 << 20).into(), &1000.into()));
        assert_eq!((&set["inodes"]["used"], &set["inodes"]["available"]), (&1.into(), &999.into()));
        assert_eq!(run_json(&["show", &dir])[0], set);
        let listed = run_json(&["list", mount]);
        assert_eq!(
            (listed[0]["project"].clone(), listed.as_array().unwrap().len()),
            (set["project"].clone(), 1)
        );
        let lifted = run_json(&["set", &dir, "--bytes", "none"]);
        assert_eq!((&lifted["bytes"]["limit"], &lifted["inodes"]["limit"]), (&Value::Null, &1000.into()));
        fs::write(Path::new(&dir).join("file"), "x").unwrap();
        let (said, code) = run_failing(&["clear", &dir]);
        assert!(code == Some(1) && said.contains("--recursive"), "{said}");
        assert_eq!(run_json(&["clear", &dir, "--recursive"])["tree"]["changed"], 1);
        assert_eq!(run_json(&["list", mount]), Value::Array(Vec::new()));
        let (said, code) = run_failing(&["show", &dir]);
        assert_eq!((said, code), (format!("dirquota: {dir} has no limits"), Some(4)));
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn set_prints_a_table_and_a_warning() {
    let mounted = mount_disk(FileSystem::Xfs);
    let dir = create_dir(&mounted, "dir");
    let output = run_dirquota(&["set", &dir, "--bytes", "10Mi"]);
    let (table, warning) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(table.contains("10Mi") && table.lines().count() == 2, "{table}");
    assert!(
        warning.starts_with("dirquota: warning: file owners outside of a user namespace can move files"),
        "{warning}"
    );
    assert_eq!(run_dirquota(&["set", &dir, "--bytes", "10Mi", "-q"]).stderr, b"");
    let checked = String::from_utf8(run_dirquota(&["check", &dir]).stdout).unwrap();
    assert!(
        checked.contains("limits are enforced (xfs on /dev/") && checked.contains("warning: "),
        "{checked}"
    );
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_recursive_set_includes_existing_content() {
    let mounted = mount_disk(FileSystem::Ext4);
    let dir = create_dir(&mounted, "dir");
    fs::create_dir_all(mounted.mount_point().join("dir/a/b")).unwrap();
    let (said, code) = run_failing(&["set", &dir, "--inodes", "100"]);
    assert!(code == Some(1) && said.contains("is not empty") && said.contains("--recursive"), "{said}");
    let set = run_json(&["set", &dir, "--inodes", "100", "--recursive"]);
    assert_eq!((&set["inodes"]["used"], &set["tree"]["changed"]), (&3.into(), &2.into()));
    let (said, code) =
        run_failing(&["set", path_text(&mounted.mount_point().join("dir/a")), "--inodes", "5"]);
    assert!(code == Some(1) && said.contains("belongs to project"), "{said}");
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn processes_at_once_never_give_the_same_number() {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mounted = mount_disk(kind);
        let start = |number: usize| {
            let dir = create_dir(&mounted, &number.to_string());
            let mut command = Command::new(env!("CARGO_BIN_EXE_dirquota"));
            command.args(["set", &dir, "--bytes", "1Mi", "-o", "json"]).stdout(Stdio::piped());
            command.spawn().unwrap()
        };
        let started: Vec<Child> = (0..30).map(start).collect();
        let project = |child: Child| {
            let output = child.wait_with_output().unwrap();
            serde_json::from_slice::<Value>(&output.stdout).unwrap()["project"].as_u64().unwrap()
        };
        let given: HashSet<u64> = started.into_iter().map(project).collect();
        assert_eq!(given.len(), 30);
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_mount_without_quotas_is_reported_with_its_mount_option() {
    let mounted = GuestDisk::acquire().unwrap().format_and_mount(FileSystem::Xfs, "").unwrap();
    let (said, code) = run_failing(&["check", path_text(mounted.mount_point())]);
    assert!(code == Some(3) && said.contains("mount it with `-o prjquota`"), "{said}");
    assert_eq!(said.lines().count(), 1);
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn limits_of_removed_directories_are_released() {
    let mounted = mount_disk(FileSystem::Xfs);
    let dir = create_dir(&mounted, "dir");
    let project = run_json(&["set", &dir, "--bytes", "1Mi"])["project"].clone();
    fs::remove_dir(&dir).unwrap();
    let mount = path_text(mounted.mount_point());
    assert_eq!(run_json(&["release", mount])["projects"], Value::Array(vec![project]));
    assert_eq!(run_json(&["list", mount]), Value::Array(Vec::new()));
}
