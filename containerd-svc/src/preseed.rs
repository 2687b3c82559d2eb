//! Preseeds images: imports a directory of bundles.

mod pass;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::spawn_blocking;

use crate::error::ImportError;
use crate::import::{MeasuredFiles, error_chain};
use crate::plan::{Bundle, ImageUpdate};
use crate::scan::{self, ScanResult, SkippedEntry};
use crate::store::{ImageStore, ImageStoreError};
use crate::{ImportLimits, Platform};

use pass::PreseedPass;

/// A directory of bundles: `NAMESPACE/NAME.tar`, also `.tar.gz`, `.tgz`, `.tar.zst` and `.tzst`.
///
/// A bundle is a tar of an OCI layout or a docker-archive, with one or more images. Other files are reported
/// and skipped. If two bundles give one name to different images, it belongs to the first bundle in the order
/// of names. An image that no bundle brings any more loses its marks and its pin, and stays listed; where the
/// whole directory is missing or empty, or the directory of a namespace is missing, nothing changes: its disk may not be
/// mounted. An empty directory of a namespace has no bundles. A copy
/// of an image with all of its labels, as `ctr images tag` makes it, is none of its bundle's images.
#[derive(Debug, Clone)]
pub struct Preseed {
    bundle_dir: PathBuf,
    target_platform: Platform,
    import_limits: ImportLimits,
    unpacks_layers: bool,
    pins_images: bool,
    memory: Arc<Mutex<PassMemory>>,
}

/// The results of earlier passes, which the clones of a [`Preseed`] share.
#[derive(Debug, Default)]
struct PassMemory {
    /// Invalid bundles, which are skipped until they change.
    invalid: BTreeMap<Bundle, BundleFault>,
    /// The sizes of the files of bundles that did not fit, which need not be measured again.
    measured: BTreeMap<Bundle, Arc<MeasuredFiles>>,
    /// Unchanged bundles that the log has already.
    logged: BTreeSet<Bundle>,
    /// The counts of the last complete pass over a directory with bundles.
    counts: Option<BundleCounts>,
}

/// The number of bundles of a directory that are imported, and of those that are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BundleCounts {
    /// Imported now or before.
    pub imported: usize,
    /// Not imported: invalid, unreadable, or too large for the free space.
    pub failed: usize,
}

/// The reason why a bundle cannot be imported.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BundleFault {
    /// True if the bundle lacks content that another bundle may bring; otherwise it is invalid by itself.
    lacks_content: bool,
    reason: String,
}

/// A failure that affects all bundles.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreseedError {
    /// The directory is missing, or can't be read: mount its disk, create it, or correct its mode. Images stay as
    /// they are.
    #[error(
        "can't list the image bundles in the preseed directory: mount its disk, create it, or correct its mode"
    )]
    ListBundles(#[source] nodekeel_localstorage::Error),
    /// Listing the images of the store failed; a retry can help.
    #[error("can't list the images in containerd's store")]
    ListImages(#[source] ImageStoreError),
    /// Changing the marks, the pin or the target of an image failed; a retry can help.
    #[error("can't update the labels and targets of the images in containerd's store")]
    UpdateImages(#[source] ImageStoreError),
}

/// The outcome for one bundle.
#[derive(Debug)]
#[non_exhaustive]
pub enum BundleOutcome {
    /// The bundle was imported, and these images are listed.
    Imported {
        /// The bundle.
        bundle: Bundle,
        /// Names of its images, without those that belong to an earlier bundle.
        images: Vec<String>,
    },
    /// The bundle is unchanged, and all of its content exists.
    Unchanged {
        /// The bundle.
        bundle: Bundle,
        /// Names of its images, without those that belong to an earlier bundle.
        images: Vec<String>,
    },
    /// An earlier pass found the bundle invalid, and it has not changed.
    KnownInvalid {
        /// The bundle.
        bundle: Bundle,
        /// The defect.
        reason: String,
    },
    /// The bundle was not imported; this does not affect other bundles.
    Failed(ImportError),
}

/// The result of one pass over the directory.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct PreseedReport {
    /// An outcome for each bundle: unreadable ones first, the others in the order of namespaces and names.
    pub outcomes: Vec<BundleOutcome>,
    /// Skipped entries that are not bundles.
    pub skipped: Vec<SkippedEntry>,
    /// The listed images that were changed, because of what bundles no longer bring.
    pub changes: Vec<ImageUpdate>,
    /// True if the directory is empty, like the mount point of a disk that is not mounted: images stay as they
    /// are. A directory of no bundles has an empty directory of a namespace.
    pub is_empty: bool,
}

impl PreseedReport {
    /// The number of failed bundles that a later pass may import.
    pub fn retryable_count(&self) -> usize {
        let failed = |outcome: &&BundleOutcome| matches!(outcome, BundleOutcome::Failed(error) if error.is_retryable());
        self.outcomes.iter().filter(failed).count()
    }

    /// The number of imported bundles, and of those that are not.
    pub fn bundle_counts(&self) -> BundleCounts {
        let failed = self.failures().len();
        BundleCounts { imported: self.outcomes.len() - failed, failed }
    }

    /// The reasons why bundles are not imported: a line for each, with its path.
    pub fn failures(&self) -> Vec<String> {
        let failure = |outcome: &BundleOutcome| match outcome {
            BundleOutcome::Failed(error) => Some(error_chain(error)),
            BundleOutcome::KnownInvalid { reason, .. } => Some(reason.clone()),
            BundleOutcome::Imported { .. } | BundleOutcome::Unchanged { .. } => None,
        };
        self.outcomes.iter().filter_map(failure).collect()
    }
}

impl Preseed {
    /// Preseeds the bundles below a directory: for this machine's platform, not unpacked, and pinned.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            bundle_dir: directory.into(),
            target_platform: Platform::of_build_target(),
            import_limits: ImportLimits::default(),
            unpacks_layers: false,
            pins_images: true,
            memory: Arc::default(),
        }
    }

    /// Sets the platform. Default: [`Platform::of_build_target`].
    #[must_use]
    pub fn with_platform(mut self, platform: Platform) -> Self {
        self.target_platform = platform;
        self
    }

    /// Sets the limits of a bundle. Default: those of [`ImportLimits`].
    #[must_use]
    pub fn with_limits(mut self, limits: ImportLimits) -> Self {
        self.import_limits = limits;
        self
    }

    /// Sets whether layers are unpacked during the import, so that the first container starts without that delay.
    /// Default: no. If it is enabled later, packed bundles are imported again; unpacked layers stay unpacked.
    #[must_use]
    pub fn with_unpacking(mut self, unpack: bool) -> Self {
        self.unpacks_layers = unpack;
        self
    }

    /// Sets whether images are pinned: the kubelet then keeps them even if the disk is full. Default: yes.
    ///
    /// *Source:* the label `io.cri-containerd.pinned`, containerd 1.7 and later; older releases ignore it.
    #[must_use]
    pub fn with_pinning(mut self, pin: bool) -> Self {
        self.pins_images = pin;
        self
    }

    /// The directory of bundles.
    pub fn bundle_dir(&self) -> &Path {
        &self.bundle_dir
    }

    /// The number of bundles that the last complete pass over a directory with bundles has left imported, and not;
    /// `None` before. Clones of this value share it.
    pub fn bundle_counts(&self) -> Option<BundleCounts> {
        self.lock_memory().counts
    }

    /// Processes all bundles, one at a time, and logs a line for each. An invalid bundle does not affect the
    /// others. What bundles no longer bring loses its marks and its pin at the end.
    ///
    /// # Errors
    /// [`PreseedError`] if the directory or the store fails for all of them. Errors of single bundles are in the
    /// report.
    ///
    /// # Cancel safety
    /// A bundle in progress when this is dropped is not listed, and the next pass reads it again.
    pub async fn run(&self, store: &dyn ImageStore) -> Result<PreseedReport, PreseedError> {
        let Some(ScanResult { wanted, skipped, failed }) = self.scan_bundles().await? else {
            tracing::warn!("{} is empty: images stay as they are", self.bundle_dir.display());
            return Ok(PreseedReport { is_empty: true, ..PreseedReport::default() });
        };
        for SkippedEntry { path, reason } in &skipped {
            tracing::warn!("skipped {}, which is not a bundle: {reason}", path.display());
        }
        let mut outcomes: Vec<_> = failed.into_iter().map(BundleOutcome::Failed).collect();
        outcomes.iter().for_each(|outcome| self.log_outcome(outcome));
        let (processed, changes) = PreseedPass::new(self, store, wanted).run().await?;
        outcomes.extend(processed);
        let report = PreseedReport { outcomes, skipped, changes, is_empty: false };
        // Only after a complete pass, so that the counts are always those of all bundles.
        self.lock_memory().counts = Some(report.bundle_counts());
        Ok(report)
    }

    async fn scan_bundles(&self) -> Result<Option<ScanResult>, PreseedError> {
        let directory = self.bundle_dir.clone();
        // The scan reads parts of every bundle, and all headers of uncompressed ones.
        let scanned = spawn_blocking(move || scan::scan_bundles(&directory)).await;
        scanned
            .unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
            .map_err(PreseedError::ListBundles)
    }

    fn lock_memory(&self) -> MutexGuard<'_, PassMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_fault(&self, bundle: &Bundle) -> Option<BundleFault> {
        self.lock_memory().invalid.get(bundle).cloned()
    }

    /// Logs what happened to a bundle; that it is unchanged only once, since passes may be repeated.
    fn log_outcome(&self, outcome: &BundleOutcome) {
        match outcome {
            BundleOutcome::Imported { bundle, images } => {
                tracing::info!("preseeded {} into {}: {}", bundle.file, bundle.namespace, images.join(","));
            }
            BundleOutcome::Unchanged { bundle, images } => {
                if self.lock_memory().logged.insert(bundle.clone()) {
                    tracing::info!(
                        "{} in {} is unchanged: {}",
                        bundle.file,
                        bundle.namespace,
                        images.join(",")
                    );
                }
            }
            BundleOutcome::KnownInvalid { bundle, .. } => tracing::warn!(
                "{} in {} is still invalid and was not read again",
                bundle.file,
                bundle.namespace
            ),
            BundleOutcome::Failed(error) => tracing::error!("{}", error_chain(error)),
        }
    }
}
