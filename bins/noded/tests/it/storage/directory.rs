//! The directory of the data volume.

use std::fs;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use testbed::ScratchDir;

use crate::harness::{NO_DAEMONS, NodedProcess, noded_command, service_config, stderr_and_code};

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
    let mut node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.ask(&["--timeout=60", "start", "--wait", "root.storage"]);
    assert!(disk.join(".data-volume").exists());
    node.signal(Signal::SIGKILL);
    node.wait();
    let scratch = std::mem::replace(&mut node.scratch, ScratchDir::new().unwrap());
    drop((node, mounted));

    let node = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let text = String::from_utf8(node.nodectl(&["status", "root.storage"]).stdout).unwrap();
    let says = format!("the file system that was mounted on {} is not mounted; mount it", volume.display());
    assert!(text.contains(&says), "{text}");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 0, "a volume was created");
    let mounted = BindMount::new(&disk, &volume);
    node.ask(&["--timeout=60", "start", "--wait", "root.storage"]);
    node.stop();
    drop(mounted);
}

#[test]
fn a_check_says_that_the_recorded_file_system_is_not_mounted() {
    let scratch = ScratchDir::new().unwrap();
    let (file, data) = (scratch.path().join("noded.toml"), scratch.path().join("data"));
    fs::write(&file, NO_DAEMONS).unwrap();
    fs::create_dir_all(data.join("data")).unwrap();
    let check = || {
        let args = ["check", "--config", file.to_str().unwrap(), "--data", data.to_str().unwrap()];
        let output = noded_command(&args).output().unwrap();
        assert!(output.status.success(), "{:?}", stderr_and_code(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let says = ", whose file system is not mounted: mount it, or, to keep the data in the directory itself, type: rm ";
    assert!(!check().contains(says), "{}", check());
    let record = data.join("data.mounted");
    fs::write(&record, "").unwrap();
    assert!(check().contains(&format!("{says}{}", record.display())), "{}", check());
}

#[test]
fn a_node_whose_volume_does_not_open_answers_and_says_what_to_do() {
    let scratch = ScratchDir::new().unwrap();
    let volume = scratch.path().join("data/data");
    fs::create_dir_all(&volume).unwrap();
    fs::write(volume.join("letter"), "dear").unwrap();
    let needs = "depends_on = [\"storage\"]";
    let config = format!("{NO_DAEMONS}{}", service_config("a", "sleep 1000", needs));
    let node = NodedProcess::start_in(scratch, &config, &[]);
    node.wait_for_event("root.storage", 1, "exited");
    let output = node.nodectl(&["status", "root.storage"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(6), "{text}");
    let command = text.split("type: ").nth(1).and_then(|rest| rest.lines().next()).expect(&text).to_owned();
    assert!(
        text.contains("has files, but not the file .data-volume") && text.contains("can't open"),
        "{text}"
    );
    assert_eq!(node.ask_json(&["status", "root.service.a"])["node"]["waiting_on"][0], "root.storage");
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 1, "nothing was written");

    let typed = std::process::Command::new("/bin/sh").args(["-c", &command]).status().unwrap();
    assert!(typed.success(), "{command}");
    node.ask(&["--timeout=60", "start", "--wait", "root.service.a"]);
    assert_eq!(fs::read_to_string(volume.join("letter")).unwrap(), "dear");
    node.stop();
}

#[test]
fn an_unknown_kind_of_storage_is_answered_with_the_known_ones() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, "[storage]\nkind = \"floppy\"\n").unwrap();
    let (text, code) = stderr_and_code(
        &noded_command(&["check", "--dev", "--config", file.to_str().unwrap()]).output().unwrap(),
    );
    assert_eq!(code, Some(3), "{text}");
    assert!(
        text.contains("noded.toml:2:8: storage.kind: ")
            && text.contains("unknown variant `floppy`, expected one of `directory`, `disk`, `partition`"),
        "{text}"
    );
}
