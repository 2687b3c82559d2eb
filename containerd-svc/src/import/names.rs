//! Collects the image names of an archive.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;

use super::ImportJob;
use crate::archive::{ArchiveContents, Compression, StoredBlob};
use crate::documents::{DockerManifestEntry, ImageConfig, ImageIndex, IndexEntry, TargetKind};
use crate::error::{ArchivedImageError, BundleError};
use crate::image::{Descriptor, media};
use crate::store::{ImportSession, IncomingBlob};
use crate::{Digest, ImageName};

/// The images that an archive names.
#[derive(Debug, Default)]
pub(super) struct ImageCandidates {
    /// For each name, the different targets with that name.
    pub(super) named: BTreeMap<ImageName, Vec<Descriptor>>,
    /// Entries that are no candidates, by their names in the archive.
    pub(super) left_out: Vec<(String, ArchivedImageError)>,
}

impl ImageCandidates {
    fn add(&mut self, name: ImageName, target: Descriptor) {
        // Who asks for a digest is to get nothing else.
        if name.digest().is_some_and(|digest| digest != target.digest.to_string()) {
            let found = target.digest;
            return self.leave_out(name.to_string(), ArchivedImageError::NameDigest { name, found });
        }
        let targets = self.named.entry(name).or_default();
        if !targets.iter().any(|known| known.digest == target.digest) {
            targets.push(target);
        }
    }

    fn leave_out(&mut self, name: impl Into<String>, error: ArchivedImageError) {
        self.left_out.push((name.into(), error));
    }
}

/// Reads the names from `index.json`, or from `manifest.json` if the archive has no OCI layout.
pub(super) async fn find_candidates(
    job: ImportJob<'_>,
    contents: &ArchiveContents,
    import: &mut dyn ImportSession,
) -> Result<ImageCandidates, BundleError> {
    let mut candidates = ImageCandidates::default();
    match (&contents.index, &contents.manifest) {
        // Newer releases of `docker save` write both; the index has the digests of everything.
        (Some(index), _) => add_layout_images(job, index, &mut candidates)?,
        (None, Some(manifest)) => {
            for saved in parse_document::<Vec<DockerManifestEntry>>("manifest.json", manifest)? {
                add_docker_images(job, contents, &saved, import, &mut candidates).await?;
            }
        }
        (None, None) => return Err(ArchivedImageError::NoIndex.into()),
    }
    let limit = job.scope.limits.descriptors;
    if candidates.named.len() > limit as usize {
        return Err(ArchivedImageError::Limit { limit: limit.into(), of: "names" }.into());
    }
    match candidates.named.is_empty() && candidates.left_out.is_empty() {
        true => Err(ArchivedImageError::Unnamed.into()),
        false => Ok(candidates),
    }
}

pub(super) fn parse_document<T: serde::de::DeserializeOwned>(
    what: &str,
    bytes: &[u8],
) -> Result<T, ArchivedImageError> {
    serde_json::from_slice(bytes).map_err(|source| ArchivedImageError::InvalidDocument {
        what: what.to_owned(),
        source: Arc::new(source),
    })
}

pub(super) fn add_layout_images(
    job: ImportJob<'_>,
    index: &[u8],
    candidates: &mut ImageCandidates,
) -> Result<(), ArchivedImageError> {
    for (position, entry) in parse_document::<ImageIndex>("index.json", index)?.manifests.iter().enumerate() {
        let reference = entry.reference_name();
        let target = match entry {
            IndexEntry::Descriptor(listed) => listed.to_descriptor(),
            IndexEntry::Unusable { .. } | IndexEntry::Invalid(_) => {
                let digest = entry.unusable_digest().unwrap_or_default().to_owned();
                let position = || format!("entry {position} of index.json");
                let name = reference.map_or_else(position, str::to_owned);
                candidates.leave_out(name, ArchivedImageError::UnsupportedEntry { digest });
                continue;
            }
        };
        // Without a name, nothing could ask for it.
        let Some(reference) = reference else { continue };
        if target.target_kind() == TargetKind::Other {
            let media_type = target.media_type;
            candidates.leave_out(reference, ArchivedImageError::NotAnImage { media_type });
            continue;
        }
        match ImageName::of_reference(reference, job.repository) {
            Ok(name) => candidates.add(name, target),
            Err(error) => candidates.leave_out(reference, ArchivedImageError::InvalidName(error)),
        }
    }
    Ok(())
}

async fn add_docker_images(
    job: ImportJob<'_>,
    contents: &ArchiveContents,
    saved: &DockerManifestEntry,
    import: &mut dyn ImportSession,
    candidates: &mut ImageCandidates,
) -> Result<(), BundleError> {
    let tags = saved.repo_tags.as_deref().unwrap_or_default();
    if tags.is_empty() {
        return Ok(());
    }
    let target = match create_manifest(job, contents, saved, import).await {
        Ok(target) => Ok(target),
        Err(BundleError::Image(error)) => Err(error),
        Err(error) => return Err(error),
    };
    for tag in tags {
        let name = tag.parse::<ImageName>().map_err(ArchivedImageError::InvalidName);
        match name.and_then(|name| Ok((name, target.clone()?))) {
            Ok((name, target)) => candidates.add(name, target),
            Err(error) => candidates.leave_out(tag, error),
        }
    }
    Ok(())
}

/// Creates the manifest that a docker-archive lacks, as containerd does.
async fn create_manifest(
    job: ImportJob<'_>,
    contents: &ArchiveContents,
    saved: &DockerManifestEntry,
    import: &mut dyn ImportSession,
) -> Result<Descriptor, BundleError> {
    let find = |name: &str| {
        let missing =
            || ArchivedImageError::MissingContent { what: name.to_owned(), by: "manifest.json".into() };
        contents.find_file(name).ok_or_else(missing)
    };
    let config = find(&saved.config)?;
    let names = saved.layers.as_deref().unwrap_or_default();
    let layers = names.iter().map(|name| find(name)).collect::<Result<Vec<_>, _>>()?;
    check_layers(job, config, names, &layers).await?;
    let layers: Vec<_> =
        layers.iter().map(|stored| descriptor_json(layer_media_type(stored), stored)).collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media::DOCKER_MANIFEST,
        "config": descriptor_json(media::DOCKER_CONFIG, config),
        "layers": layers,
    });
    let bytes = manifest.to_string().into_bytes();
    let (digest, size) = (Digest::of_content(&bytes), bytes.len() as u64);
    let incoming = IncomingBlob { digest: Some(digest), size, file: "manifest.json".into() };
    // Its bytes depend on the archive alone, so an earlier import may have created the same manifest.
    if let Some(mut writer) = import.open_writer(&incoming).await? {
        writer.write(bytes.into()).await?;
        writer.commit(&digest).await?;
    }
    Ok(Descriptor { media_type: media::DOCKER_MANIFEST.to_owned(), digest, size })
}

fn descriptor_json(media_type: &str, stored: &StoredBlob) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": stored.digest.to_string(), "size": stored.size })
}

fn layer_media_type(stored: &StoredBlob) -> &'static str {
    match stored.compression {
        Compression::Gzip => media::DOCKER_LAYER_GZIP,
        Compression::Zstd => media::OCI_LAYER_ZSTD,
        Compression::None | Compression::Unsupported(_) => media::DOCKER_LAYER,
    }
}

/// A docker-archive has no digests of layers; an uncompressed layer must match the configuration's diff ID.
async fn check_layers(
    job: ImportJob<'_>,
    config: &StoredBlob,
    names: &[String],
    layers: &[&StoredBlob],
) -> Result<(), BundleError> {
    // A missing configuration is reported when the image is followed.
    let config = job.scope.read_document::<ImageConfig>(&config.digest, config.size).await?;
    let Some(config) = config else { return Ok(()) };
    let layers = names.iter().zip(layers).zip(config.rootfs.diff_ids);
    for ((name, stored), diff_id) in layers {
        if stored.compression == Compression::None && stored.digest != diff_id {
            return Err(
                ArchivedImageError::DigestMismatch { file: name.clone(), found: stored.digest }.into()
            );
        }
    }
    Ok(())
}
