//! The re-encryption of the data volume, on a disk of a guest.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nodekeel_node::v1::{
    AddRecoveryPassphraseRequest, BackUpStorageHeaderRequest, ConfirmRecoveryPassphraseRequest,
    ReencryptStorageRequest, StorageRequest, StorageResponse,
};
use testbed::ScratchDir;

use crate::harness::{NodedProcess, node_command, wait};
use crate::storage_device::DeviceFixture;
use crate::storage_disk::run_nodectl;

const LOCAL: &str = "encryption = \"encrypted\"\nkeys = \"local\"\n";

fn done_bytes(status: &StorageResponse) -> u64 {
    status.reencryption.as_ref().map_or(0, |report| report.done_bytes)
}

fn has_state(status: &StorageResponse, state: &str) -> bool {
    status.reencryption.as_ref().is_some_and(|report| report.state == state)
}

/// Kills the cryptsetup that a node in this process runs.
fn kill_cryptsetup() {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let children = tasks.map(|task| fs::read_to_string(task.join("children")).unwrap_or_default());
    let children: Vec<_> =
        children.flat_map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>()).collect();
    let is_meant = |child: &&String| {
        fs::read_to_string(format!("/proc/{child}/cmdline")).is_ok_and(|line| line.contains("--resume-only"))
    };
    let child = children.iter().find(is_meant).expect("cryptsetup is at work");
    kill(Pid::from_raw(child.parse().unwrap()), Signal::SIGKILL).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_reencryption_goes_on_after_kills_and_no_header_of_before_is_restored() {
    // XFS needs 300 MiB. Each byte takes an emulated processor its time.
    let fixture = DeviceFixture::new(332).await;
    let [old, passphrase_file] =
        ["old", "passphrase"].map(|name| fixture.scratch.path().join(name).display().to_string());
    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    let witness: Vec<u8> = (0..2_000_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(fixture.volume().join("witness"), &witness).unwrap();
    let assert_witness = || assert!(fs::read(fixture.volume().join("witness")).unwrap() == witness);
    let added = node.client.add_recovery_passphrase(AddRecoveryPassphraseRequest::default()).await.unwrap();
    let passphrase = added.into_inner().passphrase.unwrap();
    let typed = ConfirmRecoveryPassphraseRequest { passphrase: Some(passphrase.clone()) };
    node.client.confirm_recovery_passphrase(typed).await.unwrap();
    fs::write(&passphrase_file, &passphrase.text).unwrap();
    let (code, text) = run_nodectl(&fixture, &["storage", "header", "backup", &old]);
    assert_eq!(code, Some(0), "{text}");
    for (drop_slots, says) in [
        (vec![], "key slot 1 (recovery)"),
        (vec![0], "can't drop key slot 0"),
        (vec![7], "can't drop key slot 7"),
    ] {
        let request = ReencryptStorageRequest { drop_slots, ..Default::default() };
        let refused = node.client.reencrypt_storage(request).await.unwrap_err();
        assert!(refused.message().contains(says), "{refused:?}");
    }
    node.stop().await;

    // A noded that is killed amid it. cryptsetup ends by itself, and the next noded continues.
    let command = node_command("run", fixture.scratch.path(), &fixture.config(LOCAL));
    let mut noded = NodedProcess::start_command(ScratchDir::new().unwrap(), command);
    let path = fixture.volume().join("witness");
    tokio::task::block_in_place(|| wait("the volume", || Ok(fs::metadata(&path).map(drop)?)));
    let reencrypt = ["storage", "reencrypt", "--passphrase-file", &passphrase_file];
    let (code, text) = run_nodectl(&fixture, &reencrypt);
    assert!(code == Some(0) && text.contains("continues after a restart"), "{text}");
    let has_begun = || {
        let (_, text) = run_nodectl(&fixture, &["--output=json", "storage", "status"]);
        let status: serde_json::Value = serde_json::from_str(&text)?;
        anyhow::ensure!(status["reencryption"]["done_bytes"].as_u64() > Some(0), "{text}");
        Ok(())
    };
    tokio::task::block_in_place(|| wait("its progress", has_begun));
    noded.signal(Signal::SIGKILL);
    noded.wait_end();
    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    assert_witness();
    let is_beyond = |status: &StorageResponse, before: u64| {
        status.state == "open" && has_state(status, "running") && done_bytes(status) > before
    };
    let continued = done_bytes(&node.client.storage(StorageRequest {}).await.unwrap().into_inner());
    let running = node.wait_status(|status| is_beyond(status, continued)).await;
    assert_eq!(node.storage_health().await, Default::default(), "no problem while it goes on");
    let refused = node.client.back_up_storage_header(BackUpStorageHeaderRequest {}).await.unwrap_err();
    assert!(refused.message().contains("while the volume is re-encrypted"), "{refused:?}");

    // cryptsetup alone: if it was in a piece, the volume closes, and opens again.
    kill_cryptsetup();
    node.wait_status(|status| is_beyond(status, done_bytes(&running))).await;
    assert_witness();

    // A stop of root.storage: who waits for the end is told, and it goes on when the volume is open again.
    let mut reports =
        node.client.reencrypt_storage(ReencryptStorageRequest::default()).await.unwrap().into_inner();
    let (code, text) = run_nodectl(&fixture, &["stop", "root.storage", "--wait"]);
    assert_eq!(code, Some(0), "{text}");
    let mut last = String::new();
    while let Some(report) = reports.message().await.unwrap() {
        last = report.state;
    }
    assert_eq!(last, "paused");
    let (code, text) = run_nodectl(&fixture, &["start", "root.storage", "--wait"]);
    assert_eq!(code, Some(0), "{text}");
    assert_witness();

    // A second call follows it.
    let (code, text) = run_nodectl(&fixture, &["storage", "reencrypt", "--wait"]);
    assert!(code == Some(0) && text.starts_with("complete: 100 %"), "{text}");
    assert_witness();
    let status = node.client.storage(StorageRequest {}).await.unwrap().into_inner();
    assert!(has_state(&status, "complete"), "{status:?}");
    let slots: Vec<_> =
        status.encryption.unwrap().slots.into_iter().map(|slot| (slot.kind, slot.generation)).collect();
    assert!(slots.len() == 2 && slots.contains(&("local".into(), 2)), "{slots:?}");
    node.stop().await;
    assert!(!fixture.is_open());

    let mut node = fixture.start(LOCAL).await;
    node.wait_open().await;
    assert_witness();
    let (_, text) = run_nodectl(&fixture, &["stop", "root.storage", "--wait"]);
    node.wait_status(|status| status.state == "closed").await;
    let restore = [
        "storage",
        "header",
        "restore",
        &old,
        "--recovery",
        "--older",
        "--passphrase-file",
        &passphrase_file,
    ];
    let (code, refused) = run_nodectl(&fixture, &restore);
    assert!(
        code != Some(0) && refused.contains("from before the volume was re-encrypted"),
        "{text} {refused}"
    );
    node.stop().await;
}
