//! Deletions are logged first, with the PersistentVolume, the handle and the claim's UID.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, Once, PoisonError};

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::FakeApi;
use nodekeel_provisioner::{
    Deps, DirStore, DirStoreOptions, StepMoment, VolumeId, VolumeStep, VolumeStore as _,
};
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Record};
use tracing::{Event, Id, Level, Metadata};

use crate::service::dir_node::deps_of;
use crate::service::harness::{
    ApiFixture as _, RunningProvisioner, id, test_api, wait_bound, wait_for_event, wait_no_volumes,
};

/// The log lines of all threads of this program.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct LogCapture;

struct LogLine(String);

impl Visit for LogLine {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = write!(self.0, "{}={value} ", field.name());
    }
}

impl tracing::Subscriber for LogCapture {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("nodekeel_provisioner")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = LogLine(String::new());
        event.record(&mut line);
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl LogCapture {
    fn install() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| tracing::subscriber::set_global_default(Self).expect("no other subscriber"));
    }

    /// True if a line contains these words, and names this volume in these fields.
    fn contains(words: &str, id: &VolumeId, fields: &[&str]) -> bool {
        let name = |field: &&str| match *field {
            "claim_uid" => format!("claim_uid={} ", id.claim_uid()),
            field => format!("{field}={id} "),
        };
        let names: Vec<_> = fields.iter().map(name).collect();
        let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().any(|line| line.contains(words) && names.iter().all(|name| line.contains(name)))
    }
}

const ALL: [&str; 3] = ["pv", "handle", "claim_uid"];

/// A store that records, at each of these steps, whether the line was logged before.
fn store_with_log_checks(
    base: &Path,
    id: &VolumeId,
    lines: &'static [(VolumeStep, &'static str)],
) -> (DirStore, Arc<Mutex<Vec<bool>>>) {
    let logged = Arc::<Mutex<Vec<bool>>>::default();
    let (kept, id) = (Arc::clone(&logged), id.clone());
    let mut options = DirStoreOptions::default();
    options.hook = Some(Arc::new(move |at: VolumeStep, moment: StepMoment| {
        if let (StepMoment::Before, Some((_, words))) = (moment, lines.iter().find(|(step, _)| *step == at)) {
            kept.lock().expect("not poisoned").push(LogCapture::contains(words, &id, &ALL));
        }
    }));
    let dir = Dir::open(base).expect("the base");
    (DirStore::with_options(dir, Arc::new(MemQuota::new()), options).expect("a store"), logged)
}

/// Runs a provisioner with this store, and creates and deletes a claim.
async fn provision_and_delete(api: &FakeApi, store: Arc<DirStore>) {
    let running = RunningProvisioner::start(Deps { snapshots: None, ..deps_of(api, &store) });
    api.create_claim(31, json!({}));
    wait_bound(api, "claim-31").await;
    api.delete_claim(31);
    wait_no_volumes(api).await;
    store.wait_until_erased().await;
    running.stop().await;
}

#[tokio::test]
async fn a_deletion_is_logged_before_the_volume_is_moved_and_before_it_is_erased() {
    LogCapture::install();
    let base = tempfile::tempdir().expect("a directory");
    let lines = &[(VolumeStep::CreateTrashEntry, "deleting volume"), (VolumeStep::EraseContent, "erasing")];
    let (store, logged) = store_with_log_checks(base.path(), &id(31), lines);
    provision_and_delete(&test_api(), Arc::new(store)).await;
    assert_eq!(*logged.lock().expect("not poisoned"), [true, true]);
}

#[tokio::test]
async fn each_provisioned_and_each_rejected_claim_is_logged() {
    LogCapture::install();
    let base = tempfile::tempdir().expect("a directory");
    let (store, _) = store_with_log_checks(base.path(), &id(31), &[]);
    let api = test_api();
    let rejected = json!({ "metadata": { "name": "blocked" }, "spec": { "volumeMode": "Unheard" } });
    api.create_claim(34, rejected);
    provision_and_delete(&api, Arc::new(store)).await;
    wait_for_event(&api, "blocked", "ProvisioningFailed").await;
    assert!(LogCapture::contains("provisioned volume", &id(31), &["pv"]));
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let words = ["claim=blocked ", "claim rejected", "spec.volumeMode"];
    assert!(lines.iter().any(|line| words.iter().all(|word| line.contains(word))));
}

#[tokio::test]
async fn removals_by_a_new_store_are_logged() {
    LogCapture::install();
    let base = tempfile::tempdir().expect("a directory");
    let (entry, staged) = (format!(".trash/{}.0.0/volume/deep", id(32)), format!(".new/{}", id(33)));
    for path in [&entry, &staged] {
        fs::create_dir_all(base.path().join(path)).expect("a directory");
    }
    let (store, logged) =
        store_with_log_checks(base.path(), &id(32), &[(VolumeStep::EraseContent, "erasing")]);
    store.start_serving().await.expect("served");
    store.wait_until_erased().await;
    assert_eq!(*logged.lock().expect("not poisoned"), [true]);
    assert!(LogCapture::contains("incomplete volume", &id(33), &["handle", "claim_uid"]));
}
