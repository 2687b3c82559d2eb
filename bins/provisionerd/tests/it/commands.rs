//! The commands of an operator, next to a running daemon.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use nodekeel_provisioner::{BEING_DELETED, CONTENT_FINALIZER, MANAGED_BY_LABEL};
use serde_json::{Value, json};
use testbed::{HungDisk, command_output, wait_until};

use crate::cluster::{
    DRIVER, TIMEOUT, TestDaemon, create, install_snapshot_api, start_control_plane, wait_bound, wait_for,
    wait_phase,
};

/// The error of a command that fails.
fn refusal(command: &mut Command) -> String {
    format!("{:#}", command_output(command).expect_err("it is refused"))
}

/// Runs a command that is killed at a moment.
fn kill(command: &mut Command, moment: &str) {
    let killed = command.env("PROVISIONERD_KILL_AT", moment).output().expect("provisionerd runs");
    assert_eq!(killed.status.signal(), Some(9), "{killed:?}");
}

#[test]
#[ignore = "needs kube"]
fn orphans_are_listed_adopted_and_removed_beside_the_daemon_also_after_a_kill() {
    /// Around the only step of adopting and of removing an orphan.
    const MOMENTS: [&str; 2] = ["Before CreatePersistentVolume", "After CreatePersistentVolume"];
    let kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "orphan-node");
    let running = daemon.start(&[], &[]);
    let run = |arguments: &[&str]| command_output(&mut daemon.command(arguments));
    let delete_volume = |volume: &str| {
        kube.delete_object("pv", volume).expect("deleted");
        kube.wait_until_gone("pv", volume).unwrap();
    };
    // As an administrator does who keeps the data.
    let orphan_volume = |name: &str| {
        daemon.create_claim(&kube, name, json!({}));
        let volume = wait_bound(&kube, name);
        fs::write(daemon.file_of(&volume), "data").expect("written");
        let retain = json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } });
        kube.patch_object("pv", &volume, &retain).expect("a patch");
        kube.delete_object("pvc", name).expect("deleted");
        wait_phase(&kube, &volume, "Released");
        delete_volume(&volume);
        volume
    };
    daemon.create_claim(&kube, "used", json!({}));
    let used = wait_bound(&kube, "used");
    let orphan = orphan_volume("left");

    let listed: Value = serde_json::from_str(&run(&["volumes", "--json"]).unwrap()).expect("JSON");
    let rows = listed["volumes"].as_array().expect("a list");
    for (state, volume) in [("orphan", &orphan), ("ok", &used)] {
        assert!(rows.iter().any(|row| row["state"] == state && row["id"] == volume.as_str()), "{listed}");
    }
    let table = run(&["volumes"]).unwrap();
    assert!(table.contains("default/used") && table.contains("Bound"), "{table}");
    let orphans = run(&["orphans"]).unwrap();
    assert!(orphans.contains(&orphan) && !orphans.contains("default/used"), "{orphans}");

    // Nothing by default, no volume that is in use, and on a disk that was moved none of another node.
    for action in ["--adopt", "--remove"] {
        let refused = refusal(&mut daemon.command(&["orphans", action]));
        assert!(refused.contains("name the volumes, or use --all"), "{refused}");
        let refused = refusal(&mut daemon.command_on("other-node", &["orphans", action, "--all"]));
        assert!(refused.contains("of node orphan-node"), "{refused}");
    }
    let refused = refusal(&mut daemon.command(&["orphans", "--remove", &used]));
    assert!(refused.contains("has a PersistentVolume"), "{refused}");

    for moment in MOMENTS {
        kill(&mut daemon.command(&["orphans", "--adopt", &orphan]), moment);
        run(&["orphans", "--adopt", &orphan]).unwrap();
        wait_phase(&kube, &orphan, "Available");
        assert!(daemon.file_of(&orphan).exists());
        delete_volume(&orphan);
    }
    for (name, moment) in [("removed-before", MOMENTS[0]), ("removed-after", MOMENTS[1])] {
        let volume = orphan_volume(name);
        kill(&mut daemon.command(&["orphans", "--remove", &volume]), moment);
        // After the step the daemon removes it by itself, at once or a moment later.
        let repeated = run(&["orphans", "--remove", &volume]);
        assert!(repeated.is_ok() || moment.starts_with("After"), "{repeated:?}");
        kube.wait_until_gone("pv", &volume).unwrap();
        assert!(!daemon.list_names("volumes").contains(&volume), "{}", running.read_log().expect("a log"));
    }
    run(&["orphans", "--remove", "--all"]).unwrap();
    assert_eq!(daemon.list_names("volumes"), [used]);
}

#[test]
#[ignore = "needs kube"]
fn a_new_disk_is_served_after_the_old_one_was_declared_lost_also_after_a_kill() {
    let kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "new-disk");
    let running = daemon.start(&[], &[]);
    daemon.create_claim(&kube, "lost", json!({}));
    let volume = wait_bound(&kube, "lost");
    let store_id = daemon.base.path().join("store-id");
    let old = fs::read_to_string(&store_id).expect("an identity").trim_end().to_owned();
    let declare_lost = ["store", "replace", "--lost", &old];
    let refused = refusal(&mut daemon.command(&declare_lost));
    assert!(refused.contains(&format!("can't declare store {old} lost: it is in")), "{refused}");
    drop(running);
    // Without the directory of its disk, it still names the store that is to be mounted.
    let away = daemon.base.path().with_extension("away");
    fs::rename(daemon.base.path(), &away).expect("renamed");
    let shown = daemon.command(&["store", "show"]).output().expect("provisionerd runs");
    fs::rename(&away, daemon.base.path()).expect("renamed back");
    assert_eq!(shown.status.code(), Some(4), "{shown:?}");
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains(&format!("1 PersistentVolumes of node new-disk are in store {old}")), "{shown}");
    for name in ["volumes", ".new", ".trash"] {
        fs::remove_dir_all(daemon.base.path().join(name)).expect("removed");
    }
    fs::remove_file(&store_id).expect("removed");

    let _running = daemon.start(&[], &[]);
    let shown = daemon.command(&["store", "show"]).output().expect("provisionerd runs");
    assert_eq!(shown.status.code(), Some(4), "{shown:?}");
    let shown = String::from_utf8_lossy(&shown.stdout);
    assert!(shown.contains(&format!("store replace --lost {old}")), "{shown}");
    kill(&mut daemon.command(&declare_lost), "1");
    assert!(!store_id.exists(), "nothing was declared");
    kill(&mut daemon.command(&declare_lost), "2");
    let text = command_output(&mut daemon.command(&declare_lost)).unwrap();
    assert!(text.contains(&format!("{volume} is declared lost")), "{text}");

    // Until then, the node gives claims up for others.
    wait_until(TIMEOUT, "the new store to be served", || {
        ensure!(store_id.exists(), "it has no identity");
        Ok(())
    })
    .unwrap();
    daemon.create_claim(&kube, "new", json!({}));
    wait_bound(&kube, "new");
    wait_phase(&kube, &volume, "Bound");
    kube.delete_object("pvc", "lost").expect("deleted");
    kube.wait_until_gone("pv", &volume).unwrap();
    assert_eq!(daemon.list_names("volumes").len(), 1);
    assert!(command_output(&mut daemon.command(&["store", "show"])).unwrap().contains("serves it"));
}

#[test]
#[ignore = "needs kube and root: it mounts"]
fn a_store_whose_disk_hangs_is_named_and_neither_hides_the_others_nor_holds_the_commands() {
    let kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "hung-node");
    let running = daemon.start(&[], &[]);
    daemon.create_claim(&kube, "kept", json!({}));
    let volume = wait_bound(&kube, "kept");
    let left = "pvc-9f0e5d3c-1b2a-4c5d-8e6f-0a1b2c3d4e5f";
    fs::create_dir(daemon.base.path().join("volumes").join(left)).expect("an orphan");
    let hung = tempfile::tempdir().expect("a directory");
    let path = hung.path().display().to_string();
    let disk = HungDisk::mount(hung.path()).expect("a disk");
    let stores = format!("--stores=bulk={path}");
    let run = |arguments: &[&str], seconds: u64| {
        let started = Instant::now();
        let output = daemon.command(arguments).arg(&stores).output().expect("it ends");
        println!("{arguments:?} ended after {:.1?}", started.elapsed());
        // The disk has 10 s, or 25 s for a check; the rest is for the machine.
        assert!(started.elapsed() < Duration::from_secs(seconds), "{arguments:?}: {:?}", started.elapsed());
        let [stdout, stderr] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).expect("UTF-8"));
        assert!(output.status.code().is_some_and(|code| code != 0), "{}: {stderr}", output.status);
        (stdout, stderr)
    };
    let assert_named = |stderr: &str| {
        let named: Vec<_> = stderr.lines().filter(|line| line.contains(&path)).collect();
        assert!(named.len() == 1 && named[0].contains("has not answered within"), "{stderr}");
    };
    let (table, named) = run(&["volumes"], 40);
    assert!(table.contains(&volume) && table.contains("default/kept"), "{table}");
    assert_named(&named);
    let (json, named) = run(&["volumes", "--json"], 40);
    assert_named(&named);
    let lists: Value = serde_json::from_str(&json).expect("JSON");
    let [own, other] = &lists.as_array().expect("a list")[..] else { panic!("{json}") };
    assert!(own["volumes"].to_string().contains(&volume) && own["error"].is_null(), "{json}");
    assert_eq!([&other["name"], &other["directory"]], ["bulk", &path]);
    assert!(other["store"].is_null() && other["error"].to_string().contains("has not answered"), "{json}");
    let (orphans, named) = run(&["orphans"], 40);
    assert!(orphans.contains(left), "{orphans}");
    assert_named(&named);
    let (shown, named) = run(&["store", "show"], 40);
    assert!(shown.contains("is store"), "{shown}");
    assert_named(&named);
    let (checked, _) = run(&["check", "--no-csi"], 60);
    let failed = |path: &str| checked.lines().any(|line| line.starts_with("FAIL") && line.contains(path));
    assert!(failed("has not answered within") && failed(&path), "{checked}");
    assert!(checked.contains("the directory is store"), "the other one is checked: {checked}");
    drop(disk);
    drop(running);
}

#[test]
#[ignore = "needs kube"]
fn the_copy_of_a_snapshot_in_another_store_belongs_to_nothing_and_is_removed_by_its_id() {
    const KIND: &str = "volumesnapshotcontent";
    let kube = start_control_plane();
    install_snapshot_api(&kube);
    let daemon = TestDaemon::new(&kube, "copy-node");
    let bulk = tempfile::tempdir().expect("a directory");
    let stores = format!("--stores=bulk={}", bulk.path().display());
    let _running = daemon.start(&[&stores], &[]);
    let volume = daemon.create_claim(&kube, "data", json!({}));
    wait_bound(&kube, "data");
    fs::write(daemon.file_of(&volume), "data").expect("written");
    let uid = volume.strip_prefix("pvc-").expect("the UID of its claim");
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": { "name": "kept", "labels": { MANAGED_BY_LABEL: daemon.node }, "finalizers": [CONTENT_FINALIZER] },
        "spec": {
            "deletionPolicy": "Delete",
            "driver": DRIVER,
            "source": { "volumeHandle": volume },
            "volumeSnapshotRef": { "name": "kept", "namespace": "default", "uid": uid },
        },
    });
    create(&kube, &content);
    wait_for(&kube, KIND, "kept", |content| content["status"]["readyToUse"] == true);
    let id = format!("snap-{uid}");
    let [original, copy] = [daemon.base.path(), bulk.path()].map(|base| base.join("snapshots").join(&id));
    let copy_files = || {
        fs::create_dir_all(bulk.path().join("snapshots")).expect("a directory");
        command_output(Command::new("cp").arg("-a").arg(&original).arg(&copy)).unwrap();
    };
    let run = |arguments: &[&str]| command_output(daemon.command(arguments).arg(&stores));
    let states = || -> Vec<String> {
        let text = run(&["volumes"]).unwrap();
        let rows = text.lines().filter(|line| line.starts_with(&id));
        rows.filter_map(|row| row.split_whitespace().nth(1).map(str::to_owned)).collect()
    };
    copy_files();
    assert_eq!(states(), ["ok", "other-store"]);
    let orphans = run(&["orphans"]).unwrap();
    assert!(
        orphans.matches(&id).count() == 1 && orphans.contains("other-store: `provisionerd orphans --remove")
    );
    run(&["orphans", "--remove", &id]).unwrap();
    assert!(original.join("file").exists() && !copy.exists());
    let refused = format!("{:#}", run(&["orphans", "--remove", &id]).expect_err("the content names it"));
    assert!(refused.contains("VolumeSnapshotContent kept names it"), "{refused}");

    // Without the original, the copy may be all that is left.
    copy_files();
    let away = daemon.base.path().join("away");
    fs::rename(&original, &away).expect("renamed");
    let refused = format!("{:#}", run(&["orphans", "--remove", &id]).expect_err("it may be the only one"));
    assert!(refused.contains("does not have it") && copy.join("file").exists(), "{refused}");
    fs::rename(&away, &original).expect("renamed back");

    let deleted = json!({ "metadata": { "annotations": { BEING_DELETED: "yes" } } });
    kube.patch_object(KIND, "kept", &deleted).expect("a patch");
    kube.delete_object(KIND, "kept").expect("deleted");
    kube.wait_until_gone(KIND, "kept").unwrap();
    assert!(!original.exists() && copy.join("file").exists(), "the copy stays");
    assert_eq!(states(), ["orphan"]);
    run(&["orphans", "--remove", &id]).unwrap();
    assert!(!copy.exists());
}
