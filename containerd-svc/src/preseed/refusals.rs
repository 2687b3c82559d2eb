//! The bundles all of whose images are refused, for the next process: nothing of them is listed that could have a mark.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, FileMode};
use serde::{Deserialize, Serialize};

use crate::error::{ArchivedImageError, LeftOutImage, LeftOutReason};
use crate::import::check_policy;
use crate::plan::Bundle;
use crate::scan::repository_name;
use crate::{ImageName, ImagePolicy, Platform};

/// What is known of refused bundles, and its file.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    file: Option<PathBuf>,
    /// The refused images of each bundle; `None` before the file was read.
    known: Option<BTreeMap<String, Vec<RefusedImage>>>,
    is_changed: bool,
}

/// An image that is refused for its name, or by the policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RefusedImage {
    /// As it is in the archive.
    name: String,
    /// `None` where the name is none of an image.
    digest: Option<String>,
}

impl Refusals {
    pub(super) fn set_file(&mut self, file: PathBuf) {
        if self.file.as_ref() != Some(&file) {
            *self = Self { file: Some(file), ..Self::default() };
        }
    }

    /// Reads the file, once. One that can't be read is as none: its bundles are read again.
    pub(super) fn load(&mut self) {
        let Some(file) = self.file.as_ref().filter(|_| self.known.is_none()) else { return };
        let known = match fs::read(file) {
            Ok(text) => serde_json::from_slice(&text).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            Err(error) => Err(error),
        };
        if let Err(error) = &known {
            tracing::warn!("can't read which bundles were refused in {}: {error}", file.display());
        }
        self.known = Some(known.unwrap_or_default());
    }

    /// Writes the file if there is something new.
    pub(super) fn save(&mut self) {
        let (Some(file), Some(known), true) = (&self.file, &self.known, self.is_changed) else { return };
        match write_file(file, known) {
            Ok(()) => self.is_changed = false,
            Err(error) => {
                tracing::warn!("can't write which bundles are refused to {}: {error}", file.display());
            }
        }
    }

    pub(super) fn find(&self, bundle: &Bundle, platform: &Platform) -> Option<Vec<RefusedImage>> {
        self.known.as_ref()?.get(&key(bundle, platform)).cloned()
    }

    /// Records what is refused of a bundle.
    pub(super) fn insert(&mut self, bundle: &Bundle, platform: &Platform, images: Vec<RefusedImage>) {
        let known = self.known.get_or_insert_default();
        self.is_changed |= known.insert(key(bundle, platform), images.clone()) != Some(images);
    }

    /// Forgets all other bundles.
    pub(super) fn retain<'a>(&mut self, bundles: impl Iterator<Item = &'a Bundle>, platform: &Platform) {
        let Some(known) = self.known.as_mut().filter(|known| !known.is_empty()) else { return };
        let mut kept = BTreeMap::new();
        for key in bundles.map(|bundle| key(bundle, platform)) {
            kept.extend(known.remove_entry(&key));
        }
        self.is_changed |= !known.is_empty();
        *known = kept;
    }
}

/// The names depend on those of the file and the namespace, the images that count on the platform.
fn key(Bundle { namespace, file, fingerprint, .. }: &Bundle, platform: &Platform) -> String {
    format!("{namespace}/{file} {} {platform}", fingerprint.0)
}

fn write_file(file: &Path, known: &BTreeMap<String, Vec<RefusedImage>>) -> io::Result<()> {
    let (Some(directory), Some(name)) = (file.parent(), file.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let text = serde_json::to_vec(known).map_err(io::Error::other)?;
    let directory = Dir::open(directory).map_err(io::Error::other)?;
    directory.write(Path::new(name), &text, FileMode::PRIVATE_FILE).map_err(io::Error::other)
}

/// The images of a bundle of which none is listed, if all of them are refused for their names or by the policy.
pub(super) fn collect_refused(left_out: &[LeftOutImage]) -> Option<Vec<RefusedImage>> {
    let faults = left_out.iter().filter(|image| !image.is_foreign());
    let refused: Option<Vec<_>> = faults.map(refused_image).collect();
    refused.filter(|refused| !refused.is_empty())
}

fn refused_image(image: &LeftOutImage) -> Option<RefusedImage> {
    let LeftOutReason::Archive(error) = &image.reason else { return None };
    match error {
        ArchivedImageError::NotAllowed { name, digest: found, .. }
        | ArchivedImageError::NameDigest { name, found } => {
            Some(RefusedImage { name: name.to_string(), digest: Some(found.to_string()) })
        }
        ArchivedImageError::InvalidName(_) => Some(RefusedImage { name: image.name.clone(), digest: None }),
        _ => None,
    }
}

/// The reasons for which these images are still refused; `None` if one is not: then its bundle has to be read.
pub(super) async fn judge(
    bundle: &Bundle,
    images: &[RefusedImage],
    policy: Option<&dyn ImagePolicy>,
) -> Option<Vec<ArchivedImageError>> {
    let repository = repository_name(&bundle.file).unwrap_or_default();
    let mut errors = Vec::new();
    for RefusedImage { name, digest } in images {
        let error = match (ImageName::of_reference(name, repository), digest) {
            (Err(error), _) => ArchivedImageError::InvalidName(error),
            (Ok(_), None) => return None,
            (Ok(name), Some(digest)) if name.digest().is_some_and(|own| own != digest) => {
                ArchivedImageError::NameDigest { name, found: digest.parse().ok()? }
            }
            (Ok(name), Some(digest)) => {
                check_policy(policy, &bundle.namespace, &name, digest.parse().ok()?).await.err()?
            }
        };
        errors.push(error);
    }
    (!errors.is_empty()).then_some(errors)
}
