//! Snapshots of a cluster.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use testbed::{ScratchDir, command_output, tools};

use super::{MemberFixture, cluster_identity};
use crate::harness::NodedProcess;

/// A key of age in this directory, and its recipient.
fn new_key(directory: &Path) -> (PathBuf, String) {
    let (key, keygen) = (directory.join("key"), tools::find_tool(tools::AGE_KEYGEN).unwrap());
    command_output(Command::new(&keygen).arg("-o").arg(&key)).unwrap();
    let recipient = command_output(Command::new(&keygen).arg("-y").arg(&key)).unwrap();
    (key, recipient.trim().to_owned())
}

/// Decrypts a snapshot, and checks that it is etcd's own file.
fn open_snapshot(key: &Path, file: &Path) -> Vec<u8> {
    let plain = file.with_extension("db");
    let mut age = Command::new(tools::find_tool(tools::AGE).unwrap());
    command_output(age.arg("-d").arg("-i").arg(key).arg("-o").arg(&plain).arg(file)).unwrap();
    let mut etcdctl = Command::new(tools::find_tool(tools::ETCDCTL).unwrap());
    etcdctl.env("ETCDCTL_API", "3").args(["snapshot", "status", "-w", "json"]).arg(&plain);
    let status: serde_json::Value = serde_json::from_str(&command_output(&mut etcdctl).unwrap()).unwrap();
    assert!(status["totalKey"].as_u64() > Some(3), "{status}");
    let content = fs::read(&plain).unwrap();
    let (database, sum) = content.split_at(content.len() - 32);
    assert_eq!(Sha256::digest(database)[..], *sum);
    content
}

fn assert_snapshots(member: &MemberFixture) {
    let noded = member.start_new();
    let scratch = ScratchDir::new().unwrap();
    let (key, recipient) = new_key(scratch.path());
    let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let file = path("snapshot.age");
    fs::write(&file, "an older one").unwrap();

    let taken = noded.ask_json(&["cluster", "snapshot", &file, "--recipient", &recipient]);
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!(taken, serde_json::json!({ "file": file, "bytes": metadata.len(), "recipient": recipient }));
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let has = |content: &[u8], text: &[u8]| content.windows(text.len()).any(|window| window == text);
    let content = open_snapshot(&key, Path::new(&file));
    assert!(has(&content, b"/etcd-ca/seal/ca-key.age") && !has(&content, b"/etcd-ca/ca-key.der"));
    assert!(!has(&fs::read(&file).unwrap(), b"/etcd-ca/"), "it is encrypted");

    // Without a recipient nothing is written; a private key is not repeated.
    let none = path("none.age");
    noded.nodectl(&["cluster", "snapshot", &none]).assert_fails(1, "`age-keygen -o KEY` on another machine");
    let mistyped = ["cluster", "snapshot", &none, "--recipient", "age1mistyped"];
    noded.nodectl(&mistyped).assert_fails(1, "not an age recipient: \"age1mistyped\"");
    let private = ["cluster", "snapshot", &none, "--recipient", "AGE-SECRET-KEY-1ABC"];
    let refused = noded.nodectl(&private);
    assert!(!format!("{refused:?}").contains("1ABC"), "{refused:?}");
    refused.assert_fails(1, "an age private key instead of its recipient");
    assert_eq!(
        fs::read_dir(scratch.path()).unwrap().count(),
        3,
        "the key and the snapshot, encrypted and plain"
    );

    // The configured recipient, and the standard output.
    let scratch = noded.stop_and_keep();
    let member = MemberFixture {
        config: format!("{}[cluster.backup]\nrecipient = \"{recipient}\"\n", member.config),
        ..MemberFixture::new()
    };
    let noded = member.start(scratch);
    let printed = path("printed.age");
    let output = noded.nodectl_command(&["cluster", "snapshot", "-"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    fs::write(&printed, output.stdout).unwrap();
    open_snapshot(&key, Path::new(&printed));
    noded.stop();
}

#[test]
#[ignore = "needs etcd and age"]
fn age_opens_a_snapshot_which_is_etcds_own_file() {
    assert_snapshots(&MemberFixture::new());
    assert_snapshots(&MemberFixture::new().on_newest_etcd());
}

/// Tells a node that waits for it to restore the cluster. Once it does, it needs no snapshot any more.
fn restore(noded: &NodedProcess, snapshot: &str) {
    let restored = noded.nodectl(&["cluster", "restore", snapshot, "--yes"]);
    if restored.code != Some(0) {
        restored
            .assert_fails(1, "only a node that is Waiting for a ticket can bootstrap or restore a cluster");
    }
}

/// Destroys a cluster, and restores it on a blank node that is killed at many moments on the way.
fn assert_restored(fixture: fn() -> MemberFixture) {
    let scratch = ScratchDir::new().unwrap();
    let (key, recipient) = new_key(scratch.path());
    let path = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let (file, plain) = (path("snapshot.age"), path("snapshot.db"));
    let lost = fixture().start_new();
    let (former, cluster) = cluster_identity(&lost);
    lost.ask_json(&["cluster", "snapshot", &file, "--recipient", &recipient]);
    open_snapshot(&key, Path::new(&file));
    drop(lost);

    let mut blank = fixture();
    blank.config = blank.config.replace("bootstrap = true", "bootstrap = false");
    let mut noded = blank.spawn(ScratchDir::new().unwrap());
    // What is no snapshot, or none that is decrypted, changes nothing; nor does a command without an agreement.
    let refuse = |file: &str, why: &str| {
        noded.nodectl(&["cluster", "restore", file, "--yes"]).assert_fails(1, why);
        assert!(!noded.data().join("data/cluster.restore").exists());
    };
    refuse(&file, "the snapshot is encrypted: decrypt it by `age -d -i KEY FILE`");
    let part = path("part");
    let whole = fs::read(&plain).unwrap();
    fs::write(&part, &whole[..whole.len() / 2]).unwrap();
    refuse(&part, "the snapshot is damaged or incomplete");
    noded.nodectl(&["cluster", "restore", &plain]).assert_fails(1, "nothing was changed");
    super::wait_waiting(&noded);

    let mut kills = 0;
    for round in 0..KILLS {
        restore(&noded, &plain);
        #[expect(clippy::disallowed_methods, reason = "it is killed at some moment, not at an event")]
        std::thread::sleep(KILL_STEP * round);
        noded = blank.spawn(noded.kill());
        kills += 1;
    }
    println!("killed {kills} times");
    // As a person types it, if the node has not begun.
    let mut command = noded.nodectl_command(&["cluster", "restore", "-", "--yes"]);
    drop(command.stdin(fs::File::open(&plain).unwrap()).stdout(Stdio::null()).stderr(Stdio::null()).status());
    noded.wait_ready("root.cluster");
    let (node, restored) = cluster_identity(&noded);
    assert_eq!(restored, cluster);
    assert_ne!(node, former);
    let members = super::list_members(&noded);
    assert_eq!(members.as_array().map(Vec::len), Some(1), "{members}");
    assert_eq!(members[0]["name"], node);
    assert!(!noded.data().join("data/cluster.restore").exists());
    // It goes on by itself.
    let noded = blank.restart(noded);
    assert_eq!(cluster_identity(&noded), (node, cluster));
    noded.nodectl(&["cluster", "restore", &plain, "--yes"]).assert_fails(1, "only a node that is Waiting");
    noded.stop();
}

/// The kills of a restore, each a moment later than the one before.
const KILLS: u32 = 12;
const KILL_STEP: Duration = Duration::from_millis(70);

#[test]
#[ignore = "needs etcd, etcdctl, go and age"]
fn a_lost_cluster_is_restored_by_a_blank_node_killed_on_the_way() {
    assert_restored(MemberFixture::new);
    assert_restored(|| MemberFixture::new().on_newest_etcd());
}

#[test]
#[ignore = "needs etcd and age"]
fn a_node_saves_its_snapshots_by_schedule_and_removes_only_its_own_oldest_ones() {
    let scratch = ScratchDir::new().unwrap();
    let (key, recipient) = new_key(scratch.path());
    let directory = scratch.path().join("backups");
    let mut member = MemberFixture::new();
    member.config.push_str(&format!(
        "[cluster.backup]\nrecipient = \"{recipient}\"\ndirectory = {directory:?}\nevery = \"1h\"\nkeep = 2\n"
    ));
    let list = || -> Vec<String> {
        let names = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    // Its disk may not be mounted: nothing is created in its place.
    let noded = member.start_new();
    let (node, _) = cluster_identity(&noded);
    let node = node.as_str().unwrap().to_owned();
    let find = |conditions: &serde_json::Value| {
        let conditions = conditions["conditions"].as_array().unwrap().clone();
        conditions.into_iter().find(|condition| condition["object"] == "the backup of the cluster")
    };
    let warning = crate::harness::wait("the warning", || {
        let health = noded.nodectl(&["-o", "json", "health"]).json();
        find(&health).ok_or_else(|| anyhow::anyhow!("{health}"))
    });
    assert_eq!(warning["severity"], "warning", "{warning}");
    assert!(warning["problem"].as_str().unwrap().starts_with("fails: "), "{warning}");
    fs::create_dir(&directory).unwrap();
    let own = |time: &str| format!("{node}-{time}.age");
    let others = ["another-20200101T000000Z.age".to_owned(), own("latest")];
    let old = ["20200101T000000Z", "20200102T000000Z", "20200103T000000Z"].map(own);
    others.iter().chain(&old).for_each(|name| fs::write(directory.join(name), "").unwrap());

    let noded = member.restart(noded);
    let names = crate::harness::wait("the backup", || {
        let names = list();
        anyhow::ensure!(names.len() == 4 && !names.contains(&old[1]), "{names:?}");
        Ok(names)
    });
    let new = names.iter().find(|name| !others.contains(name) && **name != old[2]).unwrap();
    assert!(names.contains(&others[0]) && names.contains(&others[1]) && names.contains(&old[2]), "{names:?}");
    open_snapshot(&key, &directory.join(new));
    fs::remove_file(directory.join(new).with_extension("db")).unwrap();
    assert_eq!(find(&noded.nodectl(&["-o", "json", "health"]).json()), None);
    // The next one is due in an hour, also after another start.
    let noded = member.restart(noded);
    cluster_identity(&noded);
    noded.wait_ready("root.cluster.backup");
    assert_eq!(list(), names);
    noded.stop();
}
