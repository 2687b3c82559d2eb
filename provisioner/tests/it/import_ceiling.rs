//! An import that would promise more than the node has.

use std::error::Error as _;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{
    CapacityPolicy, DirStoreOptions, ImportMode, SourceError, VolumeImporter, VolumeStore as _,
};

use crate::fixture::{FileQuota, id, names, open_recorded, recorded_base};

const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(50 << 20)), inodes: Some(Inodes(1024)) };

/// Promises 64 MiB.
fn ceiling(base: &Path) -> CapacityPolicy {
    let stat = rustix::fs::statvfs(base).expect("a file system");
    let reserve = (stat.f_blocks * stat.f_frsize).saturating_sub(64 << 20);
    CapacityPolicy::try_new(1.0, Bytes(reserve)).expect("a ratio")
}

#[tokio::test]
async fn an_import_beyond_the_ceiling_is_refused_with_the_figure_and_changes_nothing() {
    let scratch = recorded_base();
    let base = scratch.path();
    let quota = Arc::new(FileQuota(base.join("records")));
    let mut options = DirStoreOptions::default();
    options.capacity = ceiling(base);
    let store = open_recorded(base, options).await;
    store.create(&id(1), LIMITS).await.expect("it fits");
    let source = base.join("incoming");
    fs::create_dir(&source).expect("a directory");
    fs::write(source.join("file"), "data").expect("a file");

    // The store stays open: as that of provisionerd.
    let importer = || VolumeImporter::open(Dir::open(base).expect("the base"), quota.clone(), None);
    for mode in [ImportMode::Copy, ImportMode::Move] {
        let importer = importer().expect("an importer").with_ceiling(ceiling(base));
        let error = importer.import(&id(2), LIMITS, &source, mode).expect_err("100 MiB are more than 64");
        let text = format!("{error}: {}", error.source().expect("the figure"));
        assert!(
            matches!(error, SourceError::OverCeiling { .. }) && text.contains("--over-ceiling"),
            "{text}"
        );
        assert!(text.contains("50Mi are promised and 14Mi are left"), "{text}");
        assert_eq!(fs::read_to_string(source.join("file")).expect("it is there"), "data");
        assert_eq!(names(&base.join(".import")), Vec::<String>::new());
        assert_eq!(store.list().await.expect("a list"), [id(1)]);
    }
    let small = QuotaLimits { bytes: Some(Bytes(10 << 20)), ..LIMITS };
    let fitting = importer().expect("an importer").with_ceiling(ceiling(base));
    fitting.import(&id(3), small, &source, ImportMode::Copy).expect("it fits");
    drop(fitting);
    let asked = importer().expect("an importer");
    asked.import(&id(2), LIMITS, &source, ImportMode::Move).expect("without a ceiling");
    assert_eq!(store.list().await.expect("a list"), [id(1), id(2), id(3)]);
}
