//! Disks that fill up.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use nix::mount::{MsFlags, mount, umount};
use testbed::ScratchDir;

use super::{NO_DISKS, ask_health, wait_healthy, wait_problem};
use crate::harness::{NO_DAEMONS, NodedProcess, noded_command};

#[test]
fn a_full_disk_is_a_problem_and_a_threshold_of_zero_is_none() {
    let noded = NodedProcess::start(&format!("{NO_DAEMONS}[health]\nmin_free_percent = 100\n"));
    noded.ask(&["start", "--wait", "root.storage"]);
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
struct SmallDisk {
    _scratch: ScratchDir,
    mount_point: PathBuf,
}

impl SmallDisk {
    fn mount() -> Self {
        let scratch = ScratchDir::new().unwrap();
        let mount_point = scratch.path().join("disk");
        fs::create_dir(&mount_point).unwrap();
        mount(Some("none"), &mount_point, Some("tmpfs"), MsFlags::empty(), Some("size=256M")).unwrap();
        Self { _scratch: scratch, mount_point }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount(&self.mount_point);
    }
}

#[test]
#[ignore = "needs root: it mounts a small file system"]
fn a_disk_that_fills_up_and_has_room_again_changes_the_health() {
    let disk = SmallDisk::mount();
    let data = disk.mount_point.join("data");
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.path().join("noded.toml");
    fs::write(&file, NO_DAEMONS).unwrap();
    let [file, data_argument] = [&file, &data].map(|path| path.to_str().unwrap());
    let mut command = noded_command(&["run", "--config", file, "--data", data_argument]);
    command.stderr(std::process::Stdio::piped());
    let mut noded = NodedProcess::spawn_command(scratch, command);
    noded.wait_for_line("control socket at");
    let socket = data.join("run/control.sock");
    let ask = |args: &[&str]| noded.nodectl(&[&["--socket", socket.to_str().unwrap()], args].concat());
    assert_eq!(ask(&["health", "--wait", "2m"]).status.code(), Some(0));
    let filler = disk.mount_point.join("filler");
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/zero", "bs=1M", "count=300", "status=none"]).arg(format!("of={}", filler.display()));
    assert!(!dd.stderr(std::process::Stdio::null()).status().unwrap().success(), "the disk is full");
    let output = ask(&["health"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(6), "{text}");
    assert!(
        text.contains(&format!("{}: its disk is almost full: 0 bytes of 256.0 MiB free", data.display())),
        "{text}"
    );
    fs::remove_file(filler).unwrap();
    assert_eq!(ask(&["health"]).status.code(), Some(0));
    noded.stop();
}
