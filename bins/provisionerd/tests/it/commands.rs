//! The commands of an operator, next to a running daemon.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Output;

use kube::api::DeleteParams;
use serde_json::{Value, json};

use crate::cluster::{
    TestDaemon, delete_claim, patch_volume, run_with_daemon, volume_name, volumes_api, wait_bound,
    wait_phase, wait_volume_gone,
};

/// Runs a command in the place of the daemon.
async fn run_command(daemon: &TestDaemon, arguments: &[&str], kill_at: Option<&str>) -> Output {
    let mut command = daemon.command(arguments);
    command.envs(kill_at.map(|moment| ("PROVISIONERD_KILL_AT", moment)));
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

/// Makes the volume of a claim an orphan with a file, as an administrator does who keeps the data.
async fn orphan_volume(client: &kube::Client, daemon: &TestDaemon, name: &str) -> String {
    daemon.create_claim(client, name).await;
    let volume = volume_name(&wait_bound(client, name).await);
    fs::write(daemon.file_of(&volume), "data").expect("written");
    let retain = json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } });
    patch_volume(client, &volume, retain).await;
    delete_claim(client, name).await;
    wait_phase(client, &volume, "Released").await;
    delete_volume(client, &volume).await;
    volume
}

async fn delete_volume(client: &kube::Client, volume: &str) {
    volumes_api(client).delete(volume, &DeleteParams::default()).await.expect("deleted");
    wait_volume_gone(client, volume).await;
}

fn has_data(daemon: &TestDaemon, volume: &str) -> bool {
    daemon.file_of(volume).exists()
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
        let moved = daemon.command_on("other-node", &["orphans", action, "--all"]).output().await;
        let refused = stderr_text(&moved.expect("provisionerd starts"));
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
        wait_volume_gone(client, &volume).await;
        assert!(!daemon.list_names("volumes").contains(&volume), "{}", daemon.log_text());
    }
}

#[test]
#[ignore = "needs kube"]
fn orphans_are_listed_adopted_and_removed_beside_the_daemon_also_after_a_kill() {
    run_with_daemon("orphan-node", async |client, daemon| {
        let mut child = daemon.start(&[]);
        daemon.create_claim(&client, "used").await;
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
    run_with_daemon("new-disk", async |client, daemon| {
        let mut child = daemon.start(&[]);
        daemon.create_claim(&client, "lost").await;
        let volume = volume_name(&wait_bound(&client, "lost").await);
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

        daemon.create_claim(&client, "new").await;
        wait_bound(&client, "new").await;
        wait_phase(&client, &volume, "Bound").await;
        delete_claim(&client, "lost").await;
        wait_volume_gone(&client, &volume).await;
        assert_eq!(daemon.list_names("volumes").len(), 1);
        assert!(stdout_text(&run_command(&daemon, &["store", "show"], None).await).contains("serves it"));
        child.kill().await.expect("killed");
    });
}
