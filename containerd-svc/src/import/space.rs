//! Checks that an archive fits before anything of it is written.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::ops::Add as _;
use std::sync::{Mutex, OnceLock, PoisonError};

use tokio::task::spawn_blocking;

use super::ImportJob;
use super::index::{ArchiveIndex, Judgement};
use crate::archive::{ArchiveError, measure_archive};
use crate::error::BundleError;
use crate::image::ImageLayer;
use crate::store::ImportSession;
use crate::{Digest, DiskUsage, ImportLimits};

/// A compressed archive is measured, which takes a pass over it, if the free space is less than this many times
/// its size. One that compresses better is stopped at the blob that does not fit.
const MAX_COMPRESSION: u64 = 16;

/// The sizes of an archive's files, with their digests if their names have one.
type FileSizes = Vec<(Option<Digest>, u64)>;

/// What was measured of an archive, once, however often a bundle that does not fit is tried.
#[derive(Debug, Default)]
pub(crate) struct MeasuredFiles {
    files: OnceLock<FileSizes>,
    layers: Mutex<BTreeMap<Digest, MeasuredLayer>>,
}

/// What the files of a layer take.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasuredLayer {
    pub(super) usage: DiskUsage,
    /// False if it was only counted until it did not fit.
    pub(super) is_complete: bool,
}

impl MeasuredFiles {
    pub(super) fn find_layer(&self, layer: Digest) -> Option<MeasuredLayer> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner).get(&layer).copied()
    }

    pub(super) fn add_layer(&self, layer: Digest, usage: DiskUsage, is_complete: bool) {
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        layers.insert(layer, MeasuredLayer { usage, is_complete });
    }

    /// The layers with what they take, as far as that is known.
    pub(super) fn with_usage(&self, layers: &[ImageLayer]) -> Vec<ImageLayer> {
        let usage = |layer: &ImageLayer| {
            self.find_layer(layer.blob.digest).filter(|known| known.is_complete).map(|known| known.usage)
        };
        layers.iter().map(|layer| ImageLayer { unpacked: usage(layer), ..layer.clone() }).collect()
    }
}

/// Checks that what the store lacks of the archive fits on its disk, besides what other imports have claimed of it. Returns
/// what it takes at most; `None` if that is not known.
pub(super) async fn check_archive_fits(
    job: ImportJob<'_>,
    file: &File,
    judged: Option<(&ArchiveIndex, &Judgement)>,
    import: &dyn ImportSession,
    claimed: DiskUsage,
) -> Result<Option<DiskUsage>, BundleError> {
    let Some(space) = import.disk_space().await? else { return Ok(None) };
    let space = space.without(claimed);
    if let Some((index, judgement)) = judged {
        let needed = index.measure(job, judgement, space.available).await?;
        space.check_fits(needed.usage, "the archive")?;
        let is_all = needed.is_all && !(job.unpack && import.copies_layers_below());
        return Ok(is_all.then_some(needed.usage));
    }
    let scope = job.scope;
    let measured = &job.measured.files;
    if measured.get().is_none() {
        let file = file.try_clone().map_err(|error| BundleError::Archive(ArchiveError::Io(error)))?;
        let (limits, available) = (scope.limits.clone(), space.available.bytes);
        let sizes = spawn_blocking(move || measure_files(file, &limits, available)).await;
        let sizes = sizes.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        match sizes.map_err(BundleError::Archive)? {
            Some(files) => drop(measured.set(files)),
            None => return Ok(Some(DiskUsage::default())),
        }
    }
    let files = measured.get().map_or(&[][..], Vec::as_slice);
    let sum = |sizes: &mut dyn Iterator<Item = u64>| {
        sizes.map(DiskUsage::of_file).fold(DiskUsage::default(), DiskUsage::add)
    };
    let mut needed = sum(&mut files.iter().map(|(_, size)| *size));
    // Only now is the store asked for each blob, as most archives fit in any case.
    if !needed.fits_into(space.available) {
        let mut missing = Vec::new();
        for (digest, size) in files {
            let is_present = match digest {
                Some(digest) => scope.store.content_size(scope.namespace, digest).await? == Some(*size),
                None => false,
            };
            missing.extend((!is_present).then_some(*size));
        }
        needed = sum(&mut missing.into_iter());
    }
    space.check_fits(needed, "the archive")?;
    Ok(Some(needed))
}

/// The files of a compressed archive with their sizes; `None` of one that is sure to fit.
fn measure_files(
    mut file: File,
    limits: &ImportLimits,
    available: u64,
) -> Result<Option<FileSizes>, ArchiveError> {
    let start = file.stream_position().map_err(ArchiveError::Io)?;
    let bytes = file.metadata().map_err(ArchiveError::Io)?.len().saturating_sub(start);
    if bytes.saturating_mul(MAX_COMPRESSION) < available {
        return Ok(None);
    }
    let files = measure_archive(&file, limits)?;
    // A duplicated descriptor shares its position with the original, which is read next. *Source:* dup(2).
    file.seek(SeekFrom::Start(start)).map_err(ArchiveError::Io)?;
    Ok(Some(files))
}
