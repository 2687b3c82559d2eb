//! Calls of the control API about the images of the node's containerd.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nodekeel_containerd_svc::{
    ContainerdImages, DiskReserve, Image, ImageStore as _, ImportLimits, LeftOutImage, Namespace,
};
use nodekeel_localstorage::Dir;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::Status;

use crate::error_chain::error_chain;
use crate::v1;

/// The time for a list, which ends before the timeout of a client does: it is not the node that does not answer.
const LIST_TIMEOUT: Duration = Duration::from_secs(4);

/// The socket and the directory of the images, for the control API.
#[derive(Debug)]
pub(crate) struct ImageAccess {
    socket: PathBuf,
    /// The directory of the images on the data volume, once that was open.
    root: Mutex<Option<PathBuf>>,
    /// The reserve that images leave free on the disk.
    pub(super) reserve: DiskReserve,
    limits: ImportLimits,
}

impl ImageAccess {
    /// The images of the containerd with this socket, before it has started.
    pub(super) fn new(socket: PathBuf, reserve: DiskReserve, limits: ImportLimits) -> Self {
        Self { socket, root: Mutex::default(), reserve, limits }
    }

    /// The directory of the images; `None` before containerd has started.
    pub(super) fn root_dir(&self) -> Option<PathBuf> {
        self.root.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_root_dir(&self, root: PathBuf) {
        *self.root.lock().unwrap_or_else(PoisonError::into_inner) = Some(root);
    }
}

pub(crate) async fn list_images(
    images: Option<Arc<ImageAccess>>,
    request: &v1::ImagesRequest,
) -> Result<v1::ImagesResponse, Status> {
    let namespace = parse_namespace(&request.namespace)?;
    let list = async { Ok::<_, Status>(connect_store(images).await?.list_images(&namespace).await) };
    let Ok(images) = timeout(LIST_TIMEOUT, list).await else {
        return Err(Status::aborted(format!(
            "containerd does not answer within {LIST_TIMEOUT:?}: see `nodectl status containerd`"
        )));
    };
    Ok(images_response(images?.map_err(|error| aborted_status(&error))?))
}

pub(crate) async fn import_images(
    images: Option<Arc<ImageAccess>>,
    request: &v1::ImportImagesRequest,
) -> Result<v1::ImagesResponse, Status> {
    // The request is checked before the archive is opened and containerd is called.
    let namespace = parse_namespace(&request.namespace)?;
    let path = PathBuf::from(&request.path);
    let opened = path.clone();
    // A file on a slow disk would block the thread of all calls.
    let file = spawn_blocking(move || open_archive(&opened)).await;
    let file = file.map_err(|error| Status::internal(error_chain(&error)))??;
    // An operator may import an archive again because its image is damaged.
    let limits = images.as_ref().map(|images| images.limits.clone()).unwrap_or_default();
    let store = connect_store(images).await?.with_layer_verification();
    let imported = nodekeel_containerd_svc::import_archive(&store, &namespace, &path, file, &limits).await;
    let imported = imported.map_err(|error| {
        // A retryable error is one of containerd. Any other is one of the archive, which the caller can correct.
        if error.is_retryable() {
            aborted_status(&error)
        } else {
            Status::invalid_argument(error_chain(&error))
        }
    })?;
    tracing::info!("imported {} into {namespace}: {} images", path.display(), imported.images.len());
    let wire = |image: LeftOutImage| v1::LeftOutImage {
        reason: error_chain(&image.reason),
        is_fault: !image.is_foreign(),
        name: image.name,
    };
    let left_out = imported.left_out.into_iter().map(wire).collect();
    Ok(v1::ImagesResponse { left_out, ..images_response(imported.images) })
}

fn parse_namespace(text: &str) -> Result<Namespace, Status> {
    text.parse().map_err(|error| Status::invalid_argument(error_chain(&error)))
}

/// Opens the archive without following a symbolic link at its name.
fn open_archive(path: &Path) -> Result<File, Status> {
    let invalid = |reason: &str| Status::invalid_argument(format!("{}: {reason}", path.display()));
    // A relative path would depend on noded's working directory, which a client does not know.
    let (Some(parent), Some(name), true) = (path.parent(), path.file_name(), path.is_absolute()) else {
        return Err(invalid("use the absolute path of a file"));
    };
    Dir::open(parent).and_then(|dir| dir.open_file(name)).map_err(|error| invalid(&error_chain(&error)))
}

async fn connect_store(images: Option<Arc<ImageAccess>>) -> Result<ContainerdImages, Status> {
    let Some(images) = images else {
        return Err(Status::failed_precondition(
            "this node does not run containerd; see services.containerd",
        ));
    };
    let store = ContainerdImages::connect(&images.socket).await;
    let store = store.map_err(|error| aborted_status(&error))?;
    // The disk is known once containerd has started on the open volume. An import checks its free space first.
    match images.root_dir() {
        Some(root) => Ok(store.with_disk(root, images.reserve)),
        None => Err(Status::aborted("containerd has not started: see root.storage and root.containerd")),
    }
}

fn images_response(mut images: Vec<Image>) -> v1::ImagesResponse {
    images.sort_by(|a, b| a.name.cmp(&b.name));
    let wire = |image: Image| v1::Image {
        name: image.name,
        digest: image.target.digest.to_string(),
        media_type: image.target.media_type,
    };
    v1::ImagesResponse { images: images.into_iter().map(wire).collect(), left_out: Vec::new() }
}

/// The status of a retryable error of containerd, or of its missing answer. The node itself was reached.
fn aborted_status(error: &dyn Error) -> Status {
    Status::aborted(error_chain(error))
}
