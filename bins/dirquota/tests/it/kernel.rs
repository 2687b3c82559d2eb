//! Tests in a guest whose kernel has project quotas.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use testbed::guest::disk::{FileSystem, GuestDisk, MountedDisk};

use crate::{DIRQUOTA, path_text, run_dirquota, run_failing};

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
        assert_eq!((said, code), (format!("dirquota: {dir} has no quota limits"), Some(4)));
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
    assert!(code == Some(1) && said.contains("belongs to quota project"), "{said}");
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn processes_at_once_never_give_the_same_number() {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mounted = mount_disk(kind);
        let start = |number: usize| {
            let dir = create_dir(&mounted, &number.to_string());
            let mut command = Command::new(DIRQUOTA);
            command.args(["set", &dir, "--bytes", "1Mi", "-o", "json"]).stdout(Stdio::piped());
            command.spawn().unwrap()
        };
        // Each waits ten seconds for the others, and in an emulated guest one may take a second.
        let started: Vec<Child> = (0..8).map(start).collect();
        let project = |child: Child| {
            let output = child.wait_with_output().unwrap();
            serde_json::from_slice::<Value>(&output.stdout).unwrap()["project"].as_u64().unwrap()
        };
        let given: HashSet<u64> = started.into_iter().map(project).collect();
        assert_eq!(given.len(), 8);
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

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_moved_directory_changes_no_other_limits() {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mounted = mount_disk(kind);
        let (origin, moved) =
            (create_dir(&mounted, "origin"), path_text(&mounted.mount_point().join("moved")).to_owned());
        let before = run_json(&["set", &origin, "--bytes", "100Mi"]);
        fs::create_dir(Path::new(&origin).join("sub")).unwrap();
        fs::write(Path::new(&origin).join("sub/f"), "x").unwrap();
        fs::rename(Path::new(&origin).join("sub"), &moved).unwrap();
        for limit in ["1Mi", "none"] {
            let (said, code) = run_failing(&["set", &moved, "--bytes", limit]);
            assert!(code == Some(1) && said.contains("--recursive"), "{said}");
        }
        let own = run_json(&["set", &moved, "--bytes", "1Mi", "--recursive"]);
        assert_eq!((&own["bytes"]["limit"], &own["inodes"]["used"]), (&(1 << 20).into(), &2.into()));
        let after = &run_json(&["show", &origin])[0];
        assert_eq!((&after["project"], &after["bytes"]["limit"]), (&before["project"], &(100 << 20).into()));
        assert_ne!(own["project"], before["project"]);
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_read_only_xfs_is_shown_and_listed_and_a_read_only_ext4_says_why_not() {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mut mounted = mount_disk(kind);
        let (mount, dir) = (path_text(mounted.mount_point()).to_owned(), create_dir(&mounted, "dir"));
        let set = run_json(&["set", &dir, "--bytes", "10Mi"]);
        mounted.remount("prjquota,ro").unwrap();
        if kind == FileSystem::Xfs {
            assert_eq!(run_json(&["show", &dir])[0], set);
            assert_eq!(run_json(&["list", &mount])[0]["project"], set["project"]);
        } else {
            for args in [["show", &dir], ["list", &mount]] {
                let (said, code) = run_failing(&args);
                assert!(code == Some(3) && said.contains("is mounted read-only"), "{said}");
            }
        }
        for args in [&["set", &dir, "--bytes", "20Mi"][..], &["check", &mount], &["release", &mount]] {
            let (said, code) = run_failing(args);
            assert!(code == Some(3) && said.contains("remount,rw"), "{said}");
        }
    }
}

/// As `chattr +i` and `chattr -i` do.
fn set_immutable(path: &Path, is_immutable: bool) {
    let file = fs::File::open(path).unwrap();
    let flags = rustix::fs::ioctl_getflags(&file).unwrap();
    let immutable = rustix::fs::IFlags::IMMUTABLE;
    let flags = if is_immutable { flags | immutable } else { flags - immutable };
    rustix::fs::ioctl_setflags(&file, flags).unwrap();
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_immutable_file_is_skipped_counted_and_named() {
    for kind in [FileSystem::Ext4, FileSystem::Xfs] {
        let mounted = mount_disk(kind);
        let dir = create_dir(&mounted, "dir");
        let at = |name: &str| Path::new(&dir).join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        for name in ["a/file", "a/immutable", "a/b/file"] {
            fs::write(at(name), "x").unwrap();
        }
        set_immutable(&at("a/immutable"), true);
        let output = run_dirquota(&["set", &dir, "--bytes", "10Mi", "--recursive", "-o", "json"]);
        let said = run_dirquota(&["set", &dir, "--bytes", "10Mi", "--recursive"]);
        let cleared = run_dirquota(&["clear", &dir, "--recursive"]);
        set_immutable(&at("a/immutable"), false);
        assert!(output.status.success(), "{output:?}");
        let tree = serde_json::from_slice::<Value>(&output.stdout).unwrap()["tree"].clone();
        if kind == FileSystem::Xfs {
            assert_eq!((&tree["changed"], &tree["immutable"]), (&5.into(), &0.into()), "XFS changes it");
            continue;
        }
        assert_eq!((&tree["changed"], &tree["immutable"]), (&4.into(), &1.into()), "{tree}");
        assert_eq!(tree["immutable_paths"], serde_json::json!(["a/immutable"]));
        let said = String::from_utf8(said.stderr).unwrap();
        assert!(said.contains("not counted: 1 immutable entries: a/immutable"), "{said}");
        assert!(cleared.status.success(), "{cleared:?}");
        assert_eq!(run_json(&["set", &dir, "--bytes", "10Mi", "--recursive"])["tree"]["changed"], 5);
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_immutable_directory_is_named_with_the_command_that_helps() {
    for kind in [FileSystem::Ext4, FileSystem::Xfs] {
        let mounted = mount_disk(kind);
        let dir = create_dir(&mounted, "dir");
        set_immutable(Path::new(&dir), true);
        let (said, code) = run_failing(&["set", &dir, "--bytes", "10Mi"]);
        assert!(code == Some(1) && said.contains(&format!("run `chattr -i {dir}`")), "{said}");
        set_immutable(Path::new(&dir), false);
        run_json(&["set", &dir, "--bytes", "10Mi"]);
    }
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn an_audit_finds_and_repairs_what_was_moved_out_and_the_owner_of_a_project_is_found() {
    for kind in [FileSystem::Xfs, FileSystem::Ext4] {
        let mounted = mount_disk(kind);
        let (mount, dir) = (path_text(mounted.mount_point()), create_dir(&mounted, "dir"));
        let project = run_json(&["set", &dir, "--bytes", "10Mi"])["project"].to_string();
        create_dir(&mounted, "dir/sub");
        assert_eq!(run_json(&["audit", mount])["outside"]["inodes"], 0);
        fs::rename(mounted.mount_point().join("dir/sub"), mounted.mount_point().join("moved")).unwrap();
        let output = run_dirquota(&["audit", mount, "-o", "json"]);
        let audit: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((output.status.code(), &audit["outside"]["inodes"]), (Some(6), &1.into()), "{audit}");
        let finding = &audit["findings"][0];
        assert_eq!((&finding["path"], &finding["kind"]), (&"moved".into(), &"moved_out".into()), "{audit}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("repair it with --repair"), "{said}");
        let repaired = run_json(&["audit", mount, "--repair", "--rate", "1000"]);
        assert_eq!(repaired["repaired"], 1, "{repaired}");
        assert_eq!(run_json(&["audit", mount])["outside"]["inodes"], 0);
        assert_eq!(run_json(&["owner-of", &project, mount])["owner"], Value::from(dir.as_str()));
        let (said, code) = run_failing(&["owner-of", "4242", mount]);
        assert!(code == Some(4) && said.contains("has project 4242"), "{said}");
    }
}
