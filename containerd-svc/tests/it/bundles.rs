//! A directory with bundles, and what comes of it.

use std::fs;
use std::path::PathBuf;

use nodekeel_containerd_svc::testing::MemStore;
use nodekeel_containerd_svc::{ImageStore as _, ImportError, Namespace, Outcome, Preseed, Report};
use tempfile::TempDir;

/// A directory with bundles, and a store.
pub(crate) struct Bundles {
    pub(crate) directory: TempDir,
    pub(crate) store: MemStore,
    pub(crate) preseed: Preseed,
}

pub(crate) fn k8s() -> Namespace {
    "k8s.io".parse().unwrap()
}

impl Bundles {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let preseed = Preseed::new(directory.path());
        Self { directory, store: MemStore::new(), preseed }
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join("k8s.io").join(file)
    }

    pub(crate) fn put(&self, file: &str, bytes: &[u8]) -> &Self {
        fs::create_dir_all(self.directory.path().join("k8s.io")).unwrap();
        fs::write(self.path(file), bytes).unwrap();
        self
    }

    pub(crate) async fn run(&self) -> Report {
        self.preseed.run(&self.store).await.unwrap()
    }

    /// The names of the images, sorted.
    pub(crate) async fn names(&self) -> Vec<String> {
        self.store.images(&k8s()).await.unwrap().into_iter().map(|image| image.name).collect()
    }

    /// Runs with one bundle that is bad, and gives what is said of it. Nothing of it is listed or kept.
    pub(crate) async fn refused(bytes: &[u8]) -> ImportError {
        let bundles = Self::new();
        let mut report = bundles.put("bundle.tar", bytes).run().await;
        assert_eq!(bundles.names().await, [""; 0], "nothing of it is listed");
        assert!(bundles.store.content(&k8s()).is_empty(), "nothing of it is kept");
        assert_eq!(report.outcomes.len(), 1);
        match report.outcomes.pop() {
            Some(Outcome::Failed(error)) => {
                let text = error.to_string();
                assert!(text.contains("k8s.io/bundle.tar"), "{text} names the file");
                error
            }
            other => panic!("it was taken: {other:?}"),
        }
    }
}

/// How many were imported, left as they were, and failed.
pub(crate) fn counts(report: &Report) -> [usize; 3] {
    let count = |is: fn(&Outcome) -> bool| report.outcomes.iter().filter(|outcome| is(outcome)).count();
    [
        count(|outcome| matches!(outcome, Outcome::Imported { .. })),
        count(|outcome| matches!(outcome, Outcome::Unchanged { .. })),
        count(|outcome| matches!(outcome, Outcome::Failed(_))),
    ]
}
