//! Imports one archive, for an operator.

use std::fs::File;
use std::path::Path;

use crate::error::ImportError;
use crate::image::{Image, Labels};
use crate::image_walk::ImageScope;
use crate::import::{self, ImportJob, ImportedImages, MeasuredFiles};
use crate::scan::repository_name;
use crate::{Descriptor, ImageName, ImagePolicy, ImageStore, ImportLimits, Namespace, Platform};

/// Imports the images of one archive, for this machine's platform. Unlike [`Preseed`](crate::Preseed), it
/// always reads the archive, neither pins nor labels the images, and replaces the image of an existing name. An image
/// that is damaged, not for this machine or refused by the policy is left out, and does not affect the others.
///
/// The file is read once, from its current position; `path` names it in errors, and its last component
/// is the repository of images with only a tag.
///
/// # Errors
/// [`ImportError`]: none of its images is listed.
///
/// # Cancel safety
/// If it is dropped before its end, it has listed none or some of the images, and each of these is complete.
pub async fn import_archive(
    store: &dyn ImageStore,
    namespace: &Namespace,
    path: &Path,
    file: File,
    limits: &ImportLimits,
    policy: Option<&dyn ImagePolicy>,
) -> Result<ImportedImages, ImportError> {
    let platform = Platform::of_build_target();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let job = ImportJob {
        scope: ImageScope { store, namespace, platform: &platform, limits },
        repository: repository_name(&name).unwrap_or(&name),
        policy,
        unpack: false,
        measured: &MeasuredFiles::default(),
        progress: None,
    };
    let image = |(name, target): &(ImageName, Descriptor)| Image {
        name: name.to_string(),
        target: target.clone(),
        labels: Labels::new(),
    };
    let imported =
        import::import_bundle(job, file, &mut |targets, _| targets.iter().map(image).collect()).await;
    imported.map_err(|error| error.with_path(path.to_owned()))
}
