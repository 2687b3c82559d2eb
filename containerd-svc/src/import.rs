//! One bundle into a store: read once, and listed only when all of it is there.

mod bridge;
mod names;

use std::collections::BTreeMap;
use std::fs::File;

use crate::archive::Contents;
use crate::error::{ImageError, Wrong};
use crate::image::{Descriptor, Image};
use crate::store::{Import, Incoming};
use crate::walk::{Place, Walk};
use crate::{ImageName, StoreError};

use names::Candidates;

/// How a bundle is imported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) place: Place<'a>,
    /// The repository of images that have nothing but a tag.
    pub(crate) repository: &'a str,
    /// Whether layers are unpacked at once.
    pub(crate) unpack: bool,
}

/// What an image will be listed as, once its name and target are known.
pub(crate) type Listing<'a> = dyn FnMut(&[(ImageName, Descriptor)]) -> Vec<Image> + Send + 'a;

/// Imports a bundle; the images that its names were made.
pub(crate) async fn import(job: Job<'_>, file: File, listing: &mut Listing<'_>) -> Result<Vec<Image>, Wrong> {
    let import = job.place.store.begin(job.place.namespace).await?;
    let (mut import, read) = bridge::read(file, job.place.limits.clone(), import).await;
    let done = match (&mut import, read) {
        (Some(import), Ok(contents)) => finish(job, &contents, &mut **import, listing).await,
        (_, Err(wrong)) => Err(wrong),
        (None, Ok(_)) => Err(StoreError::Begin("the import is gone".into()).into()),
    };
    // Also after a failure: what nobody needs may go at once.
    let ended = match import {
        Some(import) => import.end().await,
        None => Ok(()),
    };
    if let Err(error) = ended {
        tracing::warn!(error = %chain(&error), "an import has not been ended; what it left goes by itself within a day");
    }
    done
}

/// An error with its causes, for the log.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// What remains once every blob is in the store.
async fn finish(
    job: Job<'_>,
    contents: &Contents,
    import: &mut dyn Import,
    listing: &mut Listing<'_>,
) -> Result<Vec<Image>, Wrong> {
    let candidates = names::candidates(job, contents, import).await?;
    let mut walk = Walk::new(job.place);
    let targets = choose(&mut walk, job, candidates).await?;
    keep(&walk, contents, import).await?;
    let mut labels = std::mem::take(&mut walk.labels);
    if job.unpack {
        for runnable in &walk.runnables {
            let unpacked = import.unpack(&runnable.layers).await?;
            labels.entry(runnable.config).or_default().extend(unpacked);
        }
    }
    for (digest, labels) in labels.iter().filter(|(_, labels)| !labels.is_empty()) {
        import.label(digest, labels).await?;
    }
    let images = listing(&targets);
    for image in &images {
        import.list(image).await?;
    }
    Ok(images)
}

/// What is needed and was not in the archive was in the store before, and must not go now.
async fn keep(walk: &Walk<'_>, contents: &Contents, import: &mut dyn Import) -> Result<(), Wrong> {
    let mut rest: BTreeMap<_, _> = walk.needed.iter().collect();
    for digest in contents.digests() {
        rest.remove(&digest);
    }
    for (digest, size) in rest {
        let incoming = Incoming { digest: Some(*digest), size: *size, file: digest.to_string() };
        if import.blob(&incoming).await?.is_some() {
            let by = "the archive".to_owned();
            return Err(ImageError::Missing { what: digest.to_string(), by }.into());
        }
    }
    Ok(())
}

/// For each name the one image that runs here.
async fn choose(
    walk: &mut Walk<'_>,
    job: Job<'_>,
    candidates: Candidates,
) -> Result<Vec<(ImageName, Descriptor)>, Wrong> {
    let mut chosen = Vec::new();
    for (name, targets) in candidates {
        let (mut fitting, mut has) = (Vec::new(), Vec::new());
        for target in targets {
            let fit = walk.follow(&target).await?;
            has.extend(fit.others);
            fitting.extend(fit.runs.then_some(target));
        }
        match fitting.len() {
            1 => chosen.extend(fitting.pop().map(|target| (name, target))),
            0 => return Err(ImageError::Platform { name, wanted: job.place.platform.clone(), has }.into()),
            _ => return Err(ImageError::Duplicate { name }.into()),
        }
    }
    Ok(chosen)
}
