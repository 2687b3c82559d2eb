//! A node that can't create volumes, on a real control plane with its scheduler: pods that can run elsewhere do.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use testbed::{Daemon, Kube, command_output};

use crate::agent::{start_agent, wait_leading};
use crate::capacity::{
    BUSY, CLASSES, PREFERRED, create_pod, create_pod_with, occupy_busy_node, start_with_nodes, wait_offered,
    wait_placed, wait_published,
};
use crate::cluster::{DRIVER, TestDaemon, create, event_notes, wait_logged};

const MIB: u64 = 1 << 20;

/// The time within which pods of a node that can't serve are on another: 15 s, on a machine that is five times slower.
const MOVED_WITHIN: Duration = Duration::from_secs(75);

/// Pods that find the node unable at once.
const PODS: [&str; 4] = ["pod-1", "pod-2", "pod-3", "pod-4"];

/// Creates pods that the scheduler would place on the preferred node, and asserts that all are on the other one soon.
fn assert_placed_elsewhere(kube: &Kube, round: &str) {
    let (start, names) = (Instant::now(), PODS.map(|pod| format!("{round}-{pod}")));
    names.iter().for_each(|name| create_pod(kube, name, "1Mi"));
    for name in &names {
        assert_eq!(wait_placed(kube, name), BUSY, "{name}");
    }
    let taken = start.elapsed();
    println!("{round}: {} pods were placed elsewhere in {taken:.1?}", PODS.len());
    assert!(taken < MOVED_WITHIN, "{round}: {taken:?}");
}

/// A file system in memory over a directory, until this is dropped.
struct MemoryDisk(PathBuf);

impl MemoryDisk {
    fn mount(directory: &Path) -> Self {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=128m,mode=755", "none"]).arg(directory);
        command_output(&mut mount).unwrap();
        Self(directory.to_owned())
    }

    fn remount(&self, options: &str) {
        let mut mount = Command::new("mount");
        command_output(mount.args(["-o", &format!("remount,{options}")]).arg(&self.0)).unwrap();
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        // Lazily: a daemon that was just killed may still have it open.
        if let Err(error) = command_output(Command::new("umount").arg("--lazy").arg(&self.0)) {
            eprintln!("{error:#}");
        }
    }
}

#[test]
#[ignore = "sampled: needs kube and root: it mounts"]
fn pods_leave_a_node_whose_disk_became_read_only_and_come_back_at_its_repair_but_for_those_of_another_disk() {
    let kube = start_with_nodes();
    // The preferred node has a second disk, and the other one has not.
    let fast = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "fast" },
        "provisioner": DRIVER, "volumeBindingMode": "WaitForFirstConsumer", "parameters": { "store": "fast" },
    });
    create(&kube, &fast);
    let fast_disk = tempfile::tempdir().unwrap();
    let stores = format!("--stores=fast={}", fast_disk.path().display());
    let create_fast_pod =
        |name: &str| create_pod_with(&kube, name, json!({ "spec": { "storageClassName": "fast" } }));
    occupy_busy_node(&kube);
    let [preferred, busy] = [PREFERRED, BUSY].map(|node| TestDaemon::new(&kube, node));
    let disk = MemoryDisk::mount(preferred.base.path());
    let _busy = busy.start(&[&busy.reserve_all_but(64 * MIB)], &[]);
    wait_published(&kube, BUSY, &CLASSES, |bytes| bytes > 32 * MIB);
    let running = preferred.start(&[&stores], &[]);
    wait_published(&kube, PREFERRED, &["fast", CLASSES[0], CLASSES[1]], |bytes| bytes > 32 * MIB);
    create_pod(&kube, "before", "1Mi");
    assert_eq!(wait_placed(&kube, "before"), PREFERRED, "the scheduler prefers it");

    disk.remount("ro");
    assert_placed_elsewhere(&kube, "broken");
    let why = wait_logged(&running, "this node can't create volumes");
    assert!(why.contains("Read-only") && why.contains("mount -o remount,rw"), "{why}");
    wait_offered(&kube, PREFERRED, CLASSES[0], |bytes| bytes == 0);
    let notes: Vec<_> = PODS
        .iter()
        .flat_map(|pod| event_notes(&kube, &format!("broken-{pod}"), "ProvisioningFailed"))
        .collect();
    assert!(notes.iter().any(|note| note.contains("can't create volumes")), "{notes:?}");

    create_fast_pod("fast-broken");
    assert_eq!(wait_placed(&kube, "fast-broken"), PREFERRED, "its disk is another one");
    assert_eq!(fs::read_dir(fast_disk.path().join("volumes")).unwrap().count(), 1);

    let run = |arguments: &[&str]| command_output(&mut preferred.command(&[arguments, &[&stores]].concat()));
    let shown = run(&["volumes"]).expect("both stores");
    assert!(shown.contains("default/fast-broken") && shown.contains("default/before"), "{shown}");
    let shown = run(&["store", "show"]).expect("both stores are served");
    assert!(
        shown.contains(" (fast) is store ") && shown.matches("provisionerd serves it").count() == 2,
        "{shown}"
    );
    assert_eq!(run(&["orphans"]).expect("both stores"), "no orphans\n");

    let repaired = Instant::now();
    disk.remount("rw");
    wait_published(&kube, PREFERRED, &["fast", CLASSES[0], CLASSES[1]], |bytes| bytes > 32 * MIB);
    create_pod(&kube, "after", "1Mi");
    assert_eq!(wait_placed(&kube, "after"), PREFERRED, "it serves again");
    assert!(repaired.elapsed() < MOVED_WITHIN, "{:?}", repaired.elapsed());

    // A store that can't be read is named, and hides nothing of the others; neither is a volume of one that is not configured.
    let left = preferred.base.path().join("volumes/pvc-00000000-0000-4000-8000-00000000000a");
    fs::create_dir(&left).unwrap();
    let listed = preferred.command(&["orphans", "--stores=fast=/nowhere/fast"]).output().unwrap();
    let [shown, failed] =
        [&listed.stdout, &listed.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(shown.contains("pvc-00000000-0000-4000-8000-00000000000a"), "{shown}{failed}");
    assert!(failed.contains("/nowhere/fast (fast)") && !listed.status.success(), "{failed}");
    fs::remove_dir(&left).unwrap();
    let shown = command_output(&mut preferred.command(&["volumes"])).unwrap();
    let is_shown = |row: &str| row.contains("missing") && row.contains("default/fast-broken");
    assert!(shown.lines().any(is_shown), "{shown}");

    // Without an inode the disk is full, which is no fault of it: the capacity tells.
    let free = rustix::fs::statvfs(preferred.base.path()).unwrap();
    disk.remount(&format!("nr_inodes={}", free.f_files - free.f_ffree));
    create_pod(&kube, "no-inodes", "1Mi");
    assert_eq!(wait_placed(&kube, "no-inodes"), BUSY);
    let notes = event_notes(&kube, "no-inodes", "ProvisioningFailed");
    assert!(notes.iter().any(|note| note.contains("no room for volume")), "{notes:?}");
    // What existed was served all the time.
    assert!(event_notes(&kube, "before", "VolumeConditionAbnormal").is_empty());
}

fn send_signal(daemon: &Daemon, signal: Signal) {
    let id = i32::try_from(daemon.process_id()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(id, signal).expect("it runs");
}

#[test]
#[ignore = "sampled: needs kube"]
fn pods_leave_a_node_whose_daemon_is_killed_or_stands_still_and_come_back_with_it() {
    let kube = start_with_nodes();
    occupy_busy_node(&kube);
    let _agent = start_agent(&kube, "agent-1", &[]);
    wait_leading(&kube, Some("agent-1"));
    let [preferred, busy] = [PREFERRED, BUSY].map(|node| TestDaemon::new(&kube, node));
    let promised = [&preferred, &busy].map(|daemon| daemon.reserve_all_but(64 * MIB));
    let _busy = busy.start(&[&promised[1]], &[]);
    wait_published(&kube, BUSY, &CLASSES, |bytes| bytes > 32 * MIB);
    let assert_serves = |name: &str| {
        wait_published(&kube, PREFERRED, &CLASSES, |bytes| bytes > 32 * MIB);
        create_pod(&kube, name, "1Mi");
        assert_eq!(wait_placed(&kube, name), PREFERRED, "the scheduler prefers it");
    };
    let killed = preferred.start(&[&promised[0]], &[]);
    assert_serves("before");

    // Its Node, its CSINode and its capacity stay, as after SIGKILL on a node with a kubelet.
    drop(killed);
    assert_placed_elsewhere(&kube, "killed");
    wait_published(&kube, PREFERRED, &[], |_| true);
    let notes: Vec<_> = PODS
        .iter()
        .flat_map(|pod| event_notes(&kube, &format!("killed-{pod}"), "ProvisioningFailed"))
        .collect();
    assert!(notes.iter().any(|note| note.contains("no longer renews its Lease")), "{notes:?}");
    let running = preferred.start(&[&promised[0]], &[]);
    assert_serves("again");

    send_signal(&running, Signal::STOP);
    assert_placed_elsewhere(&kube, "stopped");
    wait_published(&kube, PREFERRED, &[], |_| true);
    send_signal(&running, Signal::CONT);
    assert_serves("continued");
    // No claim was provisioned twice.
    assert_eq!(
        (preferred.list_names("volumes").len(), busy.list_names("volumes").len()),
        (3, 2 * PODS.len())
    );
}
