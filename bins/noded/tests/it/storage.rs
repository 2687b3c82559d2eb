//! The directory of the data volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use testbed::ScratchDir;

use crate::harness::{Ended, NO_DAEMONS, NodedProcess, check, node_command, sleep_config};

/// A directory that is mounted on another one, as long as it exists.
struct BindMount(PathBuf);

impl BindMount {
    fn new(source: &Path, target: &Path) -> Self {
        mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
        Self(target.to_owned())
    }
}

impl Drop for BindMount {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
#[ignore = "needs root: it mounts a directory"]
fn a_volume_whose_file_system_is_not_mounted_is_named_and_none_is_created_in_its_place() {
    let scratch = ScratchDir::new().unwrap();
    let (disk, volume) = (scratch.path().join("disk"), scratch.path().join("data/data"));
    fs::create_dir(&disk).unwrap();
    fs::create_dir_all(&volume).unwrap();
    let mounted = BindMount::new(&disk, &volume);
    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.wait_ready("root.storage");
    assert!(disk.join(".data-volume").exists());
    let scratch = node.kill();
    drop(mounted);

    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let text = node.ask(&["status", "root.storage"]);
    let says = format!("the file system that was mounted on {} is not mounted; mount it", volume.display());
    assert!(text.contains(&says) && text.contains("volume is lost"), "{text}");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 0, "a volume was created");
    let mounted = BindMount::new(&disk, &volume);
    node.wait_ready("root.storage");
    node.stop();
    drop(mounted);
}

#[test]
fn a_volume_that_is_gone_is_lost_and_not_a_new_one_until_the_operator_gives_it_up() {
    let node = NodedProcess::start(NO_DAEMONS);
    node.wait_ready("root.storage");
    let volume = node.data().join("data");
    fs::write(volume.join("letter"), "dear").unwrap();
    let scratch = node.stop_and_keep();
    let aside = scratch.path().join("aside");
    fs::rename(&volume, &aside).unwrap();

    let checked = check(scratch.path(), NO_DAEMONS, &[]).output();
    assert!(
        checked.contains(", which is lost: it is not there; ") && checked.contains("noded reset"),
        "{checked}"
    );
    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let status = node.nodectl(&["-o", "json", "storage", "status"]);
    assert_eq!((status.code, &status.json()["state"]), (Some(6), &"lost".into()), "{status:#?}");
    let health = node.nodectl(&["health"]);
    let says = format!("the node's data volume is lost: {} is empty", volume.display());
    assert!(health.code == Some(6) && health.stdout.contains(&says), "{health:#?}");
    assert!(health.stdout.contains("`nodectl reset`"), "{health:#?}");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 0, "a volume was created");

    // It is back.
    fs::remove_dir(&volume).unwrap();
    fs::rename(&aside, &volume).unwrap();
    node.wait_ready("root.storage");
    assert_eq!(fs::read_to_string(volume.join("letter")).unwrap(), "dear");

    // It is lost for good.
    let scratch = node.stop_and_keep();
    fs::remove_dir_all(&volume).unwrap();
    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let plan = node.nodectl(&["reset"]);
    plan.assert_fails(1, "nothing was changed: type yes, or add --yes");
    assert!(plan.stdout.contains("the record of the lost data volume"), "{plan:#?}");
    assert!(plan.stdout.contains("/data, in which noded creates one"), "{plan:#?}");
    node.nodectl(&["reset", "--yes"]).output();
    node.wait_ready("root.storage");
    assert!(volume.join(".data-volume").exists());
    assert_eq!(node.nodectl(&["reset"]).output().lines().next(), Some("nothing to reset"));

    // The same, while noded does not run, and with the volume of another node in its place.
    let scratch = node.stop_and_keep();
    fs::remove_dir_all(&volume).unwrap();
    fs::create_dir(&volume).unwrap();
    fs::write(volume.join(".data-volume"), "nodekeel data volume, format 1\n").unwrap();
    let reset = |args: &[&str]| Ended::of(node_command("reset", scratch.path(), NO_DAEMONS).args(args));
    let plan = reset(&[]);
    plan.assert_fails(1, "nothing was changed");
    assert!(plan.stderr.contains("/data, which has a data volume, and noded opens it"), "{plan:#?}");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 1, "nothing is written");
    fs::remove_dir_all(&volume).unwrap();
    assert!(reset(&["--yes"]).output().starts_with("removed:\n  the record of the lost data volume"));
    assert!(!volume.join(".data-volume").exists(), "no volume is created");
    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.wait_ready("root.storage");
    node.stop();
}

#[test]
fn a_node_whose_volume_does_not_open_answers_and_says_what_to_do() {
    let scratch = ScratchDir::new().unwrap();
    let volume = scratch.path().join("data/data");
    fs::create_dir_all(&volume).unwrap();
    fs::write(volume.join("letter"), "dear").unwrap();
    let config = format!("{NO_DAEMONS}{}", sleep_config("a", "depends_on = [\"storage\"]"));
    let node = NodedProcess::start_in(scratch, &config, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let Ended { code, stdout: text, .. } = node.nodectl(&["status", "root.storage"]);
    assert_eq!(code, Some(6), "{text}");
    let command = text.split("type: ").nth(1).and_then(|rest| rest.lines().next()).expect(&text).to_owned();
    assert!(
        text.contains("has files, but not the file .data-volume") && text.contains("can't open"),
        "{text}"
    );
    assert_eq!(node.status("root.service.a")["waiting_on"][0], "root.storage");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 1, "nothing was written");

    let typed = Command::new("/bin/sh").args(["-c", &command]).status().unwrap();
    assert!(typed.success(), "{command}");
    node.wait_ready("root.service.a");
    assert_eq!(fs::read_to_string(volume.join("letter")).unwrap(), "dear");
    node.stop();
}

#[test]
fn an_unknown_kind_of_storage_is_answered_with_the_known_ones() {
    let scratch = ScratchDir::new().unwrap();
    let ended = check(scratch.path(), "[storage]\nkind = \"floppy\"\n", &["--dev"]);
    ended.assert_fails(3, "noded.toml:2:8: storage.kind: ");
    ended.assert_fails(3, "unknown variant `floppy`, expected one of `directory`, `disk`, `partition`");
}
