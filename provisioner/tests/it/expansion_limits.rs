//! An expansion with limits that a kernel enforces, under a process that writes as much as it may.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nodekeel_fsquota::ProjectQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{NODE, sample_claim, sample_identity};
use nodekeel_provisioner::testing::{FakeApi, MemStore, ObjectKind};
use nodekeel_provisioner::{Deps, DirStore, Provisioner, ProvisionerConfig, VolumeStore as _};
use serde_json::{Value, json};
use testbed::guest::disk::{FileSystem, GuestDisk};
use tokio_util::sync::CancellationToken;

use crate::service::harness::{id, test_api, test_deps};

const MIB: u64 = 1 << 20;
const CLAIM: &str = "claim-1";
/// Timeout of waits; a system call in the guest takes much longer than elsewhere.
const TIMEOUT: Duration = Duration::from_secs(300);

fn request(size: &str) -> Value {
    json!({ "spec": { "resources": { "requests": { "storage": size } } } })
}

async fn wait_for(api: &FakeApi, is_so: impl Fn(&Value) -> bool) {
    let is_so =
        |api: &FakeApi| api.get_object(ObjectKind::Claim, CLAIM).is_some_and(|claim| is_so(&claim["status"]));
    tokio::time::timeout(TIMEOUT, api.wait_until(is_so)).await.expect("within the timeout");
}

/// Appends to a file until the test stops it, and continues when the volume is full. Returns an error that is
/// not about a full volume.
#[expect(clippy::disallowed_methods, reason = "the kernel reports no raised limit")]
fn write_until(file: &Path, stop: &AtomicBool) -> std::io::Result<()> {
    let mut file = File::options().create(true).append(true).open(file)?;
    while !stop.load(Ordering::Relaxed) {
        match file.write(&[7; 16 << 10]) {
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the volume is filled up to a limit, which may not be exceeded.
async fn wait_filled(store: &DirStore, file: &Path, limit: u64) {
    let filled = async {
        loop {
            let used = store.usage(&id(1)).await.expect("usage").usage.bytes.0;
            assert!(used <= limit, "{used} bytes of {limit}");
            if used + 64 * 1024 >= limit {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, filled).await.expect("the process fills the volume");
    assert!(fs::metadata(file).expect("the file").len() <= limit);
}

#[test]
#[ignore = "sampled: needs kernel with a disk of 512 MiB"]
fn a_volume_expands_under_a_writing_process_and_shrinks_for_nobody() {
    let disk = GuestDisk::acquire().and_then(|disk| disk.format_and_mount(FileSystem::Xfs, "prjquota"));
    let disk = disk.expect("a disk");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(expand_under_writer(disk.mount_point()));
}

async fn expand_under_writer(base: &Path) {
    let quota = Arc::new(ProjectQuota::open(base).expect("project quotas"));
    let store = Arc::new(DirStore::new(Dir::open(base).expect("the base"), quota).expect("a store"));
    let api = test_api();
    let deps = Deps { store: store.clone(), ..test_deps(&api, &MemStore::default()) };
    let provisioner = Provisioner::new(ProvisionerConfig::new(sample_identity(NODE)), deps);
    let token = CancellationToken::new();
    let running = tokio::spawn({
        let token = token.clone();
        async move { provisioner.run_until(token, || ()).await }
    });
    api.create_object(ObjectKind::Claim, sample_claim(1, request("8Mi")));
    wait_for(&api, |status| status["phase"] == "Bound").await;
    let file = base.join("volumes").join(id(1).as_str()).join("data");
    let stop = Arc::new(AtomicBool::new(false));
    let writer = tokio::task::spawn_blocking({
        let (file, stop) = (file.clone(), stop.clone());
        move || write_until(&file, &stop)
    });
    wait_filled(&store, &file, 8 * MIB).await;
    api.patch_object(ObjectKind::Claim, CLAIM, request("16Mi"));
    wait_for(&api, |status| status["capacity"]["storage"] == "16Mi").await;
    wait_filled(&store, &file, 16 * MIB).await;

    api.patch_object(ObjectKind::Claim, CLAIM, request("100Ti"));
    let infeasible = |status: &Value| {
        status["allocatedResourceStatuses"]["storage"] == "ControllerResizeInfeasible"
            && status["conditions"][0]["message"].as_str().is_some_and(|text| text.contains("never fits"))
    };
    wait_for(&api, infeasible).await;
    wait_filled(&store, &file, 16 * MIB).await;
    api.patch_object(ObjectKind::Claim, CLAIM, request("24Mi"));
    wait_for(&api, |status| status["capacity"]["storage"] == "24Mi").await;
    wait_filled(&store, &file, 24 * MIB).await;

    stop.store(true, Ordering::Relaxed);
    writer.await.expect("no panic").expect("no other error");
    token.cancel();
    running.await.expect("no panic").expect_err("canceled");
}
