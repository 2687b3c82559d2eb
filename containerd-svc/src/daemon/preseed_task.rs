//! The import of bundles as a runnable below its containerd.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure, Runnable};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Containerd;
use super::bundle_watch::BundleWatch;
use super::stop_mark::StopMark;
use crate::containerd::{ContainerdImages, ImageEvent, ImageEvents, daemon_version};
use crate::cri::{CRI_NAMESPACE, list_cri_images};
use crate::import::error_chain;
use crate::preseed::{
    BundleOutcome, ImageProof, ImageStage, PassScope, Preseed, PreseedError, PreseedReport, ProofKind,
    retry_pause,
};
use crate::scan::AbsentDirectory;
use crate::store::ReadPace;
use crate::{DiskReserve, Image, ImageStore as _, ImageStoreError, ImportError, Namespace};

/// Maximum time until the tree reports the exit of a containerd that does not answer; after that, it is still
/// running.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time without another image in the list of the CRI, until those that it does not list count as rejected by it.
/// 1.6 lists images of other clients with a delay.
const CRI_LIST_TIMEOUT: Duration = Duration::from_secs(3);

/// Pause between two lists of the CRI.
const CRI_LIST_PAUSE: Duration = Duration::from_millis(50);

/// Minimum time between two imports of deleted images: a kubelet that frees a full disk deletes images every five
/// minutes, where they have no pins.
const REIMPORT_INTERVAL: Duration = Duration::from_secs(600);

/// The pause after which a comparison that has failed is tried again.
const PROOF_RETRY_PAUSE: Duration = Duration::from_secs(300);

/// The bytes per second that are compared with digests after a power cut, while the node works.
const PROOF_BYTES_PER_SECOND: u64 = 32 << 20;

/// The file in containerd's directory of persistent data with the bundles that are refused.
const REFUSALS_FILE: &str = "refused-bundles.json";

/// Bundles that a failure names with their reasons; the log has all of them.
const MAX_NAMED_FAILURES: usize = 5;

/// The parts of a containerd that the import of the bundles needs.
#[derive(Debug, Clone)]
pub(super) struct PreseedTask {
    preseed: Preseed,
    socket: PathBuf,
    root: PathBuf,
    disk_reserve: DiskReserve,
    has_cri: bool,
    mark: StopMark,
}

/// Creates a runnable that imports once its containerd is ready, and again what is deleted: see [`Containerd`].
///
/// If the store failed because containerd exited, that is containerd's failure only: this runnable is
/// cancelled with it.
pub(super) fn preseed_runnable(containerd: String, task: PreseedTask) -> impl Runnable {
    move |ctx: Context| {
        let (containerd, task) = (containerd.clone(), task.clone());
        async move {
            ctx.wait_ready(&containerd).await?;
            let failure = tokio::select! {
                biased;
                cancelled = ctx.canceled() => return Err(cancelled.into()),
                failed = task.keep_images(&ctx) => match failed { Err(failure) => failure },
            };
            // The daemon may be about to exit. Its own runnable then fails and cancels this one, which is not
            // to blame.
            if daemon_version(&task.socket).await.is_err()
                && let Ok(cancelled) = timeout(EXIT_TIMEOUT, ctx.canceled()).await
            {
                return Err(cancelled.into());
            }
            Err(failure)
        }
    }
}

impl PreseedTask {
    pub(super) fn new(containerd: &Containerd, preseed: Preseed, has_cri: bool, mark: StopMark) -> Self {
        preseed.set_refusal_file(containerd.layout.data_dir().join(REFUSALS_FILE));
        Self {
            preseed,
            socket: containerd.layout.socket_path(),
            root: containerd.layout.root_dir(),
            disk_reserve: containerd.disk_reserve,
            has_cri,
            mark,
        }
    }

    /// Imports the bundles, and imports them again when one of their images is deleted, or what has failed may be
    /// repaired. It is ready while the required images exist, and returns only an error.
    async fn keep_images(&self, ctx: &Context) -> Result<Infallible, Failure> {
        let store = ContainerdImages::connect(&self.socket).await?;
        let store = self.preseed.set_up_store(store.with_disk(&self.root, self.disk_reserve));
        let mark = self.mark.clone();
        let mut proof = spawn_blocking(move || mark.begin()).await??.then(PowerCutProof::default);
        let namespace = CRI_NAMESPACE.parse()?;
        // Before the first import: no deletion that follows it is missed.
        let mut events = ImageEvents::subscribe(&self.socket, &namespace).await?;
        let (mut limit, mut retries, mut scope) = (ReimportLimit::default(), 0, PassScope::All);
        // The space of killed imports is freed before this task begins an import of its own.
        store.discard_abandoned_imports().await?;
        let mut directories = self.preseed.watch_directories();
        let (mut is_ready, mut last) = (false, PassResult::default());
        // Until a pass has read the directory, nothing is known of its bundles.
        last.report.is_empty = true;
        let _running = self.preseed.begin_run();
        loop {
            // Before the pass: a bundle that is replaced while it is read is taken by the next one, and so are other directories.
            directories.mark_unchanged();
            let watch = self.watch_bundles().await;
            self.preseed.begin_pass();
            let problem = match self.import_bundles(&store, ctx, scope, &mut is_ready).await {
                Ok(result) => {
                    last = result;
                    self.find_problem(&last)
                }
                // It may be mounted or created later, which is noticed.
                Err(PassFailure::Directory(error)) => {
                    let problem = error_chain(&error);
                    tracing::error!("{problem}");
                    if !is_ready {
                        ctx.signal_not_ready(problem.clone())?;
                    }
                    Some(problem)
                }
                // The images that are there stay there: only without containerd are they lost.
                Err(PassFailure::Store(failure))
                    if is_ready && daemon_version(&self.socket).await.is_ok() =>
                {
                    tracing::error!("{failure}");
                    Some(failure.to_string())
                }
                Err(PassFailure::Store(failure)) => return Err(failure),
            };
            retries = if problem.is_some() { retries + 1 } else { 0 };
            // Each bundle has a pause of its own; a pass also looks for what is new, and asks the CRI again.
            let now = Instant::now();
            let retry_at = problem.is_some().then(|| now + retry_pause(retries));
            // One that is still due is one that the pass could not get to.
            let next_due = self.preseed.next_due().filter(|at| *at > now);
            let retry_at = retry_at.into_iter().chain(next_due).min();
            self.preseed.set_problem(problem);
            self.preseed.end_pass();
            scope = PassScope::All;
            // The pass has repaired what was found, unless it is named.
            if proof.as_ref().is_some_and(PowerCutProof::is_complete) && self.find_damaged().is_none() {
                let mark = self.mark.clone();
                spawn_blocking(move || mark.settle()).await??;
                proof = None;
            }
            let missing = tokio::select! {
                biased;
                missing = wait_missing(&store, &mut events, &last.report) => missing?,
                changed = wait_changed(watch.as_ref()) => {
                    changed?;
                    continue;
                }
                () = sleep_until_some(retry_at) => {
                    scope = PassScope::Due;
                    continue;
                }
                () = self.preseed.wait_request() => continue,
                // The sender is alive as long as this value.
                Ok(()) = directories.changed() => continue,
                // What no bundle names is not compared: its disk may not be mounted yet.
                () = self.prove_images(&store, &last.report, &mut proof), if !last.report.is_empty => continue,
            };
            let now = Instant::now();
            let due = limit.next_import(now);
            self.preseed.record_missing(&missing);
            let reason = describe_missing(&missing, due > now);
            tracing::warn!("{reason}");
            // An image that nobody waits for is imported again without taking anything back.
            if is_ready && missing.iter().any(|image| last.required.contains(image)) {
                ctx.signal_not_ready(reason)?;
                is_ready = false;
            }
            tokio::select! {
                biased;
                // What an operator imports does not count.
                restored = wait_restored(&store, &mut events, &last.report) => restored?,
                changed = wait_changed(watch.as_ref()) => changed?,
                () = self.preseed.wait_request() => {}
                Ok(()) = directories.changed() => {}
                () = sleep_until(due) => limit.record_import(due),
            }
        }
    }

    /// Watches the bundles; `None` if they can't be watched.
    async fn watch_bundles(&self) -> Option<BundleWatch> {
        let directories = self.preseed.directories();
        let watch = spawn_blocking(move || BundleWatch::new(&directories));
        match watch.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic())) {
            Ok(watch) => Some(watch),
            Err(error) => {
                tracing::warn!(
                    "new bundles are imported at the next restart only: can't watch the preseed directories: {error}"
                );
                None
            }
        }
    }

    /// Runs one pass, and is ready as soon as the required images are there and the CRI lists them, or has rejected them;
    /// an error if the directory or the store failed.
    async fn import_bundles(
        &self,
        store: &ContainerdImages,
        ctx: &Context,
        scope: PassScope,
        is_ready: &mut bool,
    ) -> Result<PassResult, PassFailure> {
        let (send, processed) = oneshot::channel();
        let pass = self.preseed.run_pass(store, scope, Some(send));
        let release = async {
            // Without names, the pass has failed, and says why.
            let Ok(required) = processed.await else { return Ok(Vec::new()) };
            self.wait_listed(store, &required).await?;
            // containerd also fails for the sake of a bundle, of a layer that is no tar for one: only its silence is a
            // failure of the store, and while it lasts, no image can be relied on.
            daemon_version(&self.socket).await?;
            // What has failed is named once the pass is over: others start with the images that there are.
            if !*is_ready {
                ctx.signal_ready()?;
                *is_ready = true;
            }
            Ok::<_, Failure>(required)
        };
        let (report, required) = tokio::join!(pass, release);
        let report = report.map_err(|error| match error {
            PreseedError::ListBundles { .. } => PassFailure::Directory(error),
            PreseedError::ListImages(_) => PassFailure::Store(error.into()),
        })?;
        let required = required?;
        // A full disk is a failure of the bundles that do not fit, and not of the store: others may fit.
        if report.outcomes.iter().any(is_out_of_space) {
            tracing::error!("{}", describe_free_space(&self.root));
        }
        let names: Vec<_> =
            imported_images(&report).map(|(namespace, name)| (namespace.clone(), name.clone())).collect();
        let unlisted = self.wait_listed(store, &names).await?;
        if self.has_cri {
            let namespace = CRI_NAMESPACE.parse().map_err(Failure::from)?;
            self.preseed.record_answers(&namespace, &unlisted);
        }
        Ok(PassResult { report, unlisted, required })
    }

    /// Waits until the CRI lists these images, or has rejected them; returns those.
    async fn wait_listed(
        &self,
        store: &ContainerdImages,
        images: &[(Namespace, String)],
    ) -> Result<Unlisted, Failure> {
        let of_cri = images.iter().filter(|(namespace, _)| namespace.as_str() == CRI_NAMESPACE);
        let names: BTreeSet<_> = of_cri.map(|(_, name)| name.clone()).collect();
        if !self.has_cri || names.is_empty() {
            return Ok(Unlisted::default());
        }
        wait_listed(&self.socket, store, &names).await
    }

    /// Compares the images of the bundles with their digests after a power cut, and returns once that is complete; a pass then
    /// repairs what is damaged.
    async fn prove_images(
        &self,
        store: &ContainerdImages,
        report: &PreseedReport,
        proof: &mut Option<PowerCutProof>,
    ) {
        let Some(proof) = proof.as_mut().filter(|proof| !proof.has_ended) else {
            return std::future::pending().await;
        };
        if proof.images.is_none() {
            proof.covers_all = report.failures().is_empty();
        }
        loop {
            sleep_until_some(Some(proof.next_at.unwrap_or_else(Instant::now))).await;
            let done = self.prove_some_images(store, &mut proof.images).await;
            self.preseed.set_proof_progress(None);
            match done {
                Ok(()) => {
                    proof.covers_all &=
                        proof.images.as_ref().is_some_and(|images| images.not_compared().is_empty());
                    proof.has_ended = true;
                    return;
                }
                Err(error) => {
                    tracing::error!("comparing images with their digests failed: {}", error_chain(&error));
                    proof.next_at = Some(Instant::now() + PROOF_RETRY_PAUSE);
                }
            }
        }
    }

    async fn prove_some_images(
        &self,
        store: &ContainerdImages,
        proof: &mut Option<ImageProof>,
    ) -> Result<(), ImageStoreError> {
        if proof.is_none() {
            let images = list_preseeded(store, &self.preseed).await?;
            tracing::info!("after a power cut: comparing {} images with their digests", images.len());
            *proof = Some(ImageProof::new(store, &self.preseed, &images, ProofKind::Discard).await?);
        }
        let Some(proof) = proof else { return Ok(()) };
        let report = |proof: &ImageProof| {
            self.preseed.set_proof_progress(Some((proof.done_bytes(), proof.total_bytes())));
        };
        // Begun anew each time: the pace makes up for no pause.
        let pace = ReadPace::new(Some(PROOF_BYTES_PER_SECOND));
        proof.run(store, &self.preseed, &pace, report).await?;
        let (damaged, all) = (proof.damaged().len(), proof.image_count());
        tracing::info!("compared {all} images with their digests: {damaged} are damaged");
        Ok(())
    }

    /// The first image that is damaged, and the reason why it is not repaired.
    fn find_damaged(&self) -> Option<String> {
        let states = self.preseed.image_states();
        let damaged = states.iter().find(|state| state.stage == ImageStage::Damaged)?;
        let (name, problem) = (damaged.name.as_deref()?, damaged.problem.as_deref()?);
        Some(format!("image {name} is damaged: {problem}"))
    }

    /// The reason why not all images are there.
    fn find_problem(&self, PassResult { report, unlisted, .. }: &PassResult) -> Option<String> {
        describe_failures(report, unlisted).or_else(|| self.find_damaged())
    }
}

/// The comparison of the images with their digests after a power cut.
#[derive(Debug, Default)]
struct PowerCutProof {
    images: Option<ImageProof>,
    /// The time of the next attempt, after one that has failed.
    next_at: Option<Instant>,
    /// True if all bundles were read when it began, and there was room to compare. Else the next start compares again.
    covers_all: bool,
    has_ended: bool,
}

impl PowerCutProof {
    fn is_complete(&self) -> bool {
        self.has_ended && self.covers_all
    }
}

/// The images of bundles that the store lists.
async fn list_preseeded(
    store: &ContainerdImages,
    preseed: &Preseed,
) -> Result<Vec<(Namespace, Image)>, ImageStoreError> {
    let states = preseed.image_states();
    let wanted: BTreeSet<_> =
        states.iter().filter_map(|state| Some((&state.namespace, state.name.as_deref()?))).collect();
    let namespaces: BTreeSet<_> = states.iter().map(|state| &state.namespace).collect();
    let mut images = Vec::new();
    for namespace in namespaces {
        let listed = store.list_images(namespace).await?.into_iter();
        let listed = listed.filter(|image| wanted.contains(&(namespace, image.name.as_str())));
        images.extend(listed.map(|image| (namespace.clone(), image)));
    }
    Ok(images)
}

/// The result of a pass.
#[derive(Debug, Default)]
struct PassResult {
    report: PreseedReport,
    unlisted: Unlisted,
    /// The images that others wait for.
    required: Vec<(Namespace, String)>,
}

/// The reason why a pass has not looked at all bundles.
#[derive(Debug)]
enum PassFailure {
    Directory(PreseedError),
    Store(Failure),
}

impl From<Failure> for PassFailure {
    fn from(failure: Failure) -> Self {
        Self::Store(failure)
    }
}

async fn wait_changed(watch: Option<&BundleWatch>) -> std::io::Result<()> {
    match watch {
        Some(watch) => watch.wait().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The images that the store lists and the CRI does not.
type Unlisted = BTreeSet<String>;

fn is_out_of_space(outcome: &BundleOutcome) -> bool {
    matches!(
        outcome,
        BundleOutcome::Failed(ImportError::Store { source: ImageStoreError::NoSpace { .. }, .. })
    )
}

/// The images that bundles bring.
fn imported_images(report: &PreseedReport) -> impl Iterator<Item = (&Namespace, &String)> {
    let images = report.outcomes.iter().filter_map(BundleOutcome::images);
    images.flat_map(|(namespace, names)| names.iter().map(move |name| (namespace, name)))
}

/// Returns whether an event concerns an image that a bundle brings.
fn is_brought(report: &PreseedReport, event: &ImageEvent) -> bool {
    imported_images(report)
        .any(|(namespace, name)| namespace.as_str() == event.namespace && *name == event.name)
}

/// The images of the bundles that don't exist.
async fn list_missing(
    store: &ContainerdImages,
    report: &PreseedReport,
) -> Result<Vec<(Namespace, String)>, Failure> {
    let mut missing = Vec::new();
    let namespaces: BTreeSet<_> = imported_images(report).map(|(namespace, _)| namespace).collect();
    for namespace in namespaces {
        let listed: BTreeSet<_> =
            store.list_images(namespace).await?.into_iter().map(|image| image.name).collect();
        let brought =
            imported_images(report).filter(|(of, name)| *of == namespace && !listed.contains(*name));
        missing.extend(brought.map(|(namespace, name)| (namespace.clone(), name.clone())));
    }
    Ok(missing)
}

/// Waits until one of the images of the bundles was deleted and doesn't exist; returns all that don't.
async fn wait_missing(
    store: &ContainerdImages,
    events: &mut ImageEvents,
    report: &PreseedReport,
) -> Result<Vec<(Namespace, String)>, Failure> {
    loop {
        let event = events.next().await?;
        if event.is_deletion && is_brought(report, &event) {
            // The event may be old: the image may exist again by now, and others may be gone, too.
            let missing = list_missing(store, report).await?;
            if !missing.is_empty() {
                return Ok(missing);
            }
        }
    }
}

/// Waits until an operator has imported the missing images.
async fn wait_restored(
    store: &ContainerdImages,
    events: &mut ImageEvents,
    report: &PreseedReport,
) -> Result<(), Failure> {
    loop {
        let event = events.next().await?;
        if !event.is_deletion && is_brought(report, &event) && list_missing(store, report).await?.is_empty() {
            return Ok(());
        }
    }
}

/// The rate at which deleted images are imported again: at once, but not more than once in [`REIMPORT_INTERVAL`],
/// since a kubelet that frees a full disk may delete them each time.
#[derive(Debug, Default)]
struct ReimportLimit {
    last: Option<Instant>,
}

impl ReimportLimit {
    /// The time at which images that are missing now are imported.
    fn next_import(&self, now: Instant) -> Instant {
        self.last.map_or(now, |last| now.max(last + REIMPORT_INTERVAL))
    }

    fn record_import(&mut self, at: Instant) {
        self.last = Some(at);
    }
}

fn describe_missing(missing: &[(Namespace, String)], waits: bool) -> String {
    let mut text = format!("image {} was deleted", missing[0].1);
    if missing.len() > 1 {
        text += &format!(", and {} more", missing.len() - 1);
    }
    text += ": importing it again";
    if waits {
        let minutes = REIMPORT_INTERVAL.as_secs() / 60;
        text += &format!(
            " {minutes} minutes after the last time, unless an operator imports it before; where the kubelet deletes it to free a \
             full disk (containerd 1.6 has no pins), remove its bundle or enlarge the disk"
        );
    }
    text
}

/// Waits until the CRI lists all of these names; returns those that it does not list. Names that the store no longer
/// lists don't count: they were deleted during the wait, which is an event.
async fn wait_listed(
    socket: &Path,
    store: &ContainerdImages,
    names: &BTreeSet<String>,
) -> Result<Unlisted, Failure> {
    let namespace = CRI_NAMESPACE.parse()?;
    let (mut deadline, mut fewest) = (Instant::now() + CRI_LIST_TIMEOUT, usize::MAX);
    loop {
        let listed = list_cri_images(socket).await?;
        if names.is_subset(&listed) {
            return Ok(Unlisted::default());
        }
        // The CRI may lag behind the store, so that only names that the store has are waited for.
        let stored: BTreeSet<_> =
            store.list_images(&namespace).await?.into_iter().map(|image| image.name).collect();
        let missing: Unlisted =
            names.difference(&listed).filter(|name| stored.contains(*name)).cloned().collect();
        // It lists them one by one, on a slow machine with many images for longer than the deadline.
        if missing.len() < fewest {
            (deadline, fewest) = (Instant::now() + CRI_LIST_TIMEOUT, missing.len());
        }
        if missing.is_empty() || Instant::now() >= deadline {
            return Ok(missing);
        }
        sleep(CRI_LIST_PAUSE).await;
    }
}

/// Names the directories that are absent, the bundles that are not imported, and the images that the CRI does not list, if there are any.
fn describe_failures(report: &PreseedReport, unlisted: &Unlisted) -> Option<String> {
    let unlisted: Vec<_> = unlisted.iter().cloned().collect();
    let mut parts: Vec<_> = report.absent_directories.iter().map(AbsentDirectory::describe).collect();
    let failures = report.bundle_failures();
    if !failures.is_empty() {
        let (failed, all) = (failures.len(), report.outcomes.len());
        parts.push(format!("{failed} of {all} bundles are not imported: {}", name_first(&failures)));
    }
    // Of a namespace, or of an archive that is not there: no bundle that could be counted.
    let others = report.other_failures();
    if !others.is_empty() {
        parts.push(name_first(&others));
    }
    if !unlisted.is_empty() {
        let (missing, all) = (unlisted.len(), imported_images(report).count());
        parts.push(format!(
            "the CRI does not list {missing} of {all} preseeded images, see containerd's log for why: {}",
            name_first(&unlisted)
        ));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// The first of these texts, and how many more there are.
fn name_first(texts: &[String]) -> String {
    let mut text = texts[..texts.len().min(MAX_NAMED_FAILURES)].join("; ");
    if texts.len() > MAX_NAMED_FAILURES {
        text += &format!("; and {} more, which the log names", texts.len() - MAX_NAMED_FAILURES);
    }
    text
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
    fn deleted_images_are_imported_again_at_once_and_then_once_in_an_interval() {
        let (mut limit, start) = (ReimportLimit::default(), Instant::now());
        assert_eq!(limit.next_import(start), start);
        assert_eq!(limit.next_import(start), start, "what an operator imports does not count");
        limit.record_import(start);
        let soon = start + Duration::from_secs(1);
        assert_eq!(limit.next_import(soon), start + REIMPORT_INTERVAL);
        limit.record_import(start + REIMPORT_INTERVAL);
        let later = start + REIMPORT_INTERVAL * 3;
        assert_eq!(limit.next_import(later), later);
    }

    #[test]
    fn a_status_names_a_deleted_image_and_how_long_it_stays_deleted() {
        let missing =
            ["a:1", "b:1"].map(|name| (CRI_NAMESPACE.parse().expect("a namespace"), name.to_owned()));
        assert_eq!(
            describe_missing(&missing, false),
            "image a:1 was deleted, and 1 more: importing it again"
        );
        let text = describe_missing(&missing[..1], true);
        assert!(text.starts_with("image a:1 was deleted: importing it again 10 minutes after"), "{text}");
    }

    #[test]
    fn what_is_required_and_in_no_bundle_counts_as_no_bundle() {
        let absent = vec!["pause.tar".parse().expect("a file")];
        let report = PreseedReport { absent, ..PreseedReport::default() };
        let text = describe_failures(&report, &Unlisted::default()).expect("one is absent");
        assert_eq!(text, "pause.tar is required, and in no bundle");
    }

    #[test]
    fn images_that_the_cri_rejects_are_named_with_their_number() {
        let report = PreseedReport::default();
        assert_eq!(describe_failures(&report, &Unlisted::default()), None);
        let unlisted = (0..7).map(|number| format!("localhost/{number}:1")).collect();
        let error = describe_failures(&report, &unlisted).expect("some are missing");
        assert!(error.contains("does not list 7") && error.contains("localhost/4:1"), "{error}");
        assert!(error.ends_with("and 2 more, which the log names"), "{error}");
    }

    #[test]
    fn free_space_is_given_in_bytes_and_inodes() {
        let text = describe_free_space(Path::new("/"));
        let numbers: Vec<u64> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(matches!(numbers[..], [free, all, inodes, of] if free <= all && inodes <= of), "{text}");
        assert!(describe_free_space(Path::new("/nowhere/at/all")).contains("is unknown"));
    }
}
