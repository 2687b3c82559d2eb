//! The import of bundles as a runnable below its containerd.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure, Runnable};
use tokio::time::{Instant, sleep, timeout};

use super::Containerd;
use crate::containerd::{ContainerdImages, daemon_version};
use crate::cri::{CRI_NAMESPACE, list_cri_images};
use crate::preseed::{BundleOutcome, Preseed, PreseedReport};
use crate::{DiskReserve, ImageStoreError, ImportError};

/// Maximum time until the tree reports the exit of a containerd that does not answer; after that, it is still
/// running.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time until the CRI lists what was imported; 1.6 lists images of other clients with a delay.
const CRI_LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Pause between two lists of the CRI.
const CRI_LIST_PAUSE: Duration = Duration::from_millis(50);

/// Bundles that a failure names with their reasons; the log has all of them.
const MAX_NAMED_FAILURES: usize = 5;

/// What the import of the bundles needs of its containerd.
#[derive(Debug, Clone)]
pub(super) struct PreseedTask {
    preseed: Preseed,
    socket: PathBuf,
    root: PathBuf,
    disk_reserve: DiskReserve,
    has_cri: bool,
}

/// Creates a runnable that imports once its containerd is ready: see [`Containerd`].
///
/// If the store failed because containerd exited, that is containerd's failure only: this runnable is
/// cancelled with it.
pub(super) fn preseed_runnable(containerd: String, task: PreseedTask) -> impl Runnable {
    move |ctx: Context| {
        let (containerd, task) = (containerd.clone(), task.clone());
        async move {
            ctx.wait_ready(&containerd).await?;
            let imported = tokio::select! {
                biased;
                cancelled = ctx.canceled() => return Err(cancelled.into()),
                imported = task.import_bundles() => imported,
            };
            let imported = match imported {
                Ok(report) => {
                    ctx.signal_ready()?;
                    describe_failures(&report).and_then(|()| task.check_not_empty(&report))
                }
                Err(failure) => Err(failure),
            };
            if let Err(failure) = imported {
                if daemon_version(&task.socket).await.is_err()
                    && let Ok(cancelled) = timeout(EXIT_TIMEOUT, ctx.canceled()).await
                {
                    return Err(cancelled.into());
                }
                return Err(failure);
            }
            ctx.signal_done()?;
            Ok(())
        }
    }
}

impl PreseedTask {
    pub(super) fn new(containerd: &Containerd, preseed: Preseed, has_cri: bool) -> Self {
        Self {
            preseed,
            socket: containerd.layout.socket_path(),
            root: containerd.layout.root_dir(),
            disk_reserve: containerd.disk_reserve,
            has_cri,
        }
    }

    /// An error that names the directory if it is empty.
    fn check_not_empty(&self, report: &PreseedReport) -> Result<(), Failure> {
        if !report.is_empty {
            return Ok(());
        }
        Err(Failure::new(format!(
            "the preseed directory {} is empty, so images stay as they are: mount its disk, or put bundles or a \
             directory named after a namespace into it",
            self.preseed.bundle_dir().display()
        )))
    }

    /// Runs one pass, and waits until the CRI lists the images; an error if the store failed.
    async fn import_bundles(&self) -> Result<PreseedReport, Failure> {
        let store = ContainerdImages::connect(&self.socket).await?;
        let store = store.with_disk(&self.root, self.disk_reserve);
        store.discard_abandoned_imports().await?;
        let report = self.preseed.run(&store).await?;
        if report.outcomes.iter().any(is_out_of_space) {
            tracing::error!("{}", describe_free_space(&self.root));
        }
        if report.outcomes.iter().any(|outcome| is_store_failure(outcome) && !is_out_of_space(outcome)) {
            describe_failures(&report)?;
        }
        if self.has_cri {
            wait_listed(&self.socket, &imported_names(&report)).await?;
        }
        Ok(report)
    }
}

fn is_store_failure(outcome: &BundleOutcome) -> bool {
    matches!(outcome, BundleOutcome::Failed(ImportError::Store { .. }))
}

fn is_out_of_space(outcome: &BundleOutcome) -> bool {
    matches!(
        outcome,
        BundleOutcome::Failed(ImportError::Store { source: ImageStoreError::NoSpace { .. }, .. })
    )
}

/// The names in the CRI's namespace that bundles bring.
fn imported_names(report: &PreseedReport) -> BTreeSet<String> {
    let names = report.outcomes.iter().filter_map(|outcome| match outcome {
        BundleOutcome::Imported { bundle, images } | BundleOutcome::Unchanged { bundle, images } => {
            (bundle.namespace.as_str() == CRI_NAMESPACE).then_some(images)
        }
        BundleOutcome::KnownInvalid { .. } | BundleOutcome::Failed(_) => None,
    });
    names.flatten().cloned().collect()
}

/// Waits until the CRI lists all of these names.
async fn wait_listed(socket: &Path, names: &BTreeSet<String>) -> Result<(), Failure> {
    let deadline = Instant::now() + CRI_LIST_TIMEOUT;
    loop {
        let listed = list_cri_images(socket).await?;
        let missing: Vec<_> = names.difference(&listed).collect();
        let Some(first) = missing.first() else { return Ok(()) };
        if Instant::now() >= deadline {
            let (missing, all) = (missing.len(), names.len());
            return Err(Failure::new(format!(
                "the CRI does not list {missing} of {all} preseeded images after {CRI_LIST_TIMEOUT:?}, among \
                 them {first}: see containerd's log for why"
            )));
        }
        sleep(CRI_LIST_PAUSE).await;
    }
}

/// An error that names the bundles that are not imported, if there are any.
fn describe_failures(report: &PreseedReport) -> Result<(), Failure> {
    let failures = report.failures();
    if failures.is_empty() {
        return Ok(());
    }
    let (failed, all) = (failures.len(), report.outcomes.len());
    let mut text = format!("{failed} of {all} bundles are not imported: ");
    text += &failures[..failed.min(MAX_NAMED_FAILURES)].join("; ");
    if failed > MAX_NAMED_FAILURES {
        text += &format!("; and {} more, which the log names", failed - MAX_NAMED_FAILURES);
    }
    Err(Failure::new(text))
}

/// Describes the free space of a file system.
fn describe_free_space(root: &Path) -> String {
    let name = root.display();
    match rustix::fs::statvfs(root) {
        Ok(space) => {
            let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
            let (free, all) = (bytes(space.f_bavail), bytes(space.f_blocks));
            format!(
                "{name} has {free} of {all} bytes free, and {} of {} inodes",
                space.f_favail, space.f_files
            )
        }
        Err(error) => format!("free space of {name} is unknown: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_is_given_in_bytes_and_inodes() {
        let text = describe_free_space(Path::new("/"));
        let numbers: Vec<u64> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(matches!(numbers[..], [free, all, inodes, of] if free <= all && inodes <= of), "{text}");
        assert!(describe_free_space(Path::new("/nowhere/at/all")).contains("is unknown"));
    }
}
