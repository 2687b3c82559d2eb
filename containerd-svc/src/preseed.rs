//! Preseeds images: imports a directory of bundles.

mod damage_record;
mod pass;
mod proof;
mod refusals;
mod required;
mod retry;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

#[cfg(feature = "client")]
use crate::containerd::ContainerdImages;
use crate::error::{ImportError, LeftOutImage};
use crate::import::progress::ReadProgress;
use crate::import::{MeasuredFiles, error_chain};
use crate::label_names::LabelNames;
use crate::plan::{Bundle, ImageUpdate};
use crate::scan::{self, AbsentDirectory, ScanResult, SkippedEntry, UnlistedDirectories};
use crate::store::{ImageStore, ImageStoreError};
use crate::{Digest, ImagePolicy, ImportLimits, InstanceId, Namespace, Platform};

use pass::PreseedPass;
pub use proof::{DamagedImage, ImageProof, ProofKind, UncomparedImage};
use refusals::Refusals;
pub use required::RequiredImage;
use retry::BundleResults;
#[cfg(feature = "client")]
pub(crate) use retry::retry_pause;
use state::{BundleId, ImageStates, StoredImage};
pub use state::{ImageStage, ImageState};

/// Directories of bundles: `NAMESPACE/NAME.tar`, also `.tar.gz`, `.tgz`, `.tar.zst` and `.tzst`.
///
/// A bundle is a tar of an OCI layout or a docker-archive, with one or more images. An image that is damaged, and what
/// is no image for this node, is left out by name, and the other images of the bundle are imported. Other files are reported
/// and skipped. If two bundles give one name to different images, it belongs to the first bundle in the order
/// of directories and names. An image that no bundle brings any more loses its marks and its pin, and stays listed; where a
/// whole directory is missing or empty, or the directory of a namespace is missing, nothing of it changes: its disk may not be
/// mounted. An empty directory of a namespace has no bundles. A copy
/// of an image with all of its labels, as `ctr images tag` makes it, is none of its bundle's images.
#[derive(Debug, Clone)]
pub struct Preseed {
    directories: Arc<watch::Sender<Vec<PathBuf>>>,
    target_platform: Platform,
    import_limits: ImportLimits,
    unpacks_layers: bool,
    pins_images: bool,
    required_images: Vec<RequiredImage>,
    lists_digests: bool,
    policy: Option<Arc<dyn ImagePolicy>>,
    instance: InstanceId,
    memory: Arc<Mutex<PassMemory>>,
    refusals: Arc<Mutex<Refusals>>,
    changes: Arc<watch::Sender<()>>,
    problem: Arc<watch::Sender<Option<String>>>,
    #[cfg(feature = "client")]
    passes: Arc<watch::Sender<PassCount>>,
    #[cfg(feature = "client")]
    snapshotter: Arc<Mutex<Option<String>>>,
}

/// The bundles that a pass looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassScope {
    All,
    /// See [`Preseed::run_due`].
    Due,
}

/// The passes of the runnable of a preseed.
#[cfg(feature = "client")]
#[derive(Debug, Clone, Copy, Default)]
struct PassCount {
    requested: u64,
    begun: u64,
    ended: u64,
    /// True while the runnable makes passes.
    is_running: bool,
}

/// A bundle that is being read.
struct ReadingBundle<'a> {
    preseed: &'a Preseed,
    bundle: BundleId,
    progress: Arc<ReadProgress>,
}

impl ReadingBundle<'_> {
    fn progress(&self) -> &Arc<ReadProgress> {
        &self.progress
    }
}

impl Drop for ReadingBundle<'_> {
    fn drop(&mut self) {
        self.preseed.lock_memory().reading.remove(&self.bundle);
        self.preseed.changes.send_replace(());
    }
}

/// A runnable that makes passes, until this is dropped.
#[cfg(feature = "client")]
pub(crate) struct RunningPasses(Arc<watch::Sender<PassCount>>);

#[cfg(feature = "client")]
impl Drop for RunningPasses {
    fn drop(&mut self) {
        self.0.send_modify(|passes| passes.is_running = false);
    }
}

/// The results of earlier passes, which the clones of a [`Preseed`] share.
#[derive(Debug, Default)]
struct PassMemory {
    /// The directories that this is about.
    directories: Vec<PathBuf>,
    /// Invalid bundles, which are skipped until they change.
    invalid: BTreeMap<Bundle, BundleFault>,
    /// What bundles with images could not bring.
    left_out: BTreeMap<Bundle, Vec<LeftOutImage>>,
    /// The sizes of the files of bundles that did not fit, which need not be measured again.
    measured: BTreeMap<Bundle, Arc<MeasuredFiles>>,
    /// Unchanged bundles that the log has already.
    logged: BTreeSet<Bundle>,
    /// The counts of the last complete pass over directories with bundles.
    counts: Option<BundleCounts>,
    states: ImageStates,
    results: BundleResults,
    /// The archives that the last pass has found where no bundle can be.
    misplaced: Vec<SkippedEntry>,
    /// The images that are known to be damaged.
    damaged: Vec<DamagedImage>,
    /// The bundles that are being read.
    reading: BTreeMap<BundleId, Arc<ReadProgress>>,
    /// The bytes that were compared, and that are to be.
    proof: Option<(u64, u64)>,
}

/// The number of bundles of a directory that are imported, and of those that are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BundleCounts {
    /// Imported now or before, with all images that are for this node.
    pub imported: usize,
    /// Not imported, or not with all images: invalid, unreadable, or too large for the free space.
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
    /// Every directory is missing, or can't be read: mount their disks, create them, or correct their modes. Images stay as
    /// they are.
    #[error(
        "can't list the image bundles in the preseed directory{}: mount its disk, create it, or correct its mode",
        OtherDirectories(.others)
    )]
    ListBundles {
        /// The error of the first.
        #[source]
        first: nodekeel_localstorage::Error,
        /// The others, with their reasons.
        others: Vec<AbsentDirectory>,
    },
    /// Listing the namespaces of the store failed; a retry can help.
    #[error("can't list the images in containerd's store")]
    ListImages(#[source] ImageStoreError),
}

/// Names the directories besides the one of an error's source.
struct OtherDirectories<'a>(&'a [AbsentDirectory]);

impl fmt::Display for OtherDirectories<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for AbsentDirectory { reason, path } in self.0 {
            match reason {
                Some(reason) => write!(f, ", nor in {} ({reason})", path.display())?,
                None => write!(f, ", nor in {}", path.display())?,
            }
        }
        Ok(())
    }
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
        /// What it has besides them and was not listed.
        left_out: Vec<LeftOutImage>,
    },
    /// The bundle is unchanged, and all of its content exists.
    Unchanged {
        /// The bundle.
        bundle: Bundle,
        /// Names of its images, without those that belong to an earlier bundle.
        images: Vec<String>,
        /// What it has besides them and was not listed. What is not for this node is only known to the process that has
        /// read the bundle.
        left_out: Vec<LeftOutImage>,
    },
    /// An earlier pass found the bundle invalid, and it has not changed.
    KnownInvalid {
        /// The bundle.
        bundle: Bundle,
        /// The defect.
        reason: String,
    },
    /// An earlier pass failed to import the bundle, and its pause is not over.
    Delayed {
        /// The bundle.
        bundle: Bundle,
        /// The failure.
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
    /// Failures of the store that concern one namespace; a retry can help.
    pub namespace_failures: Vec<ImageStoreError>,
    /// The required images that no bundle has.
    pub absent: Vec<RequiredImage>,
    /// The directories that are missing, unreadable or empty, unless all are missing: the images of their bundles stay as they are.
    pub absent_directories: Vec<AbsentDirectory>,
    /// True if no directory has anything, as the mount points of disks that are not mounted: images stay as they
    /// are. A directory of no bundles has an empty directory of a namespace.
    pub is_empty: bool,
}

impl PreseedReport {
    /// The number of failed bundles that a later pass may import.
    pub fn retryable_count(&self) -> usize {
        let failed = |outcome: &&BundleOutcome| match outcome {
            BundleOutcome::Failed(error) => error.is_retryable(),
            outcome => matches!(outcome, BundleOutcome::Delayed { .. }),
        };
        self.outcomes.iter().filter(failed).count()
    }

    /// The number of imported bundles, and of those that are not.
    pub fn bundle_counts(&self) -> BundleCounts {
        let failed = self.outcomes.iter().filter(|outcome| outcome.failure().is_some()).count();
        BundleCounts { imported: self.outcomes.len() - failed, failed }
    }

    /// The reasons why directories can't be listed, and why bundles are not imported, or not with all images: a line for each, with its
    /// path.
    pub fn failures(&self) -> Vec<String> {
        let directories = self.absent_directories.iter().map(AbsentDirectory::describe);
        directories.chain(self.bundle_failures()).chain(self.other_failures()).collect()
    }

    /// The reasons why bundles are not imported, or not with all images: one for each.
    pub(crate) fn bundle_failures(&self) -> Vec<String> {
        self.outcomes.iter().filter_map(BundleOutcome::failure).collect()
    }

    /// The failures of namespaces, and the required images that no bundle has.
    pub(crate) fn other_failures(&self) -> Vec<String> {
        let store = self.namespace_failures.iter().map(|error| error_chain(error));
        let absent = self.absent.iter().map(|required| format!("{required} is required, and in no bundle"));
        store.chain(absent).collect()
    }
}

impl BundleOutcome {
    /// The names that the bundle has brought; `None` if it is not imported.
    pub(crate) fn images(&self) -> Option<(&Namespace, &[String])> {
        match self {
            Self::Imported { bundle, images, .. } | Self::Unchanged { bundle, images, .. } => {
                Some((&bundle.namespace, images))
            }
            Self::KnownInvalid { .. } | Self::Delayed { .. } | Self::Failed(_) => None,
        }
    }

    /// The reason why the bundle is not imported, or not with all images; `None` if nothing is wrong.
    fn failure(&self) -> Option<String> {
        match self {
            Self::Failed(error) => Some(error_chain(error)),
            Self::KnownInvalid { reason, .. } | Self::Delayed { reason, .. } => Some(reason.clone()),
            Self::Imported { bundle, left_out, .. } | Self::Unchanged { bundle, left_out, .. } => {
                let faults: Vec<_> = left_out.iter().filter(|image| !image.is_foreign()).collect();
                let first = faults.first()?;
                let more =
                    if faults.len() > 1 { format!(", and {} more", faults.len() - 1) } else { String::new() };
                Some(format!("{} without the image {first}{more}", bundle.path().display()))
            }
        }
    }
}

impl Preseed {
    /// Preseeds the bundles below a directory: for this machine's platform, not unpacked, and pinned.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directories: Arc::new(watch::channel(vec![directory.into()]).0),
            target_platform: Platform::of_build_target(),
            import_limits: ImportLimits::default(),
            unpacks_layers: false,
            pins_images: true,
            required_images: Vec::new(),
            lists_digests: false,
            policy: None,
            instance: InstanceId::default(),
            memory: Arc::default(),
            refusals: Arc::default(),
            changes: Arc::new(watch::channel(()).0),
            problem: Arc::new(watch::channel(None).0),
            #[cfg(feature = "client")]
            passes: Arc::new(watch::channel(PassCount::default()).0),
            #[cfg(feature = "client")]
            snapshotter: Arc::default(),
        }
    }

    /// Adds a directory after the others. An image that two bring belongs to the first of them.
    #[must_use]
    pub fn with_directory(mut self, directory: impl Into<PathBuf>) -> Self {
        let mut directories = self.directories();
        directories.push(directory.into());
        self.directories = Arc::new(watch::channel(directories).0);
        self
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

    /// Sets the images that are imported first, and that others wait for. Default: those of all bundles.
    #[must_use]
    pub fn with_required(mut self, required: impl IntoIterator<Item = RequiredImage>) -> Self {
        self.required_images = required.into_iter().collect();
        self
    }

    /// Sets whether each image with a tag is also listed by its digest, as `REPOSITORY@DIGEST`: the CRI knows an image of a pod
    /// with a digest by that name alone. Default: no. If it is enabled later, a bundle gets those names at its next import.
    #[must_use]
    pub fn with_digest_names(mut self, list: bool) -> Self {
        self.lists_digests = list;
        self
    }

    /// Sets who decides which images are listed. Default: nobody; all of them are. An image that is listed already and that
    /// the policy refuses stays as it is: it has failed by name until it is removed from its bundle.
    #[must_use]
    pub fn with_policy(mut self, policy: Arc<dyn ImagePolicy>) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Sets the name of this program among several that import into the containerd. Default: that of the only one.
    #[must_use]
    pub fn with_instance(mut self, instance: InstanceId) -> Self {
        self.instance = instance;
        self
    }

    /// Remembers in this file which bundles have no image that is not refused, for their names or by the policy: the next process
    /// does not read them again before they or the policy change. Default: in memory alone.
    pub fn set_refusal_file(&self, file: impl Into<PathBuf>) {
        self.lock_refusals().set_file(file.into());
    }

    fn lock_refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads or writes a file of the refusals, on a thread that may block.
    async fn with_refusals(&self, action: impl FnOnce(&mut Refusals) + Send + 'static) {
        let refusals = Arc::clone(&self.refusals);
        let done =
            spawn_blocking(move || action(&mut refusals.lock().unwrap_or_else(PoisonError::into_inner)));
        done.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
    }

    /// The name of this program.
    pub fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// The reason why not all images of the bundles are there, as the runnable of the preseed has last found it; `None` if
    /// they are, or before its first pass. It is no reason to be not ready. Clones of this value share it.
    pub fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Notifies of each change of the [problem](Self::problem).
    pub fn watch_problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.subscribe()
    }

    #[cfg(feature = "client")]
    pub(crate) fn set_problem(&self, problem: Option<String>) {
        self.problem.send_replace(problem);
    }

    /// The directories of bundles, in their order. Clones of this value share them.
    pub fn directories(&self) -> Vec<PathBuf> {
        self.directories.borrow().clone()
    }

    /// Replaces the directories: at once where the runnable imports them, else from the next pass on. What only the bundles of a directory
    /// that is not among them have brought is unpinned, as soon as one of the directories can be listed.
    pub fn set_directories(&self, directories: Vec<PathBuf>) {
        self.directories.send_if_modified(|known| {
            let is_changed = *known != directories;
            *known = directories;
            is_changed
        });
    }

    /// Notifies of other directories.
    #[cfg(feature = "client")]
    pub(crate) fn watch_directories(&self) -> watch::Receiver<Vec<PathBuf>> {
        self.directories.subscribe()
    }

    /// The number of bundles that the last complete pass over a directory with bundles has left imported, and not;
    /// `None` before. Clones of this value share it.
    pub fn bundle_counts(&self) -> Option<BundleCounts> {
        self.lock_memory().counts
    }

    /// The archives that the last pass has found [where no bundle can be](crate::find_misplaced_archives). Clones of this value share it.
    pub fn misplaced_archives(&self) -> Vec<SkippedEntry> {
        self.lock_memory().misplaced.clone()
    }

    /// The state of each image of the bundles, in the order of namespaces, directories and bundles. Clones of this value share it.
    pub fn image_states(&self) -> Vec<ImageState> {
        let memory = self.lock_memory();
        memory.states.list(|bundle| memory.reading.get(bundle).map(|reading| reading.bytes()))
    }

    /// The images that are known to be damaged, also by a comparison of an earlier process, and that are in no bundle that is
    /// there: as the last pass or comparison has left them. The others have a [state](Self::image_states). Clones of this value
    /// share it.
    pub fn damaged_without_bundle(&self) -> Vec<DamagedImage> {
        let memory = self.lock_memory();
        let states = memory.states.list(|_| None);
        let with_bundle: BTreeSet<_> =
            states.iter().filter_map(|state| Some((&state.namespace, state.name.as_deref()?))).collect();
        let is_alone = |image: &&DamagedImage| !with_bundle.contains(&(&image.namespace, &*image.name));
        memory.damaged.iter().filter(is_alone).cloned().collect()
    }

    /// Notifies of changes of the [states](Self::image_states), of the bytes of bundles that are read among them: about a hundred times in
    /// each bundle.
    pub fn watch_states(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Counts what is read of a bundle, until the value is dropped.
    fn begin_reading(&self, bundle: &Bundle, file: &File) -> ReadingBundle<'_> {
        let (bundle, changes) = (state::bundle_id(bundle), Arc::clone(&self.changes));
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        let progress = Arc::new(ReadProgress::new(bytes, move || changes.send_replace(())));
        self.lock_memory().reading.insert(bundle.clone(), Arc::clone(&progress));
        self.changes.send_replace(());
        ReadingBundle { preseed: self, bundle, progress }
    }

    /// Processes all bundles, and logs a line for each. Up to four uncompressed ones that share no content are written at once, unless
    /// layers are unpacked; their images are listed in the order of the bundles. An invalid bundle or image does not affect the
    /// others, and neither does a namespace whose images can't be listed. What bundles no longer bring loses its marks and its pin at the end.
    ///
    /// # Errors
    /// [`PreseedError`] if the directory or the store fails for all of them. Errors of single bundles and namespaces are
    /// in the report.
    ///
    /// # Cancel safety
    /// A bundle in progress when this is dropped is not listed, and the next pass reads it again.
    pub async fn run(&self, store: &dyn ImageStore) -> Result<PreseedReport, PreseedError> {
        self.run_pass(store, PassScope::All, None).await
    }

    /// As [`run`](Self::run), for the bundles that are new or have changed, and those that have failed: each after a pause of a
    /// second that doubles with each failure up to five minutes. The others are as the last pass has left them.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_due(&self, store: &dyn ImageStore) -> Result<PreseedReport, PreseedError> {
        self.run_pass(store, PassScope::Due, None).await
    }

    /// The time at which the first of the bundles that have failed is due; `None` if none has that a later pass may import.
    pub fn next_due(&self) -> Option<Instant> {
        self.lock_memory().results.next_due()
    }

    /// As [`run`](Self::run); sends the names of the required images as soon as their bundles have been processed.
    pub(crate) async fn run_pass(
        &self,
        store: &dyn ImageStore,
        scope: PassScope,
        processed: Option<oneshot::Sender<Vec<(Namespace, String)>>>,
    ) -> Result<PreseedReport, PreseedError> {
        let report = self.process_directories(store, scope, processed).await;
        // Also where the directories are not there.
        self.refresh_damage(store).await;
        report
    }

    async fn process_directories(
        &self,
        store: &dyn ImageStore,
        scope: PassScope,
        processed: Option<oneshot::Sender<Vec<(Namespace, String)>>>,
    ) -> Result<PreseedReport, PreseedError> {
        let directories = self.directories();
        self.lock_memory().begin_directories(&directories);
        let ScanResult { wanted, skipped, misplaced, failed, absent } = scan_bundles(&directories).await?;
        self.lock_memory().misplaced = misplaced;
        for absent in &absent {
            tracing::warn!("{}", absent.describe());
        }
        let labels = LabelNames::new(self.instance.clone(), &directories);
        if absent.len() == directories.len() {
            // No bundle is waited for.
            drop(processed.map(|processed| processed.send(Vec::new())));
            // Nothing is known of these directories, but what was removed from them is decided.
            let report = PreseedPass::new(self, store, labels, wanted, BTreeMap::new(), None).run().await?;
            return Ok(PreseedReport {
                is_empty: true,
                absent_directories: absent,
                absent: Vec::new(),
                ..report
            });
        }
        for SkippedEntry { path, reason } in &skipped {
            tracing::warn!("skipped {}, which is not a bundle: {reason}", path.display());
        }
        let kept = {
            let mut memory = self.lock_memory();
            memory.states.begin_pass(&wanted, &directories);
            memory.results.begin_pass(&wanted);
            if scope == PassScope::Due { memory.results.list_kept() } else { BTreeMap::new() }
        };
        self.changes.send_replace(());
        let mut outcomes: Vec<_> = failed.into_iter().map(BundleOutcome::Failed).collect();
        outcomes.iter().for_each(|outcome| self.log_outcome(outcome));
        self.with_refusals(Refusals::load).await;
        // A file that is not there now may be there again.
        if absent.is_empty() && wanted.unreadable.is_empty() {
            self.lock_refusals().retain(wanted.bundles.iter(), &self.target_platform);
        }
        let pass = PreseedPass::new(self, store, labels, wanted, kept, processed).run().await;
        self.with_refusals(Refusals::save).await;
        let mut report = pass?;
        outcomes.append(&mut report.outcomes);
        let report = PreseedReport { outcomes, skipped, absent_directories: absent, ..report };
        // Only after a complete pass, so that the counts are always those of all bundles.
        self.lock_memory().counts = Some(report.bundle_counts());
        Ok(report)
    }

    /// How much of the content was compared with its digests, and how much is to be, in bytes, while the runnable of the
    /// preseed does that after a power cut.
    pub fn proof_progress(&self) -> Option<(u64, u64)> {
        self.lock_memory().proof
    }

    /// Makes the runnable of the preseed begin a pass at once, and waits until it has ended; false if the runnable does not run,
    /// or ends before.
    #[cfg(feature = "client")]
    pub async fn request_pass(&self) -> bool {
        let mut passes = self.passes.subscribe();
        let mut due = 0;
        self.passes.send_modify(|passes| {
            // A pass that has begun may have passed by what this one is for.
            due = passes.begun + 1;
            passes.requested = due;
        });
        // The sender is alive as long as this value.
        let ended = passes.wait_for(|passes| passes.ended >= due || !passes.is_running).await;
        ended.is_ok_and(|passes| passes.ended >= due)
    }

    /// Records that the runnable makes passes from now on.
    #[cfg(feature = "client")]
    pub(crate) fn begin_run(&self) -> RunningPasses {
        self.passes.send_modify(|passes| passes.is_running = true);
        RunningPasses(Arc::clone(&self.passes))
    }

    /// Waits until a pass is requested that has not begun.
    #[cfg(feature = "client")]
    pub(crate) async fn wait_request(&self) {
        drop(self.passes.subscribe().wait_for(|passes| passes.requested > passes.begun).await);
    }

    #[cfg(feature = "client")]
    pub(crate) fn begin_pass(&self) {
        self.passes.send_modify(|passes| passes.begun += 1);
    }

    #[cfg(feature = "client")]
    pub(crate) fn end_pass(&self) {
        self.passes.send_modify(|passes| passes.ended = passes.begun);
    }

    #[cfg(feature = "client")]
    pub(crate) fn set_proof_progress(&self, progress: Option<(u64, u64)>) {
        self.lock_memory().proof = progress;
        self.changes.send_replace(());
    }

    fn record_outcome(&self, bundle: &Bundle, outcome: &BundleOutcome, stored: &[StoredImage]) {
        self.lock_memory().results.record_outcome(bundle, outcome);
        self.change_states(|states| states.record_outcome(bundle, outcome, stored));
    }

    fn record_damage(&self, damaged: &[DamagedImage]) {
        self.change_states(|states| states.record_damage(damaged));
    }

    fn record_damaged_layers(&self, namespace: &Namespace, target: Digest, reason: Option<&str>) {
        self.change_states(|states| states.record_damaged_layers(namespace, target, reason));
    }

    fn record_compared(&self, namespace: &Namespace, target: Digest, problem: Option<&str>) {
        self.change_states(|states| states.record_compared(namespace, target, problem));
    }

    fn change_states(&self, change: impl FnOnce(&mut ImageStates)) {
        change(&mut self.lock_memory().states);
        self.changes.send_replace(());
    }

    /// Gives another store of the same containerd the snapshotter and the instance of the runnable's store.
    #[cfg(feature = "client")]
    #[must_use]
    pub fn set_up_store(&self, store: ContainerdImages) -> ContainerdImages {
        let store = store.with_instance(self.instance.clone());
        match self.snapshotter.lock().unwrap_or_else(PoisonError::into_inner).clone() {
            Some(snapshotter) => store.with_snapshotter(snapshotter),
            None => store,
        }
    }

    /// Sets the snapshotter of the containerd that has started; `None` for containerd's default.
    #[cfg(feature = "client")]
    pub(crate) fn set_snapshotter(&self, snapshotter: Option<String>) {
        *self.snapshotter.lock().unwrap_or_else(PoisonError::into_inner) = snapshotter;
    }

    /// Records which of its listed images the CRI lists.
    #[cfg(feature = "client")]
    pub(crate) fn record_answers(&self, namespace: &Namespace, unlisted: &BTreeSet<String>) {
        self.change_states(|states| states.record_answers(namespace, unlisted));
    }

    /// Takes back the states of images that don't exist.
    #[cfg(feature = "client")]
    pub(crate) fn record_missing(&self, missing: &[(Namespace, String)]) {
        self.change_states(|states| states.record_missing(missing));
    }

    fn lock_memory(&self) -> MutexGuard<'_, PassMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find_left_out(&self, bundle: &Bundle) -> Option<Vec<LeftOutImage>> {
        self.lock_memory().left_out.get(bundle).cloned()
    }

    fn find_fault(&self, bundle: &Bundle) -> Option<BundleFault> {
        self.lock_memory().invalid.get(bundle).cloned()
    }

    /// Logs what happened to a bundle; that it is unchanged only once, since passes may be repeated.
    fn log_outcome(&self, outcome: &BundleOutcome) {
        match outcome {
            BundleOutcome::Imported { bundle, images, left_out } => {
                tracing::info!("preseeded {}: {}", bundle.path().display(), images.join(","));
                left_out.iter().for_each(|image| log_left_out(bundle, image));
            }
            BundleOutcome::Unchanged { bundle, images, left_out } => {
                if self.lock_memory().logged.insert(bundle.clone()) {
                    tracing::info!("{} is unchanged: {}", bundle.path().display(), images.join(","));
                    left_out.iter().for_each(|image| log_left_out(bundle, image));
                }
            }
            BundleOutcome::KnownInvalid { bundle, .. } => {
                tracing::warn!("{} is still invalid and was not read again", bundle.path().display());
            }
            BundleOutcome::Delayed { .. } => {}
            BundleOutcome::Failed(error) => tracing::error!("{}", error_chain(error)),
        }
    }
}

impl PassMemory {
    /// Forgets what is known of other directories.
    fn begin_directories(&mut self, directories: &[PathBuf]) {
        if self.directories != directories {
            *self = Self { directories: directories.to_vec(), ..Self::default() };
        }
    }
}

async fn scan_bundles(directories: &[PathBuf]) -> Result<ScanResult, PreseedError> {
    let directories = directories.to_owned();
    // The scan reads parts of every bundle, and all headers of uncompressed ones.
    let scanned = spawn_blocking(move || scan::scan_directories(&directories)).await;
    scanned
        .unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
        .map_err(|UnlistedDirectories { first, others }| PreseedError::ListBundles { first, others })
}

/// Logs what a bundle could not bring, besides its images.
fn log_left_out(bundle: &Bundle, image: &LeftOutImage) {
    let path = bundle.path();
    match image.is_foreign() {
        true => tracing::info!("{} has what this node does not run: {image}", path.display()),
        false => tracing::error!("{} is imported without the image {image}", path.display()),
    }
}
