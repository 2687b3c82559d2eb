//! Imports one bundle into a store: reads it once, and lists its images only when they are complete.

pub(crate) mod bridge;
mod index;
mod names;
pub(crate) mod progress;
mod space;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::sync::Arc;

use crate::archive::{ArchiveContents, ArchiveError, WantedFiles};
use crate::error::{ArchivedImageError, BundleError, LeftOutImage, LeftOutReason};
use crate::image::{Descriptor, Image, ImageLayer, Labels};
use crate::image_walk::{ImageScope, ImageWalk, TargetContent};
use crate::store::{ImportSession, IncomingBlob, ReadPace};
use crate::{
    Digest, DiskUsage, ImageName, ImagePolicy, ImageStoreError, ImportLimits, Namespace, OfferedImage,
};

use bridge::ArchiveReading;
use index::{ArchiveIndex, Judgement};
use names::ImageCandidates;
use progress::{ProgressReader, ReadProgress};
pub(crate) use space::MeasuredFiles;

/// The parameters of one import.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImportJob<'a> {
    pub(crate) scope: ImageScope<'a>,
    /// The repository of images with only a tag.
    pub(crate) repository: &'a str,
    /// Decides which of its images are listed; all if there is none.
    pub(crate) policy: Option<&'a dyn ImagePolicy>,
    /// True if layers are unpacked during the import.
    pub(crate) unpack: bool,
    /// The sizes of the archive's files, once it had to be measured.
    pub(crate) measured: &'a MeasuredFiles,
    /// Told the bytes of the file that were read.
    pub(crate) progress: Option<&'a Arc<ReadProgress>>,
}

/// Creates the listed images from names and targets, and those that are left out. Without targets, the import has failed.
pub(crate) type ImageMapper<'a> =
    dyn FnMut(&[(ImageName, Descriptor)], &[LeftOutImage]) -> Vec<Image> + Send + 'a;

/// The images that an archive brought, and those that it could not.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ImportedImages {
    /// The listed images; at least one.
    pub images: Vec<Image>,
    /// What was not listed, in the order of the archive.
    pub left_out: Vec<LeftOutImage>,
}

/// Imports a bundle and returns the images that it listed; an error if there is none.
pub(crate) async fn import_bundle(
    job: ImportJob<'_>,
    file: File,
    listing: &mut ImageMapper<'_>,
) -> Result<ImportedImages, BundleError> {
    let archive = JudgedArchive::judge(job, file).await?;
    let reading = archive.prepare(job, DiskUsage::default()).await?.start();
    archive.finish(job, reading, listing).await
}

/// The archive of a bundle, of which nothing is written yet.
#[derive(Debug)]
pub(crate) struct JudgedArchive {
    file: File,
    start: u64,
    index: Option<ArchiveIndex>,
    judgement: Judgement,
}

/// An archive that fits, of which nothing is written yet.
pub(crate) struct PreparedArchive {
    file: ProgressReader,
    limits: ImportLimits,
    wanted: WantedFiles,
    import: Box<dyn ImportSession>,
    /// What it takes of the disk at most; `None` if that is not known.
    pub(crate) claim: Option<DiskUsage>,
}

/// An archive whose content is being written.
#[derive(Debug)]
pub(crate) struct ReadingArchive {
    reading: ArchiveReading,
    /// As that of the prepared archive.
    pub(crate) claim: Option<DiskUsage>,
}

impl JudgedArchive {
    pub(crate) async fn judge(job: ImportJob<'_>, mut file: File) -> Result<Self, BundleError> {
        let start = file.stream_position().map_err(io_error)?;
        let index = ArchiveIndex::read(&file).await?;
        // Before anything is written: what is for another platform, or no archive of images, never is.
        let judgement = match &index {
            Some(index) => index.judge(job).await?,
            None => Judgement::default(),
        };
        Ok(Self { file, start, index, judgement })
    }

    /// The blobs that an import may write; `None` of a compressed archive, where reading it finds out.
    pub(crate) fn blobs(&self) -> Option<BTreeSet<Digest>> {
        self.index.as_ref().map(|index| index.wanted_blobs(&self.judgement))
    }

    /// Prepares to write the content, if it fits besides what other imports have claimed.
    pub(crate) async fn prepare(
        &self,
        job: ImportJob<'_>,
        claimed: DiskUsage,
    ) -> Result<PreparedArchive, BundleError> {
        let file = self.file.try_clone().map_err(io_error)?;
        let import = job.scope.store.begin_import(job.scope.namespace).await?;
        let judged = self.index.as_ref().map(|index| (index, &self.judgement));
        match space::check_archive_fits(job, &file, judged, &*import, claimed).await {
            Ok(claim) => {
                let file = ProgressReader::new(file, job.progress.cloned());
                let (limits, wanted) = (job.scope.limits.clone(), self.judgement.wanted.clone());
                Ok(PreparedArchive { file, limits, wanted, import, claim })
            }
            Err(error) => {
                finish_session(import).await;
                Err(error)
            }
        }
    }

    /// Waits until its content is written, and lists its images.
    pub(crate) async fn finish(
        mut self,
        job: ImportJob<'_>,
        reading: ReadingArchive,
        listing: &mut ImageMapper<'_>,
    ) -> Result<ImportedImages, BundleError> {
        match reading.finish(job, listing).await {
            // Nothing of it is listed yet.
            Err(BundleError::Damaged(error)) => {
                tracing::warn!(
                    "reading the archive again, for content of containerd is damaged: {}",
                    error_chain(&error)
                );
                self.file.seek(SeekFrom::Start(self.start)).map_err(io_error)?;
                let again = Self::judge(job, self.file).await?;
                again.prepare(job, DiskUsage::default()).await?.start().finish(job, listing).await
            }
            done => done,
        }
    }
}

impl PreparedArchive {
    /// Starts to write the content. Nothing is listed.
    pub(crate) fn start(self) -> ReadingArchive {
        let Self { file, limits, wanted, import, claim } = self;
        ReadingArchive { reading: ArchiveReading::start(file, limits, wanted, import), claim }
    }

    pub(crate) async fn discard(self) {
        finish_session(self.import).await;
    }
}

impl ReadingArchive {
    async fn finish(
        self,
        job: ImportJob<'_>,
        listing: &mut ImageMapper<'_>,
    ) -> Result<ImportedImages, BundleError> {
        let (mut import, read) = self.reading.finish().await;
        let done = match (&mut import, read) {
            (Some(import), Ok(contents)) => finish_import(job, &contents, &mut **import, listing).await,
            (_, Err(wrong)) => Err(wrong),
            (None, Ok(_)) => Err(ImageStoreError::BeginImport("import session lost".into()).into()),
        };
        if let Some(import) = import {
            finish_session(import).await;
        }
        done
    }
}

/// Ends a session, also after a failure, so that unneeded content is collected immediately.
async fn finish_session(import: Box<dyn ImportSession>) {
    if let Err(error) = import.finish().await {
        tracing::warn!(error = %error_chain(&error), "finishing the import failed; its unlisted content expires within a day");
    }
}

fn io_error(error: io::Error) -> BundleError {
    BundleError::Archive(ArchiveError::Io(error))
}

/// An error with its causes, for the log.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// An image that is to be listed.
#[derive(Debug)]
struct ChosenImage {
    name: ImageName,
    target: Descriptor,
    content: Arc<TargetContent>,
}

/// Completes the import once every blob is in the store.
async fn finish_import(
    job: ImportJob<'_>,
    contents: &ArchiveContents,
    import: &mut dyn ImportSession,
    listing: &mut ImageMapper<'_>,
) -> Result<ImportedImages, BundleError> {
    let candidates = names::find_candidates(job, contents, import).await?;
    let (mut chosen, mut left_out) = choose_images(job, candidates).await?;
    // Another image may have brought it, and may be removed before this one is listed.
    let needed = chosen.iter().flat_map(|image| &image.content.needed).map(|(digest, size)| (*digest, *size));
    keep_existing_content(needed.collect(), contents, import).await?;
    let mut labels: BTreeMap<Digest, Labels> = BTreeMap::new();
    if job.unpack {
        unpack_images(job, import, &mut chosen, &mut left_out, &mut labels).await?;
    }
    // An archive with a damaged file lacks what that file should be.
    for LeftOutImage { reason, .. } in &mut left_out {
        if let LeftOutReason::Archive(ArchivedImageError::MissingContent { what, .. }) = reason
            && let Some((file, found)) = contents.find_damaged(what)
        {
            let file = file.to_owned();
            *reason = LeftOutReason::Archive(ArchivedImageError::DigestMismatch { file, found });
        }
    }
    if chosen.is_empty() {
        // Told what is left out: nothing is listed.
        listing(&[], &left_out);
        return Err(main_reason(left_out));
    }
    for (digest, more) in chosen.iter().flat_map(|image| &image.content.labels) {
        labels.entry(*digest).or_default().extend(more.clone());
    }
    // Labels before images: from the moment in which an image is listed, it keeps all of its content.
    for (digest, labels) in labels.iter().filter(|(_, labels)| !labels.is_empty()) {
        import.label_content(digest, labels).await?;
    }
    // Last: until here, no image of the bundle is listed.
    let targets: Vec<_> = chosen.into_iter().map(|image| (image.name, image.target)).collect();
    let images = listing(&targets, &left_out);
    for image in &images {
        import.put_image(image).await?;
    }
    Ok(ImportedImages { images, left_out })
}

/// The reason why a bundle has no image at all: a fault rather than what is only not for this node.
fn main_reason(left_out: Vec<LeftOutImage>) -> BundleError {
    // The error has room for one, and an operator allows them together.
    for image in left_out.iter().filter(|image| left_out.len() > 1 && image.refused().is_some()) {
        tracing::error!("left out {image}");
    }
    match left_out.into_iter().min_by_key(LeftOutImage::is_foreign).map(|image| image.reason) {
        Some(LeftOutReason::Archive(error)) => error.into(),
        Some(LeftOutReason::Store(error)) => BundleError::Refused(error),
        None => ArchivedImageError::Unnamed.into(),
    }
}

/// Keeps needed content that the archive lacks but the store already had.
async fn keep_existing_content(
    mut needed: BTreeMap<Digest, u64>,
    contents: &ArchiveContents,
    import: &mut dyn ImportSession,
) -> Result<(), BundleError> {
    for digest in contents.blob_digests() {
        needed.remove(&digest);
    }
    for (digest, size) in needed {
        let incoming = IncomingBlob { digest: Some(digest), size, file: digest.to_string() };
        if import.open_writer(&incoming).await?.is_some() {
            let by = "the archive".to_owned();
            return Err(ArchivedImageError::MissingContent { what: digest.to_string(), by }.into());
        }
    }
    Ok(())
}

/// Chooses the one image for this platform of each name.
async fn choose_images(
    job: ImportJob<'_>,
    candidates: ImageCandidates,
) -> Result<(Vec<ChosenImage>, Vec<LeftOutImage>), BundleError> {
    let mut walk = ImageWalk::new(job.scope);
    let leave_out = |(name, error)| LeftOutImage { name, reason: LeftOutReason::Archive(error) };
    let mut left_out: Vec<_> = candidates.left_out.into_iter().map(leave_out).collect();
    let mut chosen = Vec::new();
    for (name, targets) in candidates.named {
        match choose_target(job, &mut walk, &name, &targets).await {
            Ok((target, content)) => chosen.push(ChosenImage { name, target, content }),
            Err(BundleError::Image(error)) => left_out.push(leave_out((name.to_string(), error))),
            Err(error) => return Err(error),
        }
    }
    Ok((chosen, left_out))
}

/// Asks the policy whether an image may be listed.
pub(crate) async fn check_policy(
    policy: Option<&dyn ImagePolicy>,
    namespace: &Namespace,
    name: &ImageName,
    digest: Digest,
) -> Result<(), ArchivedImageError> {
    let Some(policy) = policy else { return Ok(()) };
    let checked = policy.check_image(OfferedImage { namespace, name, digest: &digest }).await;
    checked.map_err(|reason| ArchivedImageError::NotAllowed { name: name.clone(), digest, reason })
}

/// A name may have several targets, such as one for each platform: exactly one has to be for this node.
async fn choose_target(
    job: ImportJob<'_>,
    walk: &mut ImageWalk<'_>,
    name: &ImageName,
    targets: &[Descriptor],
) -> Result<(Descriptor, Arc<TargetContent>), BundleError> {
    let (mut fitting, mut available, mut artifact) = (Vec::new(), Vec::new(), None);
    for target in targets {
        let allowed = check_policy(job.policy, job.scope.namespace, name, target.digest).await;
        let content = match walk.follow_target(target).await {
            // An image that is refused is not read, so that it lacks content.
            Err(BundleError::Image(error)) => return Err(allowed.err().unwrap_or(error).into()),
            followed => followed?,
        };
        available.extend(content.others.iter().cloned());
        artifact = artifact.or_else(|| content.artifact.clone());
        if !content.runnable_images.is_empty() {
            allowed?;
            fitting.push((target.clone(), content));
        }
    }
    let error = match (fitting.len(), artifact) {
        (1, _) => return Ok(fitting.remove(0)),
        (0, Some(media_type)) if available.is_empty() => ArchivedImageError::NotAnImage { media_type },
        (0, _) => {
            let (name, wanted) = (name.clone(), job.scope.platform.clone());
            ArchivedImageError::PlatformMismatch { name, wanted, available }
        }
        _ => ArchivedImageError::DuplicateName { name: name.clone() },
    };
    Err(error.into())
}

/// Compares layers with their digests. Those that are damaged don't exist from then on.
async fn has_damaged_layer(job: ImportJob<'_>, layers: &[ImageLayer]) -> Result<bool, ImageStoreError> {
    let (ImageScope { store, namespace, .. }, pace) = (job.scope, ReadPace::new(None));
    let mut is_any_damaged = false;
    for ImageLayer { blob, .. } in layers {
        is_any_damaged |= !store.verify_content(namespace, &blob.digest, blob.size, &pace).await?;
    }
    Ok(is_any_damaged)
}

/// Unpacks the layers of each image, and leaves out those that the store refuses to unpack.
async fn unpack_images(
    job: ImportJob<'_>,
    import: &mut dyn ImportSession,
    chosen: &mut Vec<ChosenImage>,
    left_out: &mut Vec<LeftOutImage>,
    labels: &mut BTreeMap<Digest, Labels>,
) -> Result<(), BundleError> {
    let mut refused: BTreeMap<Digest, Arc<ImageStoreError>> = BTreeMap::new();
    let mut damaged = None;
    let mut unpacked = BTreeSet::new();
    for image in &*chosen {
        if !unpacked.insert(image.target.digest) {
            continue;
        }
        for runnable in &image.content.runnable_images {
            match import.unpack_layers(&job.measured.with_usage(&runnable.layers)).await {
                Ok(keep) => labels.entry(runnable.config).or_default().extend(keep),
                // A full disk refuses all that follows as well.
                Err(error @ ImageStoreError::NoSpace { .. }) => return Err(error.into()),
                // Layers that the store had are not compared unless it can't unpack them: the archive is not to blame then.
                Err(error) if has_damaged_layer(job, &runnable.layers).await? => {
                    damaged.get_or_insert(error);
                }
                Err(error) => drop(refused.insert(image.target.digest, Arc::new(error))),
            }
        }
    }
    if let Some(error) = damaged {
        return Err(BundleError::Damaged(error));
    }
    chosen.retain(|image| match refused.get(&image.target.digest) {
        None => true,
        Some(error) => {
            let reason = LeftOutReason::Store(Arc::clone(error));
            left_out.push(LeftOutImage { name: image.name.to_string(), reason });
            false
        }
    });
    Ok(())
}
