//! What the control API does with the images of the node's containerd.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};

use nodekeel_containerd_svc::{ContainerdImages, Image, ImageStore as _, Namespace};
use nodekeel_localstorage::Dir;
use tokio::task::spawn_blocking;
use tonic::Status;

use crate::node::Shared;
use crate::plan::{self, Service};
use crate::v1;

pub(super) async fn list(shared: &Shared, request: &v1::ImagesRequest) -> Result<v1::ImagesResponse, Status> {
    let namespace = namespace(&request.namespace)?;
    let images = store(shared).await?.images(&namespace).await;
    Ok(response(images.map_err(|error| not_now(&error))?))
}

pub(super) async fn import(
    shared: &Shared,
    request: &v1::ImportImagesRequest,
) -> Result<v1::ImagesResponse, Status> {
    let namespace = namespace(&request.namespace)?;
    let path = PathBuf::from(&request.path);
    let opened = path.clone();
    let file = spawn_blocking(move || open(&opened)).await;
    let file = file.map_err(|error| Status::internal(plan::chain(&error)))??;
    let store = store(shared).await?;
    let imported = nodekeel_containerd_svc::import(&store, &namespace, (&path, file)).await;
    let images = imported.map_err(|error| match error.is_retryable() {
        true => not_now(&error),
        false => Status::invalid_argument(plan::chain(&error)),
    })?;
    tracing::info!("imported {} into {namespace}: {} images", path.display(), images.len());
    Ok(response(images))
}

fn namespace(text: &str) -> Result<Namespace, Status> {
    text.parse().map_err(|error| Status::invalid_argument(plan::chain(&error)))
}

/// The archive: a file, and not what a link at that name leads to.
fn open(path: &Path) -> Result<File, Status> {
    let wrong = |why: &str| Status::invalid_argument(format!("{}: {why}", path.display()));
    let (Some(parent), Some(name), true) = (path.parent(), path.file_name(), path.is_absolute()) else {
        return Err(wrong("give the absolute path of a file"));
    };
    Dir::open(parent).and_then(|dir| dir.open_file(name)).map_err(|error| wrong(&plan::chain(&error)))
}

async fn store(shared: &Shared) -> Result<ContainerdImages, Status> {
    let containerd = shared.plan.services.iter().find_map(|planned| match &planned.service {
        Service::Containerd(containerd) if planned.skipped.is_none() => Some(containerd),
        _ => None,
    });
    let Some(containerd) = containerd else {
        return Err(Status::failed_precondition("this node runs no containerd; see services.containerd"));
    };
    ContainerdImages::connect(&containerd.place.socket()).await.map_err(|error| not_now(&error))
}

fn response(mut images: Vec<Image>) -> v1::ImagesResponse {
    images.sort_by(|a, b| a.name.cmp(&b.name));
    let wire = |image: Image| v1::Image {
        name: image.name,
        digest: image.target.digest.to_string(),
        media_type: image.target.media_type,
    };
    v1::ImagesResponse { images: images.into_iter().map(wire).collect() }
}

/// containerd's answer, or that it gave none: a retry may help. The node itself was reached.
fn not_now(error: &dyn Error) -> Status {
    Status::aborted(plan::chain(error))
}
