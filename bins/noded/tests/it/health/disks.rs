//! Disks that fill up.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use nix::mount::{MsFlags, mount, umount};
use testbed::ScratchDir;

use super::{ask_health, wait_healthy, wait_problem};
use crate::harness::{NO_DAEMONS, NO_DISKS, NodedProcess};

#[test]
fn a_full_disk_is_a_problem_and_a_threshold_of_zero_is_none() {
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}[health]\nmin_free_percent = 100\n"));
    noded.wait_ready("root.storage");
    let data = noded.data().display().to_string();
    let found = wait_problem(&noded, &data, "its disk is almost full: ");
    assert_eq!(found["part"], "node");
    assert!(found["hint"].as_str().unwrap().contains(&format!("`du -xh -d 2 {data}`")), "{found}");
    let status = noded.ask(&["status"]);
    assert!(
        status.contains("runnables are ready\n") && status.contains("its disk is almost full"),
        "{status}"
    );
    noded.stop();
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}{NO_DISKS}"));
    wait_healthy(&noded);
    assert_eq!(ask_health(&noded).1, Some(0));
    noded.stop();
}

/// A small file system, as long as it exists.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(directory: PathBuf) -> Self {
        fs::create_dir(&directory).unwrap();
        mount(Some("none"), &directory, Some("tmpfs"), MsFlags::empty(), Some("size=256M,mode=700")).unwrap();
        Self(directory)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount(&self.0);
    }
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn a_disk_that_fills_up_and_has_room_again_changes_the_health() {
    let scratch = ScratchDir::new().unwrap();
    let disk = SmallDisk::mount(scratch.path().join("data"));
    let noded = NodedProcess::start_in(scratch, NO_DAEMONS, &[]);
    wait_healthy(&noded);
    let filler = disk.0.join("filler");
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=1M", "count=300", "status=none"]).arg(format!("of={}", filler.display()));
    assert!(!dd.stderr(Stdio::null()).status().unwrap().success(), "the disk is full");
    let ended = noded.nodectl(&["health"]);
    let says = format!("{}: its disk is almost full: 0 bytes of 256.0 MiB free", disk.0.display());
    assert!(ended.code == Some(6) && ended.stdout.contains(&says), "{ended:#?}");
    fs::remove_file(filler).unwrap();
    noded.nodectl(&["health"]).output();
    let scratch = noded.stop_and_keep();
    drop(disk);
    drop(scratch);
}
