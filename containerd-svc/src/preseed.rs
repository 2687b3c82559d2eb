//! Preseeds images: imports a directory of bundles.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::task::spawn_blocking;

use crate::error::{ArchivedImageError, BundleError, ImportError};
use crate::image::{Image, Labels};
use crate::image_walk::{ImageScope, is_complete};
use crate::import::{self, ImportJob, error_chain};
use crate::plan::{Bundle, BundleAction, plan_imports};
use crate::scan::{self, ScanResult, SkippedEntry, repository_name};
use crate::store::{ImageStore, ImageStoreError};
use crate::{Digest, ImportLimits, Namespace, Platform};

/// A directory of bundles: `NAMESPACE/NAME.tar`, also `.tar.gz`, `.tgz`, `.tar.zst` and `.tzst`.
///
/// A bundle is a tar of an OCI layout or a docker-archive, with one or more images. Other files are reported
/// and skipped. If two bundles give one name to different images, the first bundle in the order of names
/// keeps it.
#[derive(Debug, Clone)]
pub struct Preseed {
    bundle_dir: PathBuf,
    target_platform: Platform,
    import_limits: ImportLimits,
    unpacks_layers: bool,
    pins_images: bool,
    /// Invalid bundles, which are skipped until they change.
    known_invalid: Arc<Mutex<BTreeMap<Bundle, BundleFault>>>,
}

/// Why a bundle cannot be imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BundleFault {
    /// It lacks content that another bundle may bring.
    MissingContent,
    /// It is invalid by itself.
    Invalid,
}

/// A failure that affects all bundles.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PreseedError {
    /// Listing the directory failed: check its mode.
    #[error("can't list the bundles")]
    ListBundles(#[source] nodekeel_localstorage::Error),
    /// Listing the images of the store failed; a retry can help.
    #[error("can't list the images in the store")]
    ListImages(#[source] ImageStoreError),
}

/// The outcome for one bundle.
#[derive(Debug)]
#[non_exhaustive]
pub enum BundleOutcome {
    /// The bundle was imported, and these images are listed.
    Imported {
        /// The bundle.
        bundle: Bundle,
        /// Names of its images.
        images: Vec<String>,
    },
    /// The bundle is unchanged, and all of its content exists.
    Unchanged {
        /// The bundle.
        bundle: Bundle,
        /// Names of its images.
        images: Vec<String>,
    },
    /// An earlier pass found the bundle invalid, and it has not changed.
    KnownInvalid {
        /// The bundle.
        bundle: Bundle,
    },
    /// The bundle was not imported; this does not affect other bundles.
    Failed(ImportError),
}

/// The result of one pass over the directory.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct PreseedReport {
    /// An outcome for each bundle: unreadable ones first, the others in their order, and last those that lack
    /// content.
    pub outcomes: Vec<BundleOutcome>,
    /// Skipped entries that are not bundles.
    pub skipped: Vec<SkippedEntry>,
}

impl PreseedReport {
    /// The number of failed bundles that a later pass may import.
    pub fn retryable_count(&self) -> usize {
        let failed = |outcome: &&BundleOutcome| matches!(outcome, BundleOutcome::Failed(error) if error.is_retryable());
        self.outcomes.iter().filter(failed).count()
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
            known_invalid: Arc::default(),
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

    /// Whether layers are unpacked during the import, so that the first container starts without that delay.
    /// Default: no. If it is enabled later, packed bundles are imported again; unpacked layers stay unpacked.
    #[must_use]
    pub fn with_unpacking(mut self, unpack: bool) -> Self {
        self.unpacks_layers = unpack;
        self
    }

    /// Whether images are pinned: the kubelet then keeps them even if the disk is full. Default: yes.
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

    /// Processes all bundles once, one at a time, and logs a line for each. An invalid bundle does not affect
    /// the others.
    ///
    /// # Errors
    /// [`PreseedError`] if the pass cannot start. Errors of single bundles are in the report.
    ///
    /// # Cancel safety
    /// A bundle in progress when this is dropped is not listed, and the next pass reads it again.
    pub async fn run(&self, store: &dyn ImageStore) -> Result<PreseedReport, PreseedError> {
        let ScanResult { bundles, skipped, failed } = self.scan_bundles().await?;
        for SkippedEntry { path, reason } in &skipped {
            tracing::warn!("skipped {}, which is not a bundle: {reason}", path.display());
        }
        let mut report = PreseedReport { skipped, ..PreseedReport::default() };
        let mut report_outcome = |outcome: BundleOutcome| {
            log_outcome(&outcome);
            report.outcomes.push(outcome);
        };
        failed.into_iter().map(BundleOutcome::Failed).for_each(&mut report_outcome);
        let listed = list_images(store, &bundles).await.map_err(PreseedError::ListImages)?;
        let (mut owners, mut pending) =
            (NameOwners::default(), plan_imports(bundles, &listed, self.unpacks_layers));
        // Bundles that lack content are tried again after a later bundle was imported, which may have brought
        // it.
        loop {
            let (mut lacking, mut is_any_imported) = (Vec::new(), false);
            for (bundle, action) in pending {
                let outcome = self.process_bundle(store, bundle.clone(), action.clone(), &mut owners).await;
                is_any_imported |= matches!(outcome, BundleOutcome::Imported { .. });
                match self.known_invalid().get(&bundle) {
                    Some(BundleFault::MissingContent) => lacking.push((bundle, action, outcome)),
                    _ => report_outcome(outcome),
                }
            }
            if lacking.is_empty() || !is_any_imported {
                lacking.into_iter().for_each(|(.., outcome)| report_outcome(outcome));
                return Ok(report);
            }
            let again = |(bundle, action, _): (Bundle, BundleAction, BundleOutcome)| {
                self.known_invalid().remove(&bundle);
                (bundle, action)
            };
            pending = lacking.into_iter().map(again).collect();
        }
    }

    async fn scan_bundles(&self) -> Result<ScanResult, PreseedError> {
        let directory = self.bundle_dir.clone();
        let scanned = spawn_blocking(move || scan::scan_bundles(&directory)).await;
        scanned
            .unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
            .map_err(PreseedError::ListBundles)
    }

    async fn process_bundle(
        &self,
        store: &dyn ImageStore,
        bundle: Bundle,
        action: BundleAction,
        owners: &mut NameOwners,
    ) -> BundleOutcome {
        if self.known_invalid().contains_key(&bundle) {
            return BundleOutcome::KnownInvalid { bundle };
        }
        match self.import_or_verify(store, &bundle, action, owners).await {
            Ok((images, is_new)) => {
                owners.add_images(&bundle.namespace, &images);
                let images = images.into_iter().map(|image| image.name).collect();
                match is_new {
                    true => BundleOutcome::Imported { bundle, images },
                    false => BundleOutcome::Unchanged { bundle, images },
                }
            }
            Err(error) => {
                if !error.is_retryable() {
                    let lacks = matches!(
                        &error,
                        ImportError::Image { source: ArchivedImageError::MissingContent { .. }, .. }
                    );
                    self.known_invalid().insert(
                        bundle,
                        if lacks { BundleFault::MissingContent } else { BundleFault::Invalid },
                    );
                }
                BundleOutcome::Failed(error)
            }
        }
    }

    /// The images of a bundle, and whether it was imported now.
    async fn import_or_verify(
        &self,
        store: &dyn ImageStore,
        bundle: &Bundle,
        action: BundleAction,
        owners: &NameOwners,
    ) -> Result<(Vec<Image>, bool), ImportError> {
        let path = self.bundle_dir.join(bundle.namespace.as_str()).join(&bundle.file);
        let to_import_error = |error: BundleError| error.with_path(path.clone());
        let (namespace, platform, limits) = (&bundle.namespace, &self.target_platform, &self.import_limits);
        let scope = ImageScope { store, namespace, platform, limits };
        if let BundleAction::Verify(images) = action
            && are_complete(scope, &images).await.map_err(to_import_error)?
        {
            return Ok((images, false));
        }
        let (directory, opened) = (self.bundle_dir.clone(), bundle.clone());
        let file = spawn_blocking(move || scan::open_bundle(&directory, &opened)).await;
        let file = file.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        let file = file.map_err(|source| ImportError::Open { path: path.clone(), source })?;
        let job = ImportJob {
            scope,
            repository: repository_name(&bundle.file).unwrap_or_default(),
            unpack: self.unpacks_layers,
        };
        let start = Instant::now();
        let images =
            import::import_bundle(job, file, &mut |targets| self.label_images(bundle, targets, owners)).await;
        tracing::debug!(took = ?start.elapsed(), "read {}", path.display());
        Ok((images.map_err(to_import_error)?, true))
    }

    /// Creates the images of a bundle with their labels. A name of an earlier bundle keeps its target.
    fn label_images(
        &self,
        bundle: &Bundle,
        targets: &[(crate::ImageName, crate::Descriptor)],
        owners: &NameOwners,
    ) -> Vec<Image> {
        let mut pinned = Labels::new();
        if self.pins_images {
            pinned.insert("io.cri-containerd.pinned".into(), "pinned".into());
        }
        let image = |(name, target): &(crate::ImageName, crate::Descriptor)| {
            let owner = owners.owner_image(&bundle.namespace, name.as_str());
            if owner.is_some_and(|image| image.target.digest != target.digest) {
                tracing::warn!(
                    "{} has another image for {name} than an earlier bundle, which keeps the name",
                    bundle.file
                );
            }
            let (target, before) = match owner {
                Some(image) => (image.target.clone(), image.labels.clone()),
                None => (target.clone(), Labels::new()),
            };
            let mut labels: Labels = before.into_iter().chain(pinned.clone()).collect();
            labels.extend(bundle.image_labels(targets.len(), target.digest, self.unpacks_layers));
            Image { name: name.to_string(), target, labels }
        };
        targets.iter().map(image).collect()
    }

    fn known_invalid(&self) -> std::sync::MutexGuard<'_, BTreeMap<Bundle, BundleFault>> {
        self.known_invalid.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn list_images(
    store: &dyn ImageStore,
    bundles: &[Bundle],
) -> Result<BTreeMap<Namespace, Vec<Image>>, ImageStoreError> {
    let mut listed = BTreeMap::new();
    for Bundle { namespace, .. } in bundles {
        if !listed.contains_key(namespace) {
            listed.insert(namespace.clone(), store.list_images(namespace).await?);
        }
    }
    Ok(listed)
}

async fn are_complete(scope: ImageScope<'_>, images: &[Image]) -> Result<bool, BundleError> {
    let mut seen: BTreeSet<Digest> = BTreeSet::new();
    for image in images {
        if seen.insert(image.target.digest) && !is_complete(scope, &image.target).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn log_outcome(outcome: &BundleOutcome) {
    match outcome {
        BundleOutcome::Imported { bundle, images } => {
            tracing::info!("preseeded {} into {}: {}", bundle.file, bundle.namespace, images.join(","));
        }
        BundleOutcome::Unchanged { bundle, images } => {
            tracing::info!("{} in {} is unchanged: {}", bundle.file, bundle.namespace, images.join(","));
        }
        BundleOutcome::KnownInvalid { bundle } => {
            tracing::warn!("{} in {} is still invalid and was not read again", bundle.file, bundle.namespace);
        }
        BundleOutcome::Failed(error) => tracing::error!("{}", error_chain(error)),
    }
}

/// The images that earlier bundles of the pass listed, by name.
#[derive(Debug, Default)]
struct NameOwners(BTreeMap<(Namespace, String), Image>);

impl NameOwners {
    fn owner_image(&self, namespace: &Namespace, name: &str) -> Option<&Image> {
        self.0.get(&(namespace.clone(), name.to_owned()))
    }

    fn add_images(&mut self, namespace: &Namespace, images: &[Image]) {
        for image in images {
            self.0.insert((namespace.clone(), image.name.clone()), image.clone());
        }
    }
}
