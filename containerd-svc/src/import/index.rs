//! Judges an archive by its index before anything of it is written, if the archive can seek.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read, Seek as _};
use std::ops::Add as _;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::task::spawn_blocking;

use super::names::{ImageCandidates, add_layout_images, parse_document};
use super::{ImportJob, choose_images, io_error, main_reason};
use crate::archive::{
    ArchiveError, ArchiveOutline, FilePlace, WantedFiles, digest_from_name, measure_layer, read_outline,
};
use crate::disk_space::UNPACKED_USAGE;
use crate::documents::{DockerManifestEntry, ImageConfig};
use crate::error::{ArchivedImageError, BundleError, LeftOutImage, LeftOutReason};
use crate::image::Image;
use crate::image_walk::ImageScope;
use crate::store::{ImageStore, ImageStoreError, ImportSession};
use crate::{Digest, DiskUsage, ImageName, ImportLimits, Namespace};

/// The files of an uncompressed archive, and where they are.
#[derive(Debug)]
pub(super) struct ArchiveIndex {
    file: Arc<File>,
    outline: ArchiveOutline,
    blobs: BTreeMap<Digest, FilePlace>,
}

/// What an import reads of an archive.
#[derive(Debug, Default)]
pub(super) struct Judgement {
    /// The files that images for this node need.
    pub(super) wanted: WantedFiles,
    /// The layers among them; `None` if they are not known.
    pub(super) layers: Option<BTreeSet<Digest>>,
}

/// What an archive needs of the disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needed {
    pub(super) usage: DiskUsage,
    /// False if unpacking may take more.
    pub(super) is_all: bool,
}

impl ArchiveIndex {
    /// `None` of a compressed archive, or of what is no complete tar.
    pub(super) async fn read(file: &File) -> Result<Option<Self>, BundleError> {
        let mut file = file.try_clone().map_err(io_error)?;
        let read = spawn_blocking(move || {
            let start = file.stream_position()?;
            let outline = read_outline(|buffer, at| file.read_exact_at(buffer, at), start)?;
            Ok((Arc::new(file), outline))
        });
        let read = read.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        let (file, outline) = read.map_err(io_error)?;
        Ok(outline.map(|outline| {
            let files = outline.names.files.iter();
            let blobs = files.filter_map(|(name, place)| Some((digest_from_name(name)?, *place))).collect();
            Self { file, outline, blobs }
        }))
    }

    /// Finds what this node needs. An error if it needs nothing, with the reason.
    pub(super) async fn judge(&self, job: ImportJob<'_>) -> Result<Judgement, BundleError> {
        let limit = job.scope.limits.document_bytes;
        if let Some(index) = self.read_document("index.json", limit).await? {
            return self.judge_layout(job, &index).await;
        }
        match self.read_document("manifest.json", limit).await? {
            Some(manifest) => self.judge_docker_archive(job, &manifest).await,
            None => Err(ArchivedImageError::NoIndex.into()),
        }
    }

    async fn judge_layout(&self, job: ImportJob<'_>, index: &[u8]) -> Result<Judgement, BundleError> {
        let mut candidates = ImageCandidates::default();
        add_layout_images(job, index, &mut candidates)?;
        let overlay = IndexedStore { index: self, store: job.scope.store, documents: Mutex::default() };
        let scope = ImageScope { store: &overlay, ..job.scope };
        let (chosen, left_out) = choose_images(ImportJob { scope, ..job }, candidates).await?;
        let is_missing = |image: &LeftOutImage| {
            matches!(image.reason, LeftOutReason::Archive(ArchivedImageError::MissingContent { .. }))
        };
        // Reading all of it finds out whether the content is damaged or missing; beside a good image, a fault is named
        // by the import.
        let is_fault =
            |image: &LeftOutImage| !chosen.is_empty() && !image.is_foreign() && image.refused().is_none();
        if left_out.iter().any(|image| is_missing(image) || is_fault(image)) {
            return Ok(Judgement::default());
        }
        if chosen.is_empty() {
            return Err(main_reason(left_out));
        }
        let mut needed: BTreeSet<_> =
            chosen.iter().flat_map(|image| image.content.needed.keys().copied()).collect();
        // The import reads these again, also to leave out an image.
        needed.append(&mut overlay.documents.lock().unwrap_or_else(PoisonError::into_inner));
        let is_needed =
            |name: &&String| digest_from_name(name).is_some_and(|digest| needed.contains(&digest));
        let images = chosen.iter().flat_map(|image| &image.content.runnable_images);
        let layers = images.flat_map(|image| &image.layers).map(|layer| layer.blob.digest);
        Ok(Judgement {
            layers: Some(layers.collect()),
            wanted: Some(self.outline.names.files.keys().filter(is_needed).cloned().collect()),
        })
    }

    /// A docker-archive has no digests of its layers, and usually no other platforms.
    async fn judge_docker_archive(
        &self,
        job: ImportJob<'_>,
        manifest: &[u8],
    ) -> Result<Judgement, BundleError> {
        let saved: Vec<DockerManifestEntry> = parse_document("manifest.json", manifest)?;
        let (mut wanted, mut foreign) = (BTreeSet::new(), None);
        for saved in saved {
            let tags = saved.repo_tags.unwrap_or_default();
            let Some(name) = tags.iter().find_map(|tag| tag.parse::<ImageName>().ok()) else { continue };
            let config = self.read_document(&saved.config, job.scope.limits.document_bytes).await?;
            let config = config.and_then(|config| serde_json::from_slice::<ImageConfig>(&config).ok());
            match config.map(|config| config.platform) {
                Some(platform) if platform.is_stated() && !job.scope.platform.can_run(&platform) => {
                    let (wanted, available) = (job.scope.platform.clone(), vec![platform]);
                    foreign = Some(ArchivedImageError::PlatformMismatch { name, wanted, available });
                }
                // What is missing or invalid is found when it is read.
                _ => wanted.extend(
                    saved.layers.iter().flatten().chain([&saved.config]).filter_map(|file| self.find(file)),
                ),
            }
        }
        match (wanted.is_empty(), foreign) {
            (true, Some(foreign)) => Err(foreign.into()),
            // The error names an image of another platform as one that lacks its files, so they are read.
            (false, Some(_)) => Ok(Judgement::default()),
            // An invalid name is reported by the import.
            (_, None) => Ok(Judgement { wanted: Some(wanted), layers: None }),
        }
    }

    fn find(&self, name: &str) -> Option<String> {
        self.outline.names.find(name).map(|(name, _)| name)
    }

    /// A file of the archive up to this size; `None` if it has none.
    async fn read_document(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, BundleError> {
        let Some((_, place)) = self.outline.names.find(name) else { return Ok(None) };
        if place.size > limit {
            let of = crate::ArchiveLimitKind::Document;
            return Err(BundleError::Archive(ArchiveError::Limit { limit, of }));
        }
        self.read_place(*place).await.map(Some).map_err(io_error)
    }

    async fn read_place(&self, place: FilePlace) -> io::Result<Vec<u8>> {
        let file = Arc::clone(&self.file);
        let read = spawn_blocking(move || {
            let mut bytes = vec![0; usize::try_from(place.size).unwrap_or_default()];
            file.read_exact_at(&mut bytes, place.at).map(|()| bytes)
        });
        read.await.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()))
    }

    /// The blobs among the files that an import reads.
    pub(super) fn wanted_blobs(&self, Judgement { wanted, .. }: &Judgement) -> BTreeSet<Digest> {
        match wanted {
            Some(wanted) => wanted.iter().filter_map(|name| digest_from_name(name)).collect(),
            None => self.blobs.keys().copied().collect(),
        }
    }

    /// What of the archive is not in the store yet and is to be written: files, and what unpacking their layers takes, which
    /// is put into the memory of the job. The layers are counted up to `room`.
    pub(super) async fn measure(
        &self,
        job: ImportJob<'_>,
        Judgement { wanted, layers }: &Judgement,
        room: DiskUsage,
    ) -> Result<Needed, BundleError> {
        let is_wanted = |name: &String| wanted.as_ref().is_none_or(|wanted| wanted.contains(name));
        let files = || self.outline.names.files.iter().filter(|(name, _)| is_wanted(name));
        let all = files()
            .map(|(_, place)| DiskUsage::of_file(place.size))
            .fold(DiskUsage::default(), DiskUsage::add);
        // The store is asked for each blob only where that matters.
        if !job.unpack && all.fits_into(room) {
            return Ok(Needed { usage: all, is_all: true });
        }
        let mut needed = Needed { usage: DiskUsage::default(), is_all: !job.unpack || layers.is_some() };
        let is_layer = |digest: &Digest| layers.as_ref().is_some_and(|layers| layers.contains(digest));
        for (name, place) in files() {
            let digest = digest_from_name(name);
            let ImageScope { store, namespace, .. } = job.scope;
            let layer = digest.filter(|digest| job.unpack && is_layer(digest));
            if let Some(digest) = &digest
                && store.content_size(namespace, digest).await? == Some(place.size)
            {
                // It may not be unpacked yet.
                needed.is_all &= layer.is_none();
                continue;
            }
            needed.usage = needed.usage + DiskUsage::of_file(place.size);
            if let Some(layer) = layer {
                let unpacked = self.measure_layer(job, layer, *place, room).await?;
                needed.usage = needed.usage + UNPACKED_USAGE + unpacked;
            }
        }
        Ok(needed)
    }

    async fn measure_layer(
        &self,
        job: ImportJob<'_>,
        layer: Digest,
        place: FilePlace,
        room: DiskUsage,
    ) -> Result<DiskUsage, BundleError> {
        // More than there was room for, it was not counted to its end.
        if let Some(known) = job.measured.find_layer(layer)
            && (known.is_complete || !known.usage.fits_into(room))
        {
            return Ok(known.usage);
        }
        let (file, limits) = (Arc::clone(&self.file), job.scope.limits.clone());
        let measured = spawn_blocking(move || measure_place(&file, place, &limits, room)).await;
        let measured = measured.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic()));
        match measured {
            Ok(usage) => {
                job.measured.add_layer(layer, usage, usage.fits_into(room));
                Ok(usage)
            }
            Err(ArchiveError::Io(error)) => Err(io_error(error)),
            // It is no tar: unpacking reports that, for this image alone.
            Err(_) => Ok(DiskUsage::default()),
        }
    }
}

fn measure_place(
    file: &File,
    place: FilePlace,
    limits: &ImportLimits,
    room: DiskUsage,
) -> Result<DiskUsage, ArchiveError> {
    /// Reads a part of a file whose position others use.
    struct Part<'a>(&'a File, FilePlace);
    impl Read for Part<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Self(file, FilePlace { at, size }) = self;
            let wanted = usize::try_from(*size).unwrap_or(usize::MAX).min(buffer.len());
            let read = file.read_at(&mut buffer[..wanted], *at)?;
            (*at, *size) = (*at + read as u64, *size - read as u64);
            Ok(read)
        }
    }
    measure_layer(Part(file, place), limits, room)
}

/// The content of an archive, and of a store what it lacks.
#[derive(Debug)]
struct IndexedStore<'a> {
    index: &'a ArchiveIndex,
    store: &'a dyn ImageStore,
    /// What was read of the archive.
    documents: Mutex<BTreeSet<Digest>>,
}

#[async_trait]
impl ImageStore for IndexedStore<'_> {
    async fn list_namespaces(&self) -> Result<Vec<Namespace>, ImageStoreError> {
        self.store.list_namespaces().await
    }

    async fn list_images(&self, namespace: &Namespace) -> Result<Vec<Image>, ImageStoreError> {
        self.store.list_images(namespace).await
    }

    async fn content_size(
        &self,
        namespace: &Namespace,
        digest: &Digest,
    ) -> Result<Option<u64>, ImageStoreError> {
        match self.index.blobs.get(digest) {
            Some(place) => Ok(Some(place.size)),
            None => self.store.content_size(namespace, digest).await,
        }
    }

    async fn read_content(
        &self,
        namespace: &Namespace,
        digest: &Digest,
        size: u64,
    ) -> Result<Option<Vec<u8>>, ImageStoreError> {
        match self.index.blobs.get(digest) {
            Some(place) if place.size == size => {
                let read = self.index.read_place(*place).await;
                let to_error = |source: io::Error| ImageStoreError::ReadContent {
                    digest: *digest,
                    source: source.into(),
                };
                let bytes = read.map_err(to_error)?;
                self.documents.lock().unwrap_or_else(PoisonError::into_inner).insert(*digest);
                Ok((Digest::of_content(&bytes) == *digest).then_some(bytes))
            }
            Some(_) => Ok(None),
            None => self.store.read_content(namespace, digest, size).await,
        }
    }

    async fn begin_import(&self, namespace: &Namespace) -> Result<Box<dyn ImportSession>, ImageStoreError> {
        self.store.begin_import(namespace).await
    }
}
