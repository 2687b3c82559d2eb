//! A store on a disk that can't be used for a while: its file system is read-only, or its quota is off.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_fsquota::ProjectQuota;
use nodekeel_fsquota::testing::RawQuotaCalls;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{NODE, sample_claim, sample_identity};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind};
use nodekeel_provisioner::{
    Ability, Deps, DirStore, InabilityCause, Provisioner, ProvisionerConfig, SELECTED_NODE, VolumeStore as _,
};
use serde_json::json;
use testbed::guest::disk::{FileSystem, GuestDisk};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::fixture::{assert_empty, id};
use crate::service::harness::{test_api, test_deps};

/// Timeout of waits; a system call in the guest takes much longer than elsewhere.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The time within which a repaired node serves everything, and what the guest's slowness adds.
const REPAIRED_WITHIN: Duration = Duration::from_secs(5 + 10);

fn remount(point: &Path, options: &str) {
    let status = Command::new("mount").arg("-o").arg(format!("remount,{options}")).arg(point).status();
    assert!(status.expect("mount(8)").success(), "remount,{options}");
}

async fn wait_for(within: Duration, what: &str, holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(within, wait).await.unwrap_or_else(|_| panic!("{what} within {within:?}"));
}

fn is_bound(api: &FakeApi, claim: &str) -> bool {
    api.get_object(ObjectKind::Claim, claim).is_some_and(|claim| claim["status"]["phase"] == "Bound")
}

fn is_deselected(api: &FakeApi, claim: &str) -> bool {
    let claim = api.get_object(ObjectKind::Claim, claim).expect("a claim");
    claim["metadata"]["annotations"][SELECTED_NODE].is_null()
}

fn cause(provisioner: &Provisioner) -> Option<InabilityCause> {
    match provisioner.ability() {
        Ability::Unable { cause, .. } => Some(cause),
        _ => None,
    }
}

/// A claim of a node that can't serve is given up, and served within seconds of the repair.
async fn check_fault(
    (api, provisioner): (&FakeApi, &Provisioner),
    (number, expected): (u32, InabilityCause),
    (break_it, repair): (impl FnOnce(), impl FnOnce()),
) {
    let claim = format!("claim-{number}");
    break_it();
    api.create_object(ObjectKind::Claim, sample_claim(number, json!({})));
    wait_for(TIMEOUT, "deselected", || is_deselected(api, &claim)).await;
    assert_eq!(cause(provisioner), Some(expected), "{:?}", provisioner.ability());
    let notes = api.event_notes(&claim);
    assert!(notes.iter().any(|note| note.contains("can't create volumes")), "{notes:?}");
    let select = json!({ "metadata": { "annotations": { SELECTED_NODE: NODE } } });
    repair();
    wait_for(REPAIRED_WITHIN, "able after the repair", || provisioner.ability() == Ability::Able).await;
    // As the scheduler does, once the node offers capacity again.
    api.patch_object(ObjectKind::Claim, &claim, select);
    wait_for(REPAIRED_WITHIN, "bound after the repair", || is_bound(api, &claim)).await;
}

async fn check_store_that_can_not_be_used(kind: FileSystem) {
    let disk = GuestDisk::acquire().and_then(|disk| disk.format_and_mount(kind, "prjquota"));
    let disk = disk.expect("a disk");
    let base = disk.mount_point();
    let quota = Arc::new(ProjectQuota::open(base).expect("project quotas"));
    let store = DirStore::new(Dir::open(base).expect("the base"), quota.clone()).expect("a store");
    let store = Arc::new(store);
    let api = test_api();
    let deps = Deps { store: store.clone(), ..test_deps(&api, &MemStore::default()) };
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), deps);
    let token = CancellationToken::new();
    let running = tokio::spawn({
        let (token, provisioner) = (token.clone(), provisioner.clone());
        async move { provisioner.run_until(token, || ()).await }
    });
    api.create_object(ObjectKind::Claim, sample_claim(1, json!({})));
    wait_for(TIMEOUT, "bound", || is_bound(&api, "claim-1")).await;
    assert_eq!(provisioner.ability(), Ability::Able);
    let file = base.join("volumes").join(id(1).as_str()).join("file");
    fs::write(&file, "data").expect("written");

    let read_only = || {
        remount(base, "ro");
        assert_eq!(fs::read_to_string(&file).expect("read"), "data", "what exists is served");
    };
    let nodes = (&api, &provisioner);
    check_fault(nodes, (2, InabilityCause::ReadOnly), (read_only, || remount(base, "rw"))).await;
    // Only XFS has a program for it that the guest has.
    if kind == FileSystem::Xfs {
        let quota_off = || RawQuotaCalls(&quota).turn_enforcement_off().expect("turned off");
        let quota_on = || {
            let on = Command::new("xfs_quota").args(["-x", "-c", "enable -p"]).arg(base).status();
            assert!(on.expect("xfs_quota").success());
        };
        check_fault(nodes, (3, InabilityCause::NoLimits), (quota_off, quota_on)).await;
    }
    let projects = || quota.list_projects().expect("projects");
    let before = projects();
    for _ in 0..10 {
        // With all capabilities of root: ext4 lets that pass limits.
        store.probe().await.expect("it is able");
    }
    // The provisioner makes a probe of its own now and then.
    let is_clean = async {
        while projects().len() > before.len() {
            sleep(Duration::from_millis(50)).await;
        }
    };
    let cleaned = timeout(TIMEOUT, is_clean).await;
    cleaned.unwrap_or_else(|_| panic!("a probe leaves a project: {before:?}, then {:?}", projects()));
    assert_empty(base, &[".new"], "a probe leaves nothing");
    token.cancel();
    running.await.expect("no panic").expect_err("canceled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
async fn on_xfs_a_store_that_can_not_be_used_gives_its_claims_up_and_serves_again() {
    check_store_that_can_not_be_used(FileSystem::Xfs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
async fn on_ext4_a_store_that_can_not_be_used_gives_its_claims_up_and_serves_again() {
    check_store_that_can_not_be_used(FileSystem::Ext4).await;
}
