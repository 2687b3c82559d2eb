//! What destroys is told first: which PersistentVolume, which handle, and whose claim.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, Once, PoisonError};

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{NODE, claim, identity};
use nodekeel_provisioner::testing::{FakeApi, Kind};
use nodekeel_provisioner::{Config, Deps, DirStore, DirStoreOptions, Moment, Provisioner, Step, VolumeId};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Record};
use tracing::{Event, Id, Level, Metadata};

use crate::service::harness::{api, bound, id, no_volumes};

/// What all threads of this program have logged, a text for each line.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Log;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = write!(self.0, "{}={value} ", field.name());
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("nodekeel_provisioner")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Log {
    fn listen() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| tracing::subscriber::set_global_default(Self).expect("it is the only one"));
    }

    /// Whether a line has these words, and names this volume in these fields.
    fn has(words: &str, id: &VolumeId, fields: &[&str]) -> bool {
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

/// A store that keeps which of these lines were there before it came to the step.
fn store(
    base: &Path,
    id: &VolumeId,
    lines: &'static [(Step, &'static str)],
) -> (DirStore, Arc<Mutex<Vec<bool>>>) {
    let told = Arc::<Mutex<Vec<bool>>>::default();
    let (kept, id) = (Arc::clone(&told), id.clone());
    let mut options = DirStoreOptions::default();
    options.hook = Some(Arc::new(move |at: Step, moment: Moment| {
        if let (Moment::Before, Some((_, words))) = (moment, lines.iter().find(|(step, _)| *step == at)) {
            kept.lock().expect("nobody panics with it").push(Log::has(words, &id, &ALL));
        }
    }));
    let dir = Dir::open(base).expect("the base");
    (DirStore::with(dir, Arc::new(MemQuota::new()), options).expect("a store"), told)
}

/// A provisioner with this store, whose claim is made and goes again.
async fn live_and_die(api: &FakeApi, store: Arc<DirStore>) {
    let deps = Deps {
        client: api.client(),
        store: Arc::clone(&store) as _,
        meter: Arc::new(()),
        guard: None,
        registered: None,
        hook: None,
    };
    let (provisioner, token) =
        (Provisioner::new(Config::new(identity(NODE)), deps), CancellationToken::new());
    let run = tokio::spawn({
        let token = token.clone();
        async move { provisioner.run_until(token, || {}).await }
    });
    api.create(Kind::Claim, claim(31, json!({})));
    bound(api, "claim-31").await;
    api.delete(Kind::Claim, "claim-31");
    no_volumes(api).await;
    store.erased().await;
    token.cancel();
    run.await.expect("no panic").expect_err("it was cancelled");
}

#[tokio::test]
async fn a_deletion_is_told_before_the_volume_is_moved_and_before_it_is_erased() {
    Log::listen();
    let base = tempfile::tempdir().expect("a directory");
    let lines = &[(Step::Dig, "deleting volume"), (Step::Erase, "erasing")];
    let (store, told) = store(base.path(), &id(31), lines);
    live_and_die(&api(), Arc::new(store)).await;
    assert_eq!(*told.lock().expect("nobody panics with it"), [true, true]);
}

#[tokio::test]
async fn what_a_new_store_removes_is_told() {
    Log::listen();
    let base = tempfile::tempdir().expect("a directory");
    let (grave, born) = (format!(".trash/{}.0.0/volume/deep", id(32)), format!(".new/{}", id(33)));
    for path in [&grave, &born] {
        fs::create_dir_all(base.path().join(path)).expect("a directory");
    }
    let (store, told) = store(base.path(), &id(32), &[(Step::Erase, "erasing")]);
    store.erased().await;
    assert_eq!(*told.lock().expect("nobody panics with it"), [true]);
    assert!(Log::has("never whole", &id(33), &["handle", "claim_uid"]));
}
