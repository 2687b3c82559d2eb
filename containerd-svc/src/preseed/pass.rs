//! One pass over the directory: executes plans until nothing is left to import.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use super::damage_record::{self, DamageRecord};
use super::state::StoredImage;
use super::{
    BundleFault, BundleOutcome, Preseed, PreseedError, PreseedReport, ReadingBundle, refusals, required,
};
use crate::error::{ArchivedImageError, BundleError, ImportError, LeftOutImage, LeftOutReason};
use crate::image::{Image, Labels};
use crate::image_walk::{ImageScope, ImageWalk};
use crate::import::{
    self, ImportJob, ImportedImages, JudgedArchive, MeasuredFiles, ReadingArchive, error_chain,
};
use crate::label_names::LabelNames;
use crate::plan::{
    Bundle, BundleAction, ImageUpdate, ImageUpdateKind, ImportMark, PINNED_LABEL, PreseedPlan, WantedBundles,
    find_name_owner, plan_until,
};
use crate::scan::{self, repository_name};
use crate::store::{ImageStore, ImageStoreError, IncomingBlob};
use crate::{Descriptor, Digest, DiskUsage, ImageName, Namespace};

/// The most bundles that are read at once.
const MAX_READING: usize = 4;

/// The images of a bundle after its import, or its verification.
struct Processed {
    /// Those whose names it owns.
    images: Vec<StoredImage>,
    left_out: Vec<LeftOutImage>,
    is_imported: bool,
}

/// An import whose content is being written, or which has failed before that.
struct StartedImport<'a> {
    bundle: Bundle,
    archive: Result<(JudgedArchive, ReadingArchive), BundleError>,
    /// The blobs that it may write; `None` if it is read alone.
    blobs: Option<BTreeSet<Digest>>,
    measured: Arc<MeasuredFiles>,
    reading: ReadingBundle<'a>,
    start: Instant,
}

impl StartedImport<'_> {
    /// Returns whether a bundle with these blobs has to wait for its end: a blob is not written, and damage of it not replaced,
    /// by two at once.
    fn excludes(&self, blobs: Option<&BTreeSet<Digest>>) -> bool {
        self.blobs.as_ref().zip(blobs).is_none_or(|(own, blobs)| !own.is_disjoint(blobs))
    }

    fn claim(&self) -> DiskUsage {
        self.archive.as_ref().ok().and_then(|(_, reading)| reading.claim).unwrap_or_default()
    }
}

/// A pass in progress.
pub(super) struct PreseedPass<'a> {
    preseed: &'a Preseed,
    store: &'a dyn ImageStore,
    labels: LabelNames,
    wanted: WantedBundles,
    /// The listed images; those of this pass included.
    listed: BTreeMap<Namespace, Vec<Image>>,
    outcomes: BTreeMap<Bundle, BundleOutcome>,
    /// The most images that each bundle has listed in this pass.
    progress: BTreeMap<Bundle, usize>,
    /// True if an import has listed more images than before, since the last plan.
    has_progress: bool,
    /// The imports under way, in the order in which they list their images.
    started: VecDeque<StartedImport<'a>>,
    namespace_failures: Vec<ImageStoreError>,
    /// Told the names of the required images once their bundles have been processed.
    processed: Option<oneshot::Sender<Vec<(Namespace, String)>>>,
}

impl<'a> PreseedPass<'a> {
    pub(super) fn new(
        preseed: &'a Preseed,
        store: &'a dyn ImageStore,
        labels: LabelNames,
        wanted: WantedBundles,
        kept: BTreeMap<Bundle, BundleOutcome>,
        processed: Option<oneshot::Sender<Vec<(Namespace, String)>>>,
    ) -> Self {
        Self {
            preseed,
            store,
            labels,
            wanted,
            listed: BTreeMap::new(),
            outcomes: kept,
            progress: BTreeMap::new(),
            has_progress: false,
            started: VecDeque::new(),
            namespace_failures: Vec::new(),
            processed,
        }
    }

    /// Plans and imports until a plan imports nothing more, then applies its changes of images. An import may
    /// bring content that another bundle lacks, and a changed bundle may give a name to another one.
    pub(super) async fn run(mut self) -> Result<PreseedReport, PreseedError> {
        loop {
            // Each import changes the marks, so every plan starts from the images that are listed now.
            self.list_images().await.map_err(PreseedError::ListImages)?;
            let plan = self.plan_off_thread().await;
            if self.process_bundles(plan.bundles).await {
                continue;
            }
            // Only now is it known that no other bundle brings what these lack.
            let lacking = self.outcomes.iter().filter(|(bundle, _)| self.lacks_content(bundle));
            lacking.for_each(|(_, outcome)| self.preseed.log_outcome(outcome));
            self.send_processed();
            let changes = self.apply_changes(plan.images).await;
            return Ok(PreseedReport {
                absent: required::find_absent(&self.preseed.required_images, &self.outcomes),
                outcomes: self.outcomes.into_values().collect(),
                changes,
                namespace_failures: self.namespace_failures,
                ..PreseedReport::default()
            });
        }
    }

    /// Plans on a thread that may block, since many bundles take a while; dropping this ends it.
    async fn plan_off_thread(&mut self) -> PreseedPlan {
        let (wanted, listed) = (std::mem::take(&mut self.wanted), std::mem::take(&mut self.listed));
        let (unpack, caller) = (self.preseed.unpacks_layers, Arc::new(()));
        let waiting = Arc::downgrade(&caller);
        let planned = spawn_blocking(move || {
            let plan = plan_until(&wanted, &listed, unpack, || waiting.strong_count() == 0);
            (plan, wanted, listed)
        });
        let planned =
            planned.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        let plan;
        (plan, self.wanted, self.listed) = planned;
        drop(caller);
        plan.expect("the caller waits")
    }

    /// Lists the images of all namespaces, also of those without a bundle: they may have lost their last one. What is
    /// wanted of a namespace whose images can't be listed has failed, and its images stay as they are.
    async fn list_images(&mut self) -> Result<(), ImageStoreError> {
        let mut namespaces: BTreeSet<Namespace> = self.store.list_namespaces().await?.into_iter().collect();
        namespaces.extend(self.wanted.bundles.iter().map(|bundle| bundle.namespace.clone()));
        self.listed.clear();
        self.namespace_failures.clear();
        for namespace in namespaces {
            match self.store.list_images(&namespace).await {
                Ok(mut images) => {
                    for image in &mut images {
                        let labels = std::mem::take(&mut image.labels);
                        image.labels = self.labels.read(labels, &namespace, &self.wanted);
                    }
                    self.listed.insert(namespace, images);
                }
                Err(error) => {
                    tracing::error!("{}", error_chain(&error));
                    // Also if a later list succeeds: its bundles are not known to be gone.
                    self.wanted.listed.retain(|(listed, _)| *listed != namespace);
                    self.wanted.bundles.retain(|bundle| {
                        let is_listed = bundle.namespace != namespace;
                        if !is_listed && !self.outcomes.contains_key(bundle) {
                            let path = bundle.path();
                            let source = ImageStoreError::ListImages {
                                namespace: namespace.clone(),
                                source: error_chain(&error).into(),
                            };
                            let failed = BundleOutcome::Failed(ImportError::Store { path, source });
                            self.preseed.record_outcome(bundle, &failed, &[]);
                            self.outcomes.insert(bundle.clone(), failed);
                        }
                        is_listed
                    });
                    self.namespace_failures.push(error);
                }
            }
        }
        if self.namespace_failures.is_empty() {
            self.preseed.lock_memory().states.begin_plan(&self.listed);
        }
        Ok(())
    }

    fn send_processed(&mut self) {
        if let Some(processed) = self.processed.take() {
            let names = required::required_names(&self.preseed.required_images, &self.outcomes);
            // Nobody may wait any more.
            drop(processed.send(names));
        }
    }

    /// Applies changes of images; returns those that were possible.
    async fn apply_changes(&mut self, mut changes: Vec<ImageUpdate>) -> Vec<ImageUpdate> {
        let (mut applied, mut refused) = (Vec::new(), Vec::new());
        for ImageUpdate { namespace, kind, image } in &mut changes {
            image.labels = self.labels.write(std::mem::take(&mut image.labels));
            if *kind == ImageUpdateKind::Repoint {
                let checked = self.check_policy(namespace, &image.name, image.target.digest).await;
                // Its bundle has failed with the reason.
                refused.extend(checked.is_err().then(|| (namespace.clone(), image.name.clone())));
            }
        }
        changes.retain(|change| !refused.contains(&(change.namespace.clone(), change.image.name.clone())));
        // A session is for one namespace, and the plan has the changes of each next to each other.
        for changes in changes.chunk_by(|a, b| a.namespace == b.namespace) {
            if let Err(error) = apply_changes(self.store, changes, &mut applied).await {
                tracing::error!("{}", error_chain(&error));
                self.namespace_failures.push(error);
            }
        }
        applied
    }

    /// Processes the bundles that are due; returns whether any import has listed more images than before. Several are read at
    /// once, but images are listed in the order of the bundles.
    async fn process_bundles(&mut self, planned: Vec<(Bundle, BundleAction)>) -> bool {
        self.has_progress = false;
        let required = &self.preseed.required_images;
        let (first, others): (Vec<_>, Vec<_>) =
            planned.into_iter().partition(|(bundle, action)| required::is_first(required, bundle, action));
        for planned in [first, others] {
            for (bundle, action) in planned {
                let is_due = match self.outcomes.get(&bundle) {
                    None => true,
                    // Others have been imported since: it may have lost a name, or got one back.
                    Some(BundleOutcome::Unchanged { .. }) => matches!(action, BundleAction::Import(_)),
                    // A bundle is imported once in a pass, and fails once.
                    Some(_) => false,
                };
                if is_due {
                    self.process_bundle(bundle, action).await;
                }
            }
            while let Some(started) = self.started.pop_front() {
                self.finish_import(started).await;
            }
        }
        if self.has_progress {
            // The imports may have brought what these lack, so they are due again.
            let lacking: Vec<_> =
                self.outcomes.keys().filter(|bundle| self.lacks_content(bundle)).cloned().collect();
            for bundle in lacking {
                self.outcomes.remove(&bundle);
                let mut memory = self.preseed.lock_memory();
                memory.invalid.remove(&bundle);
                memory.left_out.remove(&bundle);
            }
        }
        self.has_progress
    }

    /// Returns whether the bundle lacks content that another one may bring.
    fn lacks_content(&self, bundle: &Bundle) -> bool {
        let lacks_content = |image: &LeftOutImage| {
            matches!(&image.reason, LeftOutReason::Archive(ArchivedImageError::MissingContent { .. }))
        };
        self.preseed.find_fault(bundle).is_some_and(|fault| fault.lacks_content)
            || self.preseed.find_left_out(bundle).is_some_and(|left_out| left_out.iter().any(lacks_content))
    }

    /// Verifies a bundle, or starts to import it.
    async fn process_bundle(&mut self, bundle: Bundle, action: BundleAction) {
        // The key includes the fingerprint: a bundle that has changed is read again.
        if let Some(BundleFault { reason, .. }) = self.preseed.find_fault(&bundle) {
            let known = BundleOutcome::KnownInvalid { bundle: bundle.clone(), reason };
            return self.record_outcome(bundle, known, &[]);
        }
        let processed = match action {
            BundleAction::Verify(images) => self.verify_bundle(&bundle, &images).await,
            BundleAction::Import(_) => match self.find_refusal(&bundle).await {
                Some(error) => Err(error),
                None => Ok(None),
            },
        };
        let opened = match processed {
            Ok(Some(processed)) => return self.record_processed(bundle, Ok(processed)),
            // Either the bundle is due, or content of its images was lost.
            Ok(None) => open_bundle(&bundle).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(file) => self.start_import(bundle, file).await,
            Err(error) => self.record_processed(bundle, Err(error)),
        }
    }

    fn record_processed(&mut self, bundle: Bundle, processed: Result<Processed, ImportError>) {
        match processed {
            Ok(Processed { images: stored, left_out, is_imported }) => {
                let (of, images) = (bundle.clone(), stored.iter().map(|image| image.name.clone()).collect());
                let outcome = match is_imported {
                    true => BundleOutcome::Imported { bundle: of, images, left_out },
                    false => BundleOutcome::Unchanged { bundle: of, images, left_out },
                };
                self.record_outcome(bundle, outcome, &stored);
            }
            Err(error) => {
                if !error.is_retryable() {
                    let lacks_content = matches!(
                        &error,
                        ImportError::Image { source: ArchivedImageError::MissingContent { .. }, .. }
                    );
                    let fault = BundleFault { lacks_content, reason: error_chain(&error) };
                    self.preseed.lock_memory().invalid.insert(bundle.clone(), fault);
                }
                self.record_outcome(bundle, BundleOutcome::Failed(error), &[]);
            }
        }
    }

    fn record_outcome(&mut self, bundle: Bundle, outcome: BundleOutcome, stored: &[StoredImage]) {
        self.preseed.record_outcome(&bundle, &outcome, stored);
        if let BundleOutcome::Imported { images, .. } = &outcome {
            // A bundle that still lacks the same content has brought nothing more.
            let before = self.progress.insert(bundle.clone(), images.len());
            self.has_progress |= before.is_none_or(|before| before < images.len());
        }
        if !self.lacks_content(&bundle) {
            self.preseed.log_outcome(&outcome);
        }
        self.outcomes.insert(bundle, outcome);
        if self.processed.is_some() && required::are_processed(&self.preseed.required_images, &self.outcomes)
        {
            self.send_processed();
        }
    }

    /// The reason why a bundle has no image that is not refused, if an earlier process has read that.
    async fn find_refusal(&self, bundle: &Bundle) -> Option<ImportError> {
        let known = self.preseed.lock_refusals().find(bundle, &self.preseed.target_platform)?;
        let mut errors = refusals::judge(bundle, &known, self.preseed.policy.as_deref()).await?;
        // The error has room for one.
        for error in errors.drain(1..) {
            tracing::error!("left out of {}: {}", bundle.path().display(), error_chain(&error));
        }
        Some(ImportError::Image { path: bundle.path(), source: errors.remove(0) })
    }

    /// `None` if the bundle has to be read again.
    async fn verify_bundle(
        &self,
        bundle: &Bundle,
        images: &[Image],
    ) -> Result<Option<Processed>, ImportError> {
        let Some(mut left_out) = self.list_left_out(bundle, images).await else { return Ok(None) };
        let Some(images) = self.survey_images(bundle, images).await? else { return Ok(None) };
        let (images, mut refused) = self.apply_policy(bundle, images).await;
        left_out.append(&mut refused);
        Ok(Some(Processed { images, left_out, is_imported: false }))
    }

    async fn survey_images(
        &self,
        bundle: &Bundle,
        images: &[Image],
    ) -> Result<Option<Vec<StoredImage>>, ImportError> {
        let Preseed { target_platform: platform, import_limits: limits, unpacks_layers, .. } = self.preseed;
        let scope = ImageScope { store: self.store, namespace: &bundle.namespace, platform, limits };
        let surveyed = survey_images(scope, images, *unpacks_layers).await;
        surveyed.map_err(|error| error.with_path(bundle.path()))
    }

    /// Starts to write the content of a bundle, after the end of those that it must not meet.
    async fn start_import(&mut self, bundle: Bundle, file: File) {
        let (preseed, store) = (self.preseed, self.store);
        // Taken out, and put back at its end if the bundle still does not fit.
        let measured = preseed.lock_memory().measured.remove(&bundle).unwrap_or_default();
        let reading = preseed.begin_reading(&bundle, &file);
        let start = Instant::now();
        let job = import_job(preseed, store, &bundle, &measured, &reading);
        let judged = JudgedArchive::judge(job, file).await;
        let blobs = match &judged {
            Ok(archive) => archive.blobs(),
            Err(_) => Some(BTreeSet::new()),
        };
        while self.started.len() >= MAX_READING
            || self.started.iter().any(|other| other.excludes(blobs.as_ref()))
        {
            self.finish_first().await;
        }
        let archive = match judged {
            Ok(archive) => loop {
                let claimed =
                    self.started.iter().map(StartedImport::claim).fold(DiskUsage::default(), |a, b| a + b);
                match archive.prepare(job, claimed).await {
                    // No other import may take the same space.
                    Ok(prepared) if prepared.claim.is_none() && !self.started.is_empty() => {
                        prepared.discard().await;
                        self.finish_first().await;
                    }
                    // It may fit once it is known what the others have taken.
                    Err(BundleError::Store(ImageStoreError::NoSpace { .. })) if !self.started.is_empty() => {
                        self.finish_first().await;
                    }
                    prepared => break prepared.map(|prepared| (archive, prepared.start())),
                }
            },
            Err(error) => Err(error),
        };
        let is_bounded = archive.as_ref().map_or(true, |(_, reading)| reading.claim.is_some());
        let blobs = blobs.filter(|_| is_bounded);
        self.started.push_back(StartedImport { bundle, archive, blobs, measured, reading, start });
    }

    async fn finish_first(&mut self) {
        if let Some(first) = self.started.pop_front() {
            self.finish_import(first).await;
        }
    }

    async fn finish_import(&mut self, import: StartedImport<'a>) {
        let bundle = import.bundle.clone();
        let processed = self.list_bundle(import).await;
        self.record_processed(bundle, processed);
    }

    /// Lists the images of a bundle once its content is written.
    async fn list_bundle(&mut self, import: StartedImport<'a>) -> Result<Processed, ImportError> {
        let StartedImport { bundle, archive, measured, reading, start, .. } = import;
        let bundle = &bundle;
        let path = bundle.path();
        let job = import_job(self.preseed, self.store, bundle, &measured, &reading);
        let Preseed { target_platform: platform, unpacks_layers, lists_digests, .. } = self.preseed;
        let (mut owned, mut refused) = (Vec::new(), None);
        let mut listing = |targets: &[(ImageName, Descriptor)], left_out: &[LeftOutImage]| {
            if targets.is_empty() {
                refused = refusals::collect_refused(left_out);
                return Vec::new();
            }
            let mut targets = targets.to_vec();
            if *lists_digests {
                add_digest_names(&mut targets);
            }
            let import = ImportMark {
                count: targets.len(),
                left_out: left_out.iter().filter(|image| !image.is_foreign()).count(),
                refused: left_out.iter().filter_map(LeftOutImage::refused).collect(),
                unpacked: *unpacks_layers,
            };
            self.map_images(bundle, &targets, &import, &mut owned)
        };
        let imported = match archive {
            Ok((archive, written)) => archive.finish(job, written, &mut listing).await,
            Err(error) => Err(error),
        };
        tracing::debug!(took = ?start.elapsed(), "read {}", path.display());
        if let Err(BundleError::Store(ImageStoreError::NoSpace { .. })) = &imported {
            self.preseed.lock_memory().measured.insert(bundle.clone(), measured.clone());
        }
        if let (Err(BundleError::Image(_)), Some(refused)) = (&imported, refused) {
            self.preseed.lock_refusals().insert(bundle, platform, refused);
        }
        let ImportedImages { images, left_out } = imported.map_err(|error| error.with_path(path.clone()))?;
        let read = |image: Image| {
            let labels = self.labels.read(image.labels, &bundle.namespace, &self.wanted);
            Image { labels, ..image }
        };
        let images: Vec<_> = images.into_iter().map(read).collect();
        let brought: Vec<_> = images.iter().filter(|image| owned.contains(&image.name)).cloned().collect();
        merge_images(self.listed.entry(bundle.namespace.clone()).or_default(), images);
        let is_retryable = |image: &LeftOutImage| matches!(image.reason, LeftOutReason::Store(_));
        // What the store has refused, it may take the next time: then the bundle is read again.
        if left_out.iter().any(is_retryable) {
            self.preseed.lock_memory().left_out.remove(bundle);
        } else {
            self.preseed.lock_memory().left_out.insert(bundle.clone(), left_out.clone());
        }
        // Read again, since only what the store has now counts.
        let Some(images) = self.survey_images(bundle, &brought).await? else {
            let digest = brought[0].target.digest;
            let source = "content of the image is gone that was just imported".into();
            let source = ImageStoreError::ReadContent { digest, source };
            return Err(ImportError::Store { path, source });
        };
        self.keep_damage_records(bundle, &images).await;
        Ok(Processed { images, left_out, is_imported: true })
    }

    /// Records the damage of unpacked layers that containers use: an image that was deleted and is imported again has them, and
    /// no record.
    async fn keep_damage_records(&self, bundle: &Bundle, images: &[StoredImage]) {
        for StoredImage { target, .. } in images {
            let known = self
                .preseed
                .lock_memory()
                .states
                .damaged_layers(&bundle.namespace, *target)
                .map(str::to_owned);
            let Some(reason) = known else { continue };
            let record = DamageRecord::Layers(reason);
            let written = damage_record::write(self.store, &bundle.namespace, *target, Some(&record)).await;
            if let Err(error) = written {
                tracing::warn!("containerd can't record that {target} is damaged: {}", error_chain(&error));
            }
        }
    }

    /// What was left out of a bundle with these images; `None` if the bundle has to be read for that, or because the policy
    /// allows now what it has refused.
    async fn list_left_out(&self, bundle: &Bundle, images: &[Image]) -> Option<Vec<LeftOutImage>> {
        // Another fault is only known to the process that has read the bundle.
        if let Some(known) = self.preseed.find_left_out(bundle) {
            return Some(known);
        }
        let mut left_out = Vec::new();
        for (name, digest) in bundle.find_refused(images)? {
            let policy = self.preseed.policy.as_deref();
            let refused = import::check_policy(policy, &bundle.namespace, &name, digest).await.err()?;
            let reason = LeftOutReason::Archive(refused);
            left_out.push(LeftOutImage { name: name.to_string(), reason });
        }
        Some(left_out)
    }

    /// Leaves out the listed images that the policy refuses: it may be another one than at their import.
    async fn apply_policy(
        &self,
        bundle: &Bundle,
        images: Vec<StoredImage>,
    ) -> (Vec<StoredImage>, Vec<LeftOutImage>) {
        let (mut allowed, mut refused) = (Vec::new(), Vec::new());
        for image in images {
            match self.check_policy(&bundle.namespace, &image.name, image.target).await {
                Ok(()) => allowed.push(image),
                Err(error) => {
                    refused.push(LeftOutImage { name: image.name, reason: LeftOutReason::Archive(error) });
                }
            }
        }
        (allowed, refused)
    }

    async fn check_policy(
        &self,
        namespace: &Namespace,
        name: &str,
        digest: Digest,
    ) -> Result<(), ArchivedImageError> {
        let name = name.parse().map_err(ArchivedImageError::InvalidName)?;
        import::check_policy(self.preseed.policy.as_deref(), namespace, &name, digest).await
    }

    /// Creates the images of a bundle with their marks, and collects the names that it owns. A name of an
    /// earlier bundle keeps its target.
    fn map_images(
        &self,
        bundle: &Bundle,
        targets: &[(ImageName, Descriptor)],
        import: &ImportMark,
        owned: &mut Vec<String>,
    ) -> Vec<Image> {
        let listed = self.listed.get(&bundle.namespace).map_or(&[][..], Vec::as_slice);
        let image = |(name, target): &(ImageName, Descriptor)| {
            let mut labels: Labels = bundle.image_labels(name.as_str(), target.digest, import);
            if self.preseed.pins_images {
                labels.insert(PINNED_LABEL.0.into(), PINNED_LABEL.1.into());
            }
            let owner = find_name_owner(&self.wanted, bundle, listed, name.as_str());
            let target = match owner {
                Some((owner, first)) if owner.target.digest != target.digest => {
                    let first = first.map(|first| first.path().display().to_string());
                    tracing::warn!(
                        "{} has another image for {name} than {}, which comes first and keeps the name",
                        bundle.path().display(),
                        first.as_deref().unwrap_or("an earlier bundle")
                    );
                    // The mark has this bundle's target: the name goes over to it once the earlier bundle is
                    // gone.
                    owner.target.clone()
                }
                _ => {
                    let known = listed.iter().find(|known| known.name == name.as_str());
                    if let Some(known) = known.filter(|known| known.target.digest != target.digest) {
                        // Another client may have moved the name, and is told who moves it back.
                        let (old, new) = (known.target.digest, target.digest);
                        tracing::info!(
                            "{name} in {} goes from {old} to {new} of {}",
                            bundle.namespace,
                            bundle.path().display()
                        );
                    }
                    owned.push(name.to_string());
                    target.clone()
                }
            };
            let labels = self.labels.write(labels);
            Image { name: name.to_string(), target, labels }
        };
        targets.iter().map(image).collect()
    }
}

async fn open_bundle(bundle: &Bundle) -> Result<File, ImportError> {
    let opened = bundle.clone();
    let file = spawn_blocking(move || scan::open_bundle(&opened)).await;
    let file = file.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
    file.map_err(|source| ImportError::Open { path: bundle.path(), source })
}

fn import_job<'j>(
    preseed: &'j Preseed,
    store: &'j dyn ImageStore,
    bundle: &'j Bundle,
    measured: &'j MeasuredFiles,
    reading: &'j ReadingBundle<'_>,
) -> ImportJob<'j> {
    let Preseed { target_platform: platform, import_limits: limits, unpacks_layers, .. } = preseed;
    ImportJob {
        scope: ImageScope { store, namespace: &bundle.namespace, platform, limits },
        repository: repository_name(&bundle.file).unwrap_or_default(),
        policy: preseed.policy.as_deref(),
        unpack: *unpacks_layers,
        measured,
        progress: Some(reading.progress()),
    }
}

/// Adds the name by its digest of each image that the bundle does not have by that.
fn add_digest_names(targets: &mut Vec<(ImageName, Descriptor)>) {
    let mut known: BTreeSet<_> = targets.iter().map(|(name, _)| name.as_str().to_owned()).collect();
    let by_digest = |(name, target): &(ImageName, Descriptor)| {
        let name = name.with_digest(&target.digest)?;
        known.insert(name.to_string()).then(|| (name, target.clone()))
    };
    let more: Vec<_> = targets.iter().filter_map(by_digest).collect();
    targets.extend(more);
}

/// Updates a list of images as [`ImportSession::put_image`](crate::ImportSession::put_image) does.
fn merge_images(listed: &mut Vec<Image>, images: Vec<Image>) {
    for image in images {
        match listed.iter_mut().find(|known| known.name == image.name) {
            Some(known) => {
                known.target = image.target;
                known.labels.extend(image.labels);
                known.labels.retain(|_, value| !value.is_empty());
            }
            None => listed.push(image),
        }
    }
}

/// Applies changes of images of one namespace whose content exists. The others are planned again.
async fn apply_changes(
    store: &dyn ImageStore,
    changes: &[ImageUpdate],
    applied: &mut Vec<ImageUpdate>,
) -> Result<(), ImageStoreError> {
    let mut session = store.begin_import(&changes[0].namespace).await?;
    for change in changes {
        let image = &change.image;
        // The session keeps the content until the image refers to it.
        let (digest, size) = (Some(image.target.digest), image.target.size);
        let content = IncomingBlob { digest, size, file: image.name.clone() };
        if session.open_writer(&content).await?.is_none() {
            session.put_image(image).await?;
            log_change(change);
            applied.push(change.clone());
        }
    }
    session.finish().await
}

fn log_change(ImageUpdate { namespace, kind, image: Image { name, target, .. } }: &ImageUpdate) {
    match kind {
        ImageUpdateKind::Unpin => {
            tracing::info!("{name} in {namespace} is unpinned: no bundle brings it any more");
        }
        ImageUpdateKind::Unmark => tracing::info!("{name} in {namespace} belongs to one bundle less"),
        ImageUpdateKind::Repoint => {
            tracing::info!("{name} in {namespace} points to {} again, as its bundle has it", target.digest);
        }
    }
}

/// Looks at all content that this node needs of these images; `None` if some of it is missing or damaged, or if layers
/// should be unpacked and are not.
async fn survey_images(
    scope: ImageScope<'_>,
    images: &[Image],
    unpack: bool,
) -> Result<Option<Vec<StoredImage>>, BundleError> {
    let (mut walk, mut stored) = (ImageWalk::new(scope), Vec::new());
    // Several names often have the same target.
    let mut unpacked: BTreeMap<Digest, Option<bool>> = BTreeMap::new();
    for image in images {
        let content = match walk.follow_target(&image.target).await {
            Ok(content) if !content.runnable_images.is_empty() => content,
            Err(BundleError::Store(error)) => return Err(error.into()),
            // Missing or invalid content is no failure here: the bundle is imported again.
            _ => return Ok(None),
        };
        let is_unpacked = match unpacked.get(&image.target.digest) {
            Some(known) => *known,
            None => {
                let mut all = Some(true);
                for runnable in &content.runnable_images {
                    let this = scope.store.is_unpacked(scope.namespace, &runnable.layers).await?;
                    all = all.zip(this).map(|(all, this)| all && this);
                }
                *unpacked.entry(image.target.digest).or_insert(all)
            }
        };
        if unpack && is_unpacked == Some(false) {
            return Ok(None);
        }
        let is_unpacked = is_unpacked == Some(true);
        let (name, target) = (image.name.clone(), image.target.digest);
        let bytes = content.needed.values().sum();
        stored.push(StoredImage { name, target, bytes, is_unpacked });
    }
    Ok(Some(stored))
}
