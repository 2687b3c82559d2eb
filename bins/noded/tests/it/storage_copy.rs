//! The data volume moves to another disk, in a guest.

use std::fs;

use nix::sys::signal::Signal;
use nodekeel_node::v1::{HealthRequest, StorageResponse};
use testbed::ScratchDir;

use crate::harness::{NodedProcess, node_command, wait};
use crate::storage_device::{DeviceFixture, mebibytes_of_file_system};

const LOCAL: &str = "encryption = \"encrypted\"\nkeys = \"local\"\n";

/// The size of the new disk.
const NEW_MIB: u64 = 448;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "sampled: needs kernel with a disk of 1 GiB"]
async fn a_volume_moves_to_another_disk_whatever_stops_or_changes_in_between() {
    let mut fixture = DeviceFixture::new(384).await;
    let node = fixture.start(LOCAL).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("witness"), "data").unwrap();
    let before = mebibytes_of_file_system(&fixture.volume());
    node.stop().await;

    let former = fixture.replace_part(NEW_MIB);
    let copying = format!("{LOCAL}copy_from = {former:?}\n");
    let text = fixture.check(&copying);
    assert!(text.ends_with("copies the node's data volume to it, if it is blank"), "{text}");
    // The new one alone is no reason to start without data.
    let text = fixture.check(LOCAL);
    assert!(text.contains("lost"), "{text}");

    let is_copying = |status: &StorageResponse| status.copied_bytes.is_some_and(|bytes| bytes > 0);
    let mut node = fixture.start(&copying).await;
    let status = node.wait_status(is_copying).await;
    let says = format!("copies the data volume from {}", former.display());
    assert!(status.detail.starts_with(&says), "{status:?}");
    node.stop().await;
    assert!(!fixture.is_open() && !fixture.has_mapping("nodekeel-data-former"), "a stop ends the copy");

    // The former disk is used again: it is the node's until the copy is complete.
    let target = std::mem::replace(&mut fixture.part, former.clone());
    let node = fixture.start(LOCAL).await;
    node.wait_open().await;
    fs::write(fixture.volume().join("since"), "more").unwrap();
    node.stop().await;
    fixture.part = target;
    let command = node_command("run", fixture.scratch.path(), &fixture.config(&copying));
    let mut noded = NodedProcess::start_command(ScratchDir::new().unwrap(), command);
    wait("the copy", || {
        anyhow::ensure!(fixture.has_mapping("nodekeel-data-former") && fixture.is_open(), "no mappings");
        Ok(())
    });
    noded.signal(Signal::SIGKILL);
    noded.wait_end();
    fixture.hasten_part(NEW_MIB);

    let mut node = fixture.start(&copying).await;
    node.wait_open().await;
    for (name, contents) in [("witness", "data"), ("since", "more")] {
        assert_eq!(fs::read_to_string(fixture.volume().join(name)).unwrap(), contents);
    }
    let after = mebibytes_of_file_system(&fixture.volume());
    assert!(after >= before + 50, "{before} MiB became {after}");
    let health = node.client.health(HealthRequest::default()).await.unwrap().into_inner();
    let copied = health.conditions.iter().find(|condition| condition.object == "copy of the data volume");
    assert!(copied.unwrap().hint.contains(&format!("`blkdiscard -z {}`", former.display())), "{copied:?}");
    node.stop().await;
    let node = fixture.start(LOCAL).await;
    node.wait_open().await;
    node.stop().await;

    // The former disk is not the node's any more.
    fixture.part = former;
    let mut node = fixture.start(LOCAL).await;
    let status = node.wait_status(|status| status.state == "lost").await;
    assert!(status.detail.contains("but esp/ records volume"), "{status:?}");
    node.stop().await;
}
