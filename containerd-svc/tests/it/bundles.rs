//! A directory of bundles, imported into a store in memory.

use std::fs;
use std::path::PathBuf;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, MemStore};
use nodekeel_containerd_svc::{
    BundleOutcome, Image, ImageStore as _, ImportError, Namespace, Preseed, PreseedReport,
};
use tempfile::TempDir;

/// A directory of bundles, a preseed and a store.
pub(crate) struct BundleFixture {
    pub(crate) directory: TempDir,
    pub(crate) store: MemStore,
    pub(crate) preseed: Preseed,
}

pub(crate) fn k8s_namespace() -> Namespace {
    "k8s.io".parse().unwrap()
}

/// An OCI layout with one image.
pub(crate) fn archive_of(name: &str, layer: &[u8]) -> ArchiveBuilder {
    ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast).with_image(&[name], layer)
}

impl BundleFixture {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let preseed = Preseed::new(directory.path());
        Self { directory, store: MemStore::new(), preseed }
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join("k8s.io").join(file)
    }

    pub(crate) fn put_bundle(&self, file: &str, bytes: &[u8]) -> &Self {
        fs::create_dir_all(self.directory.path().join("k8s.io")).unwrap();
        fs::write(self.path(file), bytes).unwrap();
        self
    }

    /// Writes a bundle with one image.
    pub(crate) fn put_image(&self, file: &str, name: &str, layer: &[u8]) -> &Self {
        self.put_bundle(file, &archive_of(name, layer).to_tar())
    }

    pub(crate) async fn list_images(&self) -> Vec<Image> {
        self.store.list_images(&k8s_namespace()).await.unwrap()
    }

    pub(crate) async fn run_preseed(&self) -> PreseedReport {
        let report = self.preseed.run(&self.store).await.unwrap();
        if !report.is_empty {
            assert_eq!(self.preseed.bundle_counts(), Some(report.bundle_counts()));
        }
        report
    }

    /// The names of the images, sorted.
    pub(crate) async fn image_names(&self) -> Vec<String> {
        self.list_images().await.into_iter().map(|image| image.name).collect()
    }

    /// Imports one invalid bundle and returns the error. Nothing of it is listed or kept.
    pub(crate) async fn assert_rejected(bytes: &[u8]) -> ImportError {
        let bundles = Self::new();
        let mut report = bundles.put_bundle("bundle.tar", bytes).run_preseed().await;
        assert_eq!(bundles.image_names().await, [""; 0], "nothing of it is listed");
        assert!(bundles.store.content_digests(&k8s_namespace()).is_empty(), "nothing of it is kept");
        assert_eq!(report.outcomes.len(), 1);
        match report.outcomes.pop() {
            Some(BundleOutcome::Failed(error)) => {
                let text = error.to_string();
                assert!(text.contains("k8s.io/bundle.tar"), "{text} names the file");
                error
            }
            other => panic!("the bundle was imported: {other:?}"),
        }
    }
}

/// The numbers of imported, unchanged and failed bundles.
pub(crate) fn count_outcomes(report: &PreseedReport) -> [usize; 3] {
    let count = |is: fn(&BundleOutcome) -> bool| report.outcomes.iter().filter(|outcome| is(outcome)).count();
    [
        count(|outcome| matches!(outcome, BundleOutcome::Imported { .. })),
        count(|outcome| matches!(outcome, BundleOutcome::Unchanged { .. })),
        count(|outcome| matches!(outcome, BundleOutcome::Failed(_))),
    ]
}
