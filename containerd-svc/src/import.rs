//! Imports one bundle into a store: reads it once, and lists its images only when they are complete.

mod bridge;
mod names;
mod space;

use std::collections::BTreeMap;
use std::fs::File;

use crate::archive::ArchiveContents;
use crate::error::{ArchivedImageError, BundleError};
use crate::image::{Descriptor, Image};
use crate::image_walk::{ImageScope, ImageWalk};
use crate::store::{ImportSession, IncomingBlob};
use crate::{ImageName, ImageStoreError};

use names::ImageCandidates;
pub(crate) use space::MeasuredFiles;

/// The parameters of one import.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImportJob<'a> {
    pub(crate) scope: ImageScope<'a>,
    /// The repository of images with only a tag.
    pub(crate) repository: &'a str,
    /// True if layers are unpacked during the import.
    pub(crate) unpack: bool,
    /// The sizes of the archive's files, once it had to be measured.
    pub(crate) measured: &'a MeasuredFiles,
}

/// Creates the listed images from names and targets.
pub(crate) type ImageMapper<'a> = dyn FnMut(&[(ImageName, Descriptor)]) -> Vec<Image> + Send + 'a;

/// Imports a bundle and returns the images that it listed.
pub(crate) async fn import_bundle(
    job: ImportJob<'_>,
    file: File,
    listing: &mut ImageMapper<'_>,
) -> Result<Vec<Image>, BundleError> {
    let import = job.scope.store.begin_import(job.scope.namespace).await?;
    let (mut import, read) = match space::check_archive_fits(job, &file, &*import).await {
        // The session moves to the thread that reads the archive, and comes back with the result.
        Ok(()) => bridge::read_archive(file, job.scope.limits.clone(), import).await,
        Err(error) => (Some(import), Err(error)),
    };
    let done = match (&mut import, read) {
        (Some(import), Ok(contents)) => finish_import(job, &contents, &mut **import, listing).await,
        (_, Err(wrong)) => Err(wrong),
        (None, Ok(_)) => Err(ImageStoreError::BeginImport("import session lost".into()).into()),
    };
    // Also after a failure, so that unneeded content is collected immediately.
    let finished = match import {
        Some(import) => import.finish().await,
        None => Ok(()),
    };
    if let Err(error) = finished {
        tracing::warn!(error = %error_chain(&error), "finishing the import failed; its unlisted content expires within a day");
    }
    done
}

/// An error with its causes, for the log.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Completes the import once every blob is in the store.
async fn finish_import(
    job: ImportJob<'_>,
    contents: &ArchiveContents,
    import: &mut dyn ImportSession,
    listing: &mut ImageMapper<'_>,
) -> Result<Vec<Image>, BundleError> {
    let candidates = names::find_candidates(job, contents, import).await?;
    let mut walk = ImageWalk::new(job.scope);
    let targets = choose_images(&mut walk, job, candidates).await?;
    // Another image may have brought it, and may be removed before this one is listed.
    keep_existing_content(&walk, contents, import).await?;
    let mut labels = std::mem::take(&mut walk.labels);
    if job.unpack {
        for runnable in &walk.runnable_images {
            let unpacked = import.unpack_layers(&runnable.layers).await?;
            labels.entry(runnable.config).or_default().extend(unpacked);
        }
    }
    // Labels before images: from the moment in which an image is listed, it keeps all of its content.
    for (digest, labels) in labels.iter().filter(|(_, labels)| !labels.is_empty()) {
        import.label_content(digest, labels).await?;
    }
    // Last: until here, no image of the bundle is listed.
    let images = listing(&targets);
    for image in &images {
        import.put_image(image).await?;
    }
    Ok(images)
}

/// Keeps needed content that the archive lacks but the store already had.
async fn keep_existing_content(
    walk: &ImageWalk<'_>,
    contents: &ArchiveContents,
    import: &mut dyn ImportSession,
) -> Result<(), BundleError> {
    let mut rest: BTreeMap<_, _> = walk.needed.iter().collect();
    for digest in contents.blob_digests() {
        rest.remove(&digest);
    }
    for (digest, size) in rest {
        let incoming = IncomingBlob { digest: Some(*digest), size: *size, file: digest.to_string() };
        if import.open_writer(&incoming).await?.is_some() {
            let by = "the archive".to_owned();
            return Err(ArchivedImageError::MissingContent { what: digest.to_string(), by }.into());
        }
    }
    Ok(())
}

/// Chooses the one image for this platform of each name.
async fn choose_images(
    walk: &mut ImageWalk<'_>,
    job: ImportJob<'_>,
    candidates: ImageCandidates,
) -> Result<Vec<(ImageName, Descriptor)>, BundleError> {
    let mut chosen = Vec::new();
    for (name, targets) in candidates {
        // A name may have several targets, such as one for each platform: exactly one has to be for this node.
        let (mut fitting, mut available) = (Vec::new(), Vec::new());
        for target in targets {
            let fit = walk.follow_target(&target).await?;
            available.extend(fit.others);
            fitting.extend(fit.runs.then_some(target));
        }
        match fitting.len() {
            1 => chosen.extend(fitting.pop().map(|target| (name, target))),
            0 => {
                return Err(ArchivedImageError::PlatformMismatch {
                    name,
                    wanted: job.scope.platform.clone(),
                    available,
                }
                .into());
            }
            _ => return Err(ArchivedImageError::DuplicateName { name }.into()),
        }
    }
    Ok(chosen)
}
