//! The commands of an operator, beside a running daemon.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Output;

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::cluster::{self, DRIVER, TestDaemon, claims_api, volumes_api, wait_object};
use crate::store::{create_claim, wait_bound};

/// Runs a command in the place of the daemon.
async fn run_command(daemon: &TestDaemon, arguments: &[&str], kill_at: Option<&str>) -> Output {
    run_on_node(&daemon.node, daemon, arguments, kill_at).await
}

/// Runs a command with the disk of the daemon on another node.
async fn run_on_node(node: &str, daemon: &TestDaemon, arguments: &[&str], kill_at: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
    command.args(arguments).args(["--driver", DRIVER, "--node", node, "--directory"]);
    command.arg(daemon.base.path()).arg("--kubeconfig").arg(&daemon.kubeconfig).env_clear();
    command.env("PROVISIONERD_BOOKS", daemon.quota_dir.path());
    if let Some(moment) = kill_at {
        command.env("PROVISIONERD_KILL_AT", moment);
    }
    command.output().await.expect("provisionerd starts")
}

fn stdout_text(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn stderr_text(output: &Output) -> String {
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

async fn wait_phase(client: &kube::Client, volume: &str, phase: &str) {
    let is_so = |volume: Option<&PersistentVolume>| {
        volume.and_then(|volume| volume.status.as_ref()?.phase.as_deref()) == Some(phase)
    };
    wait_object(&volumes_api(client), volume, is_so).await;
}

/// Makes the volume of a claim an orphan with a file, as an administrator does who keeps the data.
async fn orphan_volume(client: &kube::Client, daemon: &TestDaemon, name: &str) -> String {
    let claim = create_claim(client, daemon, name).await;
    wait_bound(client, name).await;
    let volume = format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"));
    fs::write(daemon.base.path().join("volumes").join(&volume).join("file"), "data").expect("written");
    let retain = Patch::Merge(json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } }));
    volumes_api(client).patch(&volume, &PatchParams::default(), &retain).await.expect("a patch");
    claims_api(client).delete(name, &DeleteParams::default()).await.expect("the claim is deleted");
    wait_phase(client, &volume, "Released").await;
    delete_volume(client, &volume).await;
    volume
}

async fn delete_volume(client: &kube::Client, volume: &str) {
    volumes_api(client).delete(volume, &DeleteParams::default()).await.expect("deleted");
    wait_object(&volumes_api(client), volume, |volume| volume.is_none()).await;
}

fn has_data(daemon: &TestDaemon, volume: &str) -> bool {
    Path::new(daemon.base.path()).join("volumes").join(volume).join("file").exists()
}

/// Asserts that the commands list a volume in use and an orphan, and refuse to act on the former. Returns its id.
async fn assert_listed(daemon: &TestDaemon, orphan: &str) -> String {
    let json = stdout_text(&run_command(daemon, &["volumes", "--json"], None).await);
    let listed: Value = serde_json::from_str(&json).expect("JSON");
    let rows = listed["volumes"].as_array().expect("a list");
    let find = |state: &str| rows.iter().find(|row| row["state"] == state).and_then(|row| row["id"].as_str());
    assert_eq!(find("orphan"), Some(orphan), "{listed}");
    let used = find("ok").expect("a volume");
    let table = stdout_text(&run_command(daemon, &["volumes"], None).await);
    assert!(table.contains("default/used") && table.contains("Bound"), "{table}");
    let orphans = stdout_text(&run_command(daemon, &["orphans"], None).await);
    assert!(orphans.contains(orphan) && !orphans.contains("default/used"), "{orphans}");

    // Nothing by default, and no volume that is in use.
    for action in ["--adopt", "--remove"] {
        let refused = stderr_text(&run_command(daemon, &["orphans", action], None).await);
        assert!(refused.contains("name the volumes, or use --all"), "{refused}");
    }
    let refused = stderr_text(&run_command(daemon, &["orphans", "--remove", used], None).await);
    assert!(refused.contains("has a PersistentVolume"), "{refused}");
    // A disk that was moved: its volumes are those of its node.
    for action in ["--adopt", "--remove"] {
        let moved = run_on_node("other-node", daemon, &["orphans", action, "--all"], None).await;
        let refused = stderr_text(&moved);
        assert!(refused.contains("of node orphan-node"), "{refused}");
    }
    used.to_owned()
}

/// The moments around the only step of adopting and of removing an orphan.
const MOMENTS: [&str; 2] = ["Before CreatePersistentVolume", "After CreatePersistentVolume"];

async fn adopt_through_kills(client: &kube::Client, daemon: &TestDaemon, volume: &str) {
    for moment in MOMENTS {
        let killed = run_command(daemon, &["orphans", "--adopt", volume], Some(moment)).await;
        assert_eq!(killed.status.signal(), Some(9), "{killed:?}");
        stdout_text(&run_command(daemon, &["orphans", "--adopt", volume], None).await);
        wait_phase(client, volume, "Available").await;
        assert!(has_data(daemon, volume));
        delete_volume(client, volume).await;
    }
}

async fn remove_through_kills(client: &kube::Client, daemon: &TestDaemon) {
    for moment in MOMENTS {
        let volume = orphan_volume(client, daemon, &format!("removed-{}", moment.len())).await;
        let killed = run_command(daemon, &["orphans", "--remove", &volume], Some(moment)).await;
        assert_eq!(killed.status.signal(), Some(9), "{killed:?}");
        // After the step the daemon removes it by itself, at once or a moment later.
        let repeated = run_command(daemon, &["orphans", "--remove", &volume], None).await;
        assert!(repeated.status.success() || moment.starts_with("After"), "{repeated:?}");
        wait_object(&volumes_api(client), &volume, |volume| volume.is_none()).await;
        assert!(!daemon.list_names("volumes").contains(&volume), "{}", daemon.log_text());
    }
}

#[test]
#[ignore = "needs kube"]
fn orphans_are_listed_adopted_and_removed_beside_the_daemon_also_after_a_kill() {
    let kube = cluster::start_control_plane();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = cluster::admin_client(&kube).await;
        let daemon = TestDaemon::new(&cluster::account_kubeconfig(&kube), "orphan-node".to_owned());
        let mut child = daemon.start(&[]);
        create_claim(&client, &daemon, "used").await;
        wait_bound(&client, "used").await;
        let volume = orphan_volume(&client, &daemon, "left").await;
        let used = assert_listed(&daemon, &volume).await;
        adopt_through_kills(&client, &daemon, &volume).await;
        remove_through_kills(&client, &daemon).await;
        stdout_text(&run_command(&daemon, &["orphans", "--remove", "--all"], None).await);
        assert!(!has_data(&daemon, &volume) && daemon.list_names("volumes") == [used]);
        child.kill().await.expect("killed");
    });
}

#[test]
#[ignore = "needs kube"]
fn a_new_disk_is_served_after_the_old_one_was_declared_lost_also_after_a_kill() {
    let kube = cluster::start_control_plane();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let client = cluster::admin_client(&kube).await;
        let daemon = TestDaemon::new(&cluster::account_kubeconfig(&kube), "new-disk".to_owned());
        let mut child = daemon.start(&[]);
        let claim = create_claim(&client, &daemon, "lost").await;
        wait_bound(&client, "lost").await;
        let volume = format!("pvc-{}", claim.metadata.uid.as_deref().expect("a UID"));
        let base = daemon.base.path();
        let old = fs::read_to_string(base.join("store-id")).expect("an identity").trim_end().to_owned();
        let refused = run_command(&daemon, &["store", "replace", "--lost", &old], None).await;
        let refused = stderr_text(&refused);
        assert!(refused.contains(&format!("can't declare store {old} lost: it is in")), "{refused}");
        child.kill().await.expect("killed");
        for name in ["volumes", ".new", ".trash"] {
            fs::remove_dir_all(base.join(name)).expect("removed");
        }
        fs::remove_file(base.join("store-id")).expect("removed");

        let mut child = daemon.start(&[]);
        let shown = run_command(&daemon, &["store", "show"], None).await;
        assert_eq!(shown.status.code(), Some(4), "{shown:?}");
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains(&format!("store replace --lost {old}")), "{shown}");
        for moment in ["1", "2"] {
            let killed = run_command(&daemon, &["store", "replace", "--lost", &old], Some(moment)).await;
            assert_eq!(killed.status.signal(), Some(9), "{killed:?}");
            if moment == "1" {
                assert!(!base.join("store-id").exists(), "nothing was declared");
            }
        }
        let text = stdout_text(&run_command(&daemon, &["store", "replace", "--lost", &old], None).await);
        assert!(text.contains(&format!("{volume} is declared lost")), "{text}");

        create_claim(&client, &daemon, "new").await;
        wait_bound(&client, "new").await;
        wait_phase(&client, &volume, "Bound").await;
        claims_api(&client).delete("lost", &DeleteParams::default()).await.expect("deleted");
        wait_object(&volumes_api(&client), &volume, |volume| volume.is_none()).await;
        assert_eq!(daemon.list_names("volumes").len(), 1);
        assert!(stdout_text(&run_command(&daemon, &["store", "show"], None).await).contains("serves it"));
        child.kill().await.expect("killed");
    });
}
