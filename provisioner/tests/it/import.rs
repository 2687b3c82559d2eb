//! A directory becomes the volume of a claim, also if a process is killed or a call fails.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::testing::objects::{
    DRIVER, NODE, sample_claim, sample_class, sample_identity, sample_node, sample_uid, sample_volume,
};
use nodekeel_provisioner::testing::{FakeApi, ObjectKind, RequestFault, RequestVerb};
use nodekeel_provisioner::{
    Deps, DirStore, DirStoreOptions, ImportDeps, ImportError, ImportMode, ImportOutcome, ImportRequest,
    SELECTED_NODE, STORAGE_PROVISIONER, SourceError, StepHook, StepMoment, VolumeId, VolumeImporter,
    VolumeStep, VolumeStore as _, import_directory,
};
use serde_json::{Value, json};

use crate::fixture::{FileQuota, names, open_recorded, recorded_base};
use crate::kill_sample::{KillOrder, kill_at, run_child};
use crate::service::dir_node::deps_of;
use crate::service::harness::{RunningProvisioner, wait_until};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(50 << 20)), inodes: Some(Inodes(25600)) };
const MODES: [ImportMode; 2] = [ImportMode::Copy, ImportMode::Move];

fn id() -> VolumeId {
    VolumeId::from_uid(&sample_uid(1)).expect("a UUID")
}

/// A store that stays open, and a directory with data next to it.
struct ImportSite {
    base: tempfile::TempDir,
    store: Arc<DirStore>,
}

impl ImportSite {
    async fn new() -> Self {
        let base = recorded_base();
        let store = open_recorded(base.path(), DirStoreOptions::default()).await;
        let site = Self { base, store: Arc::new(store) };
        write_data(&site.source());
        site
    }

    fn source(&self) -> PathBuf {
        self.base.path().join("incoming")
    }

    fn volume(&self) -> PathBuf {
        self.base.path().join("volumes").join(id().as_str())
    }

    /// Names in the directory of imports; none before the first one.
    fn imports(&self) -> Vec<String> {
        let path = self.base.path().join(".import");
        if path.exists() { names(&path) } else { Vec::new() }
    }
}

fn open_importer(base: &Path, hook: Option<Arc<dyn StepHook>>) -> Result<VolumeImporter, SourceError> {
    let quota = Arc::new(FileQuota(base.join("records")));
    VolumeImporter::open(Dir::open(base).expect("the base"), quota, hook)
}

fn import(base: &Path, source: &Path, mode: ImportMode) -> Result<ImportOutcome, SourceError> {
    open_importer(base, None)?.import(&id(), LIMITS, source, mode)
}

fn write_data(at: &Path) {
    fs::create_dir_all(at.join("a/b")).expect("a directory");
    fs::write(at.join("a/b/file"), "data").expect("a file");
    fs::hard_link(at.join("a/b/file"), at.join("again")).expect("a second name");
    symlink("a/b/file", at.join("link")).expect("a link");
    let secret = at.join("secret");
    fs::write(&secret, vec![7; 100_000]).expect("a file");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o640)).expect("chmod");
    fs::set_permissions(at, fs::Permissions::from_mode(0o751)).expect("chmod");
}

fn assert_data(at: &Path, context: &str) {
    let mode = |path: PathBuf| fs::symlink_metadata(path).expect("it exists").permissions().mode() & 0o777;
    assert_eq!(fs::read_to_string(at.join("a/b/file")).expect("a file"), "data", "{context}");
    assert_eq!(fs::read_to_string(at.join("link")).expect("a link"), "data", "{context}");
    assert_eq!(fs::read(at.join("secret")).expect("a file").len(), 100_000, "{context}");
    assert_eq!((mode(at.join("secret")), mode(at.to_owned())), (0o640, 0o751), "{context}");
    let inode = |name: &str| fs::metadata(at.join(name)).expect("it exists").ino();
    assert_eq!(inode("again"), inode("a/b/file"), "{context}: two names of one file");
}

#[tokio::test]
async fn a_directory_becomes_a_volume_beside_an_open_store() {
    for mode in MODES {
        let site = ImportSite::new().await;
        let outcome = import(site.base.path(), &site.source(), mode).expect("imported");
        assert!(matches!(outcome, ImportOutcome::Imported { .. }), "{outcome:?}");
        assert_data(&site.volume(), "the volume");
        assert_eq!(site.source().exists(), mode == ImportMode::Copy);
        assert_eq!(site.store.usage(&id()).await.expect("a volume of the store").limits, LIMITS);
        site.store.list().await.expect("a list");
        let promised = site.store.capacity().await.expect("a capacity").map(|capacity| capacity.promised);
        assert_eq!(promised, LIMITS.bytes, "the open store counts it");
        let again = import(site.base.path(), &site.source(), mode).expect("the same call");
        assert_eq!(again, ImportOutcome::AlreadyDone);
        open_importer(site.base.path(), None).expect("an importer").finish(&id()).expect("finished");
        assert_eq!(site.imports(), Vec::<String>::new());
        site.store.remove(&id()).await.expect("removed like any volume");
        site.store.wait_until_erased().await;
        assert_eq!(names(&site.base.path().join("records")), Vec::<String>::new(), "no project leaks");
    }
}

/// The process that is killed.
#[test]
fn child() {
    let Some(order) = KillOrder::of_this_process() else { return };
    let mode = if order.life == "Move" { ImportMode::Move } else { ImportMode::Copy };
    let importer = open_importer(&order.base, Some(kill_at(order.moment))).expect("an importer");
    importer.import(&id(), LIMITS, &order.base.join("incoming"), mode).expect("imported");
}

/// Runs an import in a process that is killed at a moment.
fn kill_import(site: &ImportSite, moment: &str, mode: ImportMode) -> ExitStatus {
    run_child("import", site.base.path(), moment, &format!("{mode:?}"))
}

#[tokio::test]
async fn an_import_killed_at_any_step_resumes_and_loses_and_doubles_nothing() {
    let steps: [&[VolumeStep]; 2] = [
        &[
            VolumeStep::CreateDirectory,
            VolumeStep::SetLimits,
            VolumeStep::CopyTree,
            VolumeStep::RenameIntoPlace,
        ],
        &[VolumeStep::MoveToImport, VolumeStep::LimitTree, VolumeStep::RenameIntoPlace],
    ];
    for (mode, steps) in MODES.into_iter().zip(steps) {
        let moments = steps.iter().flat_map(|step| {
            [StepMoment::Before, StepMoment::After].map(|moment| format!("{moment:?} {step:?}"))
        });
        for point in moments {
            let site = ImportSite::new().await;
            let context = format!("{mode:?}, {point}");
            let status = kill_import(&site, &point, mode);
            assert_eq!(status.signal(), Some(9), "{context}: the step happens");
            import(site.base.path(), &site.source(), mode)
                .unwrap_or_else(|error| panic!("{context}: {error}"));
            assert_data(&site.volume(), &context);
            assert_eq!(site.source().exists(), mode == ImportMode::Copy, "{context}");
            assert_eq!(site.imports(), [format!("{}.source", id())], "{context}: nothing but the record");
            assert_eq!(names(&site.base.path().join("records")).len(), 1, "{context}: no project leaks");
            assert_eq!(site.store.usage(&id()).await.expect("usage").limits, LIMITS, "{context}");
        }
    }
}

#[tokio::test]
async fn a_volume_that_a_pod_caused_meanwhile_is_not_replaced() {
    for mode in MODES {
        let site = ImportSite::new().await;
        site.store.create(&id(), LIMITS).await.expect("the provisioner's");
        let error = import(site.base.path(), &site.source(), mode).expect_err("the claim has a volume");
        assert!(matches!(error, SourceError::VolumeExists { .. }), "{error}");
        assert_data(&site.source(), "unchanged");
        assert_eq!(names(&site.volume()), Vec::<String>::new());
        // Between the steps: after the directory was moved, or a copy begun.
        let site = ImportSite::new().await;
        let step = if mode == ImportMode::Move { "After MoveToImport" } else { "After SetLimits" };
        kill_import(&site, step, mode);
        site.store.create(&id(), LIMITS).await.expect("the provisioner's");
        let error = import(site.base.path(), &site.source(), mode).expect_err("the claim has a volume");
        let SourceError::VolumeExists { path, .. } = error else { panic!("{error}") };
        assert_data(&path, "where the error says");
        assert_eq!(names(&site.volume()), Vec::<String>::new(), "not mixed with the volume");
        if mode == ImportMode::Move {
            // It can be imported for another claim.
            let other = VolumeId::from_uid(&sample_uid(2)).expect("a UUID");
            let importer = open_importer(site.base.path(), None).expect("an importer");
            importer.import(&other, LIMITS, &path, mode).expect("imported");
            assert_data(&site.base.path().join("volumes").join(other.as_str()), "the other volume");
        }
    }
}

#[tokio::test]
async fn what_is_not_a_directory_to_import_is_rejected_and_unchanged() {
    let site = ImportSite::new().await;
    let base = site.base.path();
    let reject = |source: &Path, mode: ImportMode| {
        let error = import(base, source, mode).expect_err("rejected");
        assert!(names(&base.join(".import")).is_empty(), "{error}: no record");
        error
    };
    for mode in MODES {
        let missing = reject(&base.join("nowhere"), mode);
        assert!(matches!(missing, SourceError::Missing { .. }), "{missing}");
        let file = reject(&site.source().join("secret"), mode);
        assert!(matches!(file, SourceError::NotADirectory { .. }), "{file}");
        symlink(site.source(), base.join("alias")).expect("a link");
        let link = reject(&base.join("alias"), mode);
        assert!(matches!(link, SourceError::NotADirectory { .. }), "{link}");
        fs::remove_file(base.join("alias")).expect("remove");
        fs::create_dir_all(base.join("snapshots")).expect("as with the first snapshot");
        for part in [base.to_owned(), base.join("volumes"), base.join("snapshots"), base.join(".trash")] {
            let part = reject(&part, mode);
            assert!(matches!(part, SourceError::PartOfStore { .. }), "{part}");
        }
        let importer = open_importer(base, None).expect("an importer");
        let small = QuotaLimits { bytes: Some(Bytes(50_000)), inodes: None };
        let error = importer.import(&id(), small, &site.source(), mode).expect_err("it is larger");
        assert!(matches!(error, SourceError::TooLarge { .. }), "{error}");
        let few = QuotaLimits { bytes: None, inodes: Some(Inodes(3)) };
        let error = importer.import(&id(), few, &site.source(), mode).expect_err("it has more files");
        assert!(error.to_string().contains("3 inodes"), "{error}");
        let busy = open_importer(base, None).expect_err("another import");
        assert!(matches!(busy, SourceError::Busy { .. }), "{busy}");
    }
    assert_data(&site.source(), "unchanged");
    let other = reject(Path::new("/proc/self/fdinfo"), ImportMode::Move);
    assert!(matches!(other, SourceError::OtherMount { .. }), "{other}");
}

/// Root may exceed limits on ext4, so that the kernel doesn't end a copy that is too large.
#[tokio::test]
async fn a_directory_that_grows_beyond_the_limits_while_it_is_copied_is_refused() {
    let site = ImportSite::new().await;
    let more = site.source().join("more");
    let hook = move |step: VolumeStep, moment: StepMoment| {
        if (step, moment) == (VolumeStep::CopyTree, StepMoment::Before) {
            fs::write(&more, vec![7; 1 << 20]).expect("a file");
        }
    };
    let base = Dir::open(site.base.path()).expect("the base");
    let importer = VolumeImporter::open(base, Arc::new(MemQuota::new()), Some(Arc::new(hook)));
    let limits = QuotaLimits { bytes: Some(Bytes(512 << 10)), inodes: Some(Inodes(1024)) };
    let import = importer.expect("an importer").import(&id(), limits, &site.source(), ImportMode::Copy);
    let error = import.expect_err("it has grown");
    assert!(matches!(error, SourceError::TooLarge { .. }), "{error}");
    assert!(!site.volume().exists() && site.imports().is_empty(), "nothing is left");
}

#[tokio::test]
async fn an_interrupted_import_of_another_directory_is_named() {
    let site = ImportSite::new().await;
    kill_import(&site, "Before MoveToImport", ImportMode::Move);
    open_importer(site.base.path(), None).expect("an importer");
    assert_eq!(site.imports(), Vec::<String>::new(), "nothing was moved: there is nothing to resume");
    kill_import(&site, "After MoveToImport", ImportMode::Move);
    let other = site.base.path().join("other");
    write_data(&other);
    let error = import(site.base.path(), &other, ImportMode::Move).expect_err("not this one");
    assert!(matches!(&error, SourceError::OtherImport { path } if *path == site.source()), "{error}");
    fs::rename(&other, site.source()).expect("rename");
    let error = import(site.base.path(), &site.source(), ImportMode::Move).expect_err("not this one");
    assert!(matches!(&error, SourceError::Reappeared { .. }), "{error}");
    fs::rename(site.source(), &other).expect("rename");
    import(site.base.path(), &site.source(), ImportMode::Move).expect("resumed");
    assert_data(&site.volume(), "the volume");
}

/// An API server with a class and a pending claim without a pod.
fn api_with_claim(patch: Value) -> FakeApi {
    let api = FakeApi::default();
    api.create_object(ObjectKind::Class, sample_class(json!({})));
    let mut claim = serde_json::to_value(sample_claim(1, patch)).expect("JSON");
    claim["metadata"]["annotations"] = json!({});
    api.create_object(ObjectKind::Claim, claim);
    api
}

async fn run_import(
    api: &FakeApi,
    site: &ImportSite,
    mode: ImportMode,
) -> Result<(VolumeId, ImportOutcome), ImportError> {
    run_import_with(api, site, mode, None).await
}

async fn run_import_with(
    api: &FakeApi,
    site: &ImportSite,
    mode: ImportMode,
    hook: Option<Arc<dyn StepHook>>,
) -> Result<(VolumeId, ImportOutcome), ImportError> {
    let importer = Arc::new(open_importer(site.base.path(), None).expect("an importer"));
    let deps = ImportDeps { client: api.client(), importer, hook };
    let request =
        ImportRequest { namespace: "default".into(), claim: "claim-1".into(), source: site.source(), mode };
    import_directory(&sample_identity(NODE), &deps, &request).await
}

#[tokio::test]
async fn an_imported_volume_is_retained_and_bound_to_its_claim_whatever_answer_is_lost() {
    let faults = [
        None,
        Some((RequestVerb::Create, ObjectKind::Volume, RequestFault::ResponseLost)),
        Some((RequestVerb::Create, ObjectKind::Volume, RequestFault::Unreachable)),
        Some((RequestVerb::Get, ObjectKind::Claim, RequestFault::Status(500))),
        Some((RequestVerb::List, ObjectKind::Class, RequestFault::Status(503))),
    ];
    for (mode, fault) in MODES.into_iter().flat_map(|mode| faults.map(|fault| (mode, fault))) {
        let (site, api) = (ImportSite::new().await, api_with_claim(json!({})));
        if let Some((verb, kind, fault)) = fault {
            api.fail_next(verb, kind, fault);
            let error = run_import(&api, &site, mode).await.expect_err("the call fails");
            assert!(error.to_string().contains("repeat the command"), "{error}");
        }
        let (volume, _) = run_import(&api, &site, mode).await.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(volume, id());
        assert_data(&site.volume(), "the volume");
        assert_eq!(site.imports(), Vec::<String>::new(), "no record is left");
        let volumes = api.list_objects(ObjectKind::Volume);
        assert_eq!(volumes.len(), 1, "{fault:?}");
        let store = site.store.identity().await.expect("an identity");
        let spec = &volumes[0]["spec"];
        assert_eq!(spec["persistentVolumeReclaimPolicy"], "Retain");
        assert_eq!(spec["claimRef"]["uid"], sample_uid(1));
        assert_eq!(spec["csi"]["volumeAttributes"]["store"], store.id().expect("an identity").as_str());
        let claim = api.get_object(ObjectKind::Claim, "claim-1").expect("the claim");
        assert_eq!(claim["spec"]["volumeName"], id().as_str());
        let again = run_import(&api, &site, mode).await.expect("nothing is left to do");
        assert_eq!(again, (id(), ImportOutcome::AlreadyDone));
    }
}

/// The only PersistentVolume is the one of the import.
fn assert_retained(api: &FakeApi, site: &ImportSite) {
    let volumes = api.list_objects(ObjectKind::Volume);
    assert_eq!(volumes.len(), 1, "{volumes:?}");
    assert_eq!(volumes[0]["spec"]["persistentVolumeReclaimPolicy"], "Retain", "{volumes:?}");
    let annotation = &volumes[0]["metadata"]["annotations"][sample_identity(NODE).driver.import_annotation()];
    assert_eq!(annotation.as_str(), site.source().to_str(), "{volumes:?}");
    assert_data(&site.volume(), "the volume");
}

#[tokio::test]
async fn an_imported_directory_gets_no_persistent_volume_but_that_of_the_import() {
    for mode in MODES {
        let (site, api) = (ImportSite::new().await, api_with_claim(json!({})));
        api.create_object(ObjectKind::Node, sample_node(NODE, json!({})));
        api.fail_next(RequestVerb::Create, ObjectKind::Volume, RequestFault::Unreachable);
        run_import(&api, &site, mode).await.expect_err("the call fails");
        // A pod uses the claim before the import is repeated.
        let annotations = json!({ STORAGE_PROVISIONER: DRIVER, SELECTED_NODE: NODE });
        api.patch_object(ObjectKind::Claim, "claim-1", json!({ "metadata": { "annotations": annotations } }));
        let running = RunningProvisioner::start(Deps { snapshots: None, ..deps_of(&api, &site.store) });
        wait_until(&api, |api| {
            !api.event_notes("claim-1").is_empty() || !api.list_objects(ObjectKind::Volume).is_empty()
        })
        .await;
        let notes = api.event_notes("claim-1");
        assert!(notes.iter().any(|note| note.contains("repeat the import")), "{mode:?}: {notes:?}");
        run_import(&api, &site, mode).await.unwrap_or_else(|error| panic!("{mode:?}: {error}"));
        assert_retained(&api, &site);
        running.stop().await;
    }
}

#[tokio::test]
async fn a_persistent_volume_that_was_created_meanwhile_is_retained() {
    let (site, api) = (ImportSite::new().await, api_with_claim(json!({})));
    let other = api.clone();
    let hook = move |step: VolumeStep, moment: StepMoment| {
        if (step, moment) == (VolumeStep::CreatePersistentVolume, StepMoment::Before) {
            other.create_object(ObjectKind::Volume, sample_volume(1, json!({})));
        }
    };
    run_import_with(&api, &site, ImportMode::Copy, Some(Arc::new(hook))).await.expect("imported");
    assert_retained(&api, &site);
}

#[tokio::test]
async fn a_claim_that_cannot_get_the_volume_leaves_the_directory_unchanged() {
    let reject = async |api: FakeApi| {
        let site = ImportSite::new().await;
        let error = run_import(&api, &site, ImportMode::Move).await.expect_err("rejected");
        assert_data(&site.source(), "unchanged");
        assert!(site.imports().is_empty() && names(&site.base.path().join("volumes")).is_empty(), "{error}");
        error
    };
    let missing = reject(FakeApi::default()).await;
    assert!(matches!(missing, ImportError::NoClaim { .. }), "{missing}");
    let bound = reject(api_with_claim(json!({ "spec": { "volumeName": "another" } }))).await;
    assert!(matches!(bound, ImportError::Rejected { .. }), "{bound}");
    let unknown = reject(api_with_claim(json!({ "spec": { "storageClassName": "unknown" } }))).await;
    assert!(matches!(unknown, ImportError::Rejected { .. }), "{unknown}");
    let large =
        reject(api_with_claim(json!({ "spec": { "resources": { "requests": { "storage": "1Ki" } } } })));
    let large = large.await;
    assert!(matches!(large, ImportError::Source(SourceError::TooLarge { .. })), "{large}");
}
