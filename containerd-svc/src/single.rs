//! One archive, by somebody's hand.

use std::fs::File;
use std::path::Path;

use crate::error::ImportError;
use crate::image::{Image, Labels};
use crate::import::{self, Job};
use crate::scan::repository;
use crate::walk::Place;
use crate::{Descriptor, ImageName, ImageStore, Limits, Namespace, Platform};

/// Imports the images of one archive, for this machine's platform: as [`Preseed`](crate::Preseed) does, but read in any
/// case, neither pinned nor remembered, and a name that there is already gets the archive's image.
///
/// The file is read once, from where it stands; `path` names it in errors, and its last component is the repository of
/// images that have nothing but a tag.
///
/// # Errors
/// [`ImportError`]. Nothing of it is listed then.
///
/// # Cancel safety
/// Dropped before its end, it has listed nothing, or some of the images, and each of these is whole.
pub async fn import(
    store: &dyn ImageStore,
    namespace: &Namespace,
    (path, file): (&Path, File),
) -> Result<Vec<Image>, ImportError> {
    let (platform, limits) = (Platform::of_this_machine(), Limits::default());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let job = Job {
        place: Place { store, namespace, platform: &platform, limits: &limits },
        repository: repository(&name).unwrap_or(&name),
        unpack: false,
    };
    let image = |(name, target): &(ImageName, Descriptor)| Image {
        name: name.to_string(),
        target: target.clone(),
        labels: Labels::new(),
    };
    let images = import::import(job, file, &mut |targets| targets.iter().map(image).collect()).await;
    images.map_err(|wrong| wrong.of(path.to_owned()))
}
