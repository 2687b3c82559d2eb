//! The names that an archive gives its images.

use std::collections::BTreeMap;

use serde_json::json;

use super::Job;
use crate::archive::{Compression, Contents, Stored};
use crate::documents::{Config, Index, Leads, Saved};
use crate::error::{ImageError, Wrong};
use crate::image::{Descriptor, media};
use crate::store::{Import, Incoming};
use crate::{Digest, ImageName};

/// For each name, the different things that are called so.
pub(super) type Candidates = BTreeMap<ImageName, Vec<Descriptor>>;

/// Reads the names: from `index.json`, or from `manifest.json` where there is no layout.
pub(super) async fn candidates(
    job: Job<'_>,
    contents: &Contents,
    import: &mut dyn Import,
) -> Result<Candidates, Wrong> {
    let mut candidates = Candidates::new();
    match (&contents.index, &contents.manifest) {
        (Some(index), _) => of_layout(job, index, &mut candidates)?,
        (None, Some(manifest)) => {
            for saved in parse::<Vec<Saved>>("manifest.json", manifest)? {
                of_saved(job, contents, &saved, (import, &mut candidates)).await?;
            }
        }
        (None, None) => return Err(ImageError::Empty.into()),
    }
    match candidates.is_empty() {
        true => Err(ImageError::Unnamed.into()),
        false => Ok(candidates),
    }
}

fn parse<T: serde::de::DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|source| ImageError::Document { what: what.to_owned(), source })
}

fn add(
    job: Job<'_>,
    candidates: &mut Candidates,
    name: ImageName,
    target: Descriptor,
) -> Result<(), ImageError> {
    let targets = candidates.entry(name).or_default();
    if !targets.iter().any(|known| known.digest == target.digest) {
        targets.push(target);
    }
    let limit = job.place.limits.descriptors;
    if candidates.len() > limit as usize {
        return Err(ImageError::Limit { limit: limit.into(), of: "names" });
    }
    Ok(())
}

fn of_layout(job: Job<'_>, index: &[u8], candidates: &mut Candidates) -> Result<(), ImageError> {
    for listed in parse::<Index>("index.json", index)?.manifests {
        let target = listed.descriptor();
        let Some(reference) = listed.reference().filter(|_| target.leads() != Leads::Elsewhere) else {
            continue;
        };
        let name = ImageName::of_reference(reference, job.repository).map_err(ImageError::Name)?;
        add(job, candidates, name, target)?;
    }
    Ok(())
}

async fn of_saved(
    job: Job<'_>,
    contents: &Contents,
    saved: &Saved,
    (import, candidates): (&mut dyn Import, &mut Candidates),
) -> Result<(), Wrong> {
    let tags = saved.repo_tags.as_deref().unwrap_or_default();
    if tags.is_empty() {
        return Ok(());
    }
    let target = manifest_of(job, contents, saved, import).await?;
    for tag in tags {
        let name: ImageName = tag.parse().map_err(ImageError::Name)?;
        add(job, candidates, name, target.clone())?;
    }
    Ok(())
}

/// Makes the manifest that a docker-archive lacks, as containerd does.
async fn manifest_of(
    job: Job<'_>,
    contents: &Contents,
    saved: &Saved,
    import: &mut dyn Import,
) -> Result<Descriptor, Wrong> {
    let find = |name: &str| {
        let missing = || ImageError::Missing { what: name.to_owned(), by: "manifest.json".into() };
        contents.file(name).ok_or_else(missing)
    };
    let config = find(&saved.config)?;
    let names = saved.layers.as_deref().unwrap_or_default();
    let layers = names.iter().map(|name| find(name)).collect::<Result<Vec<_>, _>>()?;
    check_layers(job, config, names, &layers).await?;
    let layers: Vec<_> = layers.iter().map(|stored| descriptor(layer_type(stored), stored)).collect();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": media::DOCKER_MANIFEST,
        "config": descriptor(media::DOCKER_CONFIG, config),
        "layers": layers,
    });
    let bytes = manifest.to_string().into_bytes();
    let (digest, size) = (Digest::of(&bytes), bytes.len() as u64);
    let incoming = Incoming { digest: Some(digest), size, file: "manifest.json".into() };
    if let Some(mut writer) = import.blob(&incoming).await? {
        writer.write(bytes.into()).await?;
        writer.commit(&digest).await?;
    }
    Ok(Descriptor { media_type: media::DOCKER_MANIFEST.to_owned(), digest, size })
}

fn descriptor(media_type: &str, stored: &Stored) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": stored.digest.to_string(), "size": stored.size })
}

fn layer_type(stored: &Stored) -> &'static str {
    match stored.compression {
        Compression::Gzip => media::DOCKER_LAYER_GZIP,
        Compression::Zstd => media::OCI_LAYER_ZSTD,
        Compression::None | Compression::Other(_) => media::DOCKER_LAYER,
    }
}

/// Layers have no digest of their own in a docker-archive; those that aren't compressed are what the configuration says.
async fn check_layers(
    job: Job<'_>,
    config: &Stored,
    names: &[String],
    layers: &[&Stored],
) -> Result<(), Wrong> {
    let Some(config) = job.place.document::<Config>(&config.digest).await? else { return Ok(()) };
    let told = names.iter().zip(layers).zip(config.rootfs.diff_ids);
    for ((name, stored), diff_id) in told {
        if stored.compression == Compression::None && stored.digest != diff_id {
            return Err(ImageError::Digest { file: name.clone(), found: stored.digest }.into());
        }
    }
    Ok(())
}
