//! Checks that an archive fits before anything of it is written.

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::sync::OnceLock;

use tokio::task::spawn_blocking;

use super::ImportJob;
use crate::archive::{ArchiveError, measure_archive, read_outline};
use crate::error::BundleError;
use crate::store::ImportSession;
use crate::{Digest, DiskUsage, ImportLimits};

/// A compressed archive is measured, which takes a pass over it, if the free space is less than this many times
/// its size. One that compresses better is stopped at the blob that does not fit.
const MAX_COMPRESSION: u64 = 16;

/// The sizes of an archive's files, with their digests if their names have one.
type FileSizes = Vec<(Option<Digest>, u64)>;

/// The sizes of an archive, which is measured once, however often a bundle that does not fit is tried.
pub(crate) type MeasuredFiles = OnceLock<FileSizes>;

/// The unit in which most file systems allocate space to a file.
const BLOCK_BYTES: u64 = 4096;

/// Checks that what the store lacks of the archive fits on its disk.
pub(super) async fn check_archive_fits(
    job: ImportJob<'_>,
    file: &File,
    import: &dyn ImportSession,
) -> Result<(), BundleError> {
    let Some(space) = import.disk_space().await? else { return Ok(()) };
    let scope = job.scope;
    if job.measured.get().is_none() {
        let file = file.try_clone().map_err(|error| BundleError::Archive(ArchiveError::Io(error)))?;
        let (limits, available) = (scope.limits.clone(), space.available.bytes);
        let measured = spawn_blocking(move || measure_files(file, &limits, available)).await;
        let measured = measured.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        match measured.map_err(BundleError::Archive)? {
            Some(files) => drop(job.measured.set(files)),
            None => return Ok(()),
        }
    }
    let files = job.measured.get().map_or(&[][..], Vec::as_slice);
    let on_disk = |size: u64| DiskUsage {
        bytes: size.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(size),
        inodes: 1,
    };
    let sum = |files: &[(Option<Digest>, u64)]| {
        files.iter().fold(DiskUsage::default(), |sum, (_, size)| sum + on_disk(*size))
    };
    let mut needed = sum(files);
    // Only now is the store asked for each blob, as most archives fit in any case.
    if !needed.fits_into(space.available) {
        let mut missing = Vec::new();
        for (digest, size) in files {
            let has = match digest {
                Some(digest) => scope.store.content_size(scope.namespace, digest).await? == Some(*size),
                None => false,
            };
            missing.extend((!has).then_some((*digest, *size)));
        }
        needed = sum(&missing);
    }
    Ok(space.check_fits(needed, "the archive")?)
}

/// The files of an archive with their sizes; `None` of a compressed one that is sure to fit.
fn measure_files(
    mut file: File,
    limits: &ImportLimits,
    available: u64,
) -> Result<Option<FileSizes>, ArchiveError> {
    let start = file.stream_position().map_err(ArchiveError::Io)?;
    if let Some(outline) =
        read_outline(|buffer, at| file.read_exact_at(buffer, at), start).map_err(ArchiveError::Io)?
    {
        return Ok(Some(outline.files));
    }
    let bytes = file.metadata().map_err(ArchiveError::Io)?.len().saturating_sub(start);
    if bytes.saturating_mul(MAX_COMPRESSION) < available {
        return Ok(None);
    }
    let files = measure_archive(&file, limits)?;
    // A duplicated descriptor shares its position with the original, which is read next. *Source:* dup(2).
    file.seek(SeekFrom::Start(start)).map_err(ArchiveError::Io)?;
    Ok(Some(files))
}
