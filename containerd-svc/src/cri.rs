//! The part of the CRI that shows whether a kubelet could work with this containerd.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use crate::config::CRI_PLUGIN;
use crate::store::ErrorSource;

/// The namespace whose images the CRI lists.
///
/// *Source:* containerd's `K8sContainerdNamespace`.
pub(crate) const CRI_NAMESPACE: &str = "k8s.io";

/// *Source of the numbers:* k8s.io/cri-api, pkg/apis/runtime/v1/api.proto.
mod wire {
    use prost::Message;

    /// The requests of Version and of ListImages: all of their fields are optional.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub(super) struct EmptyRequest {}

    #[derive(Clone, PartialEq, Eq, Message)]
    pub(super) struct VersionResponse {
        #[prost(string, tag = "3")]
        pub(super) runtime_version: String,
    }

    #[derive(Clone, PartialEq, Eq, Message)]
    pub(super) struct ListedImage {
        #[prost(string, repeated, tag = "2")]
        pub(super) repo_tags: Vec<String>,
        #[prost(string, repeated, tag = "3")]
        pub(super) repo_digests: Vec<String>,
    }

    #[derive(Clone, PartialEq, Eq, Message)]
    pub(super) struct ListImagesResponse {
        #[prost(message, repeated, tag = "1")]
        pub(super) images: Vec<ListedImage>,
    }
}

/// The CRI of a containerd does not answer.
#[derive(Debug, thiserror::Error)]
#[error(
    "can't call the CRI of containerd at {socket}: see containerd's log for the error of its CRI plugin; \
     where no kubelet uses it, add {CRI_PLUGIN} to disabled_plugins"
)]
pub(crate) struct CriError {
    socket: PathBuf,
    #[source]
    source: ErrorSource,
}

/// Asks the CRI for its version, as a kubelet does first.
pub(crate) async fn cri_version(socket: &Path) -> Result<String, CriError> {
    let answer: wire::VersionResponse = call(socket, "RuntimeService/Version").await?;
    Ok(answer.runtime_version)
}

/// The names of all images that the CRI lists.
pub(crate) async fn list_cri_images(socket: &Path) -> Result<BTreeSet<String>, CriError> {
    let answer: wire::ListImagesResponse = call(socket, "ImageService/ListImages").await?;
    let names =
        answer.images.into_iter().flat_map(|image| image.repo_tags.into_iter().chain(image.repo_digests));
    Ok(names.collect())
}

async fn call<A: Message + Default + 'static>(socket: &Path, method: &str) -> Result<A, CriError> {
    let failed = |source: ErrorSource| CriError { socket: socket.to_owned(), source };
    let channel = containerd_client::connect(socket).await.map_err(|error| failed(error.into()))?;
    // tonic's limit of 4 MiB may be too small for the list of a node with many images.
    let mut client = Grpc::new(channel).max_decoding_message_size(usize::MAX);
    client.ready().await.map_err(|error| failed(error.into()))?;
    let path =
        PathAndQuery::try_from(format!("/runtime.v1.{method}")).map_err(|error| failed(error.into()))?;
    let codec: ProstCodec<wire::EmptyRequest, A> = ProstCodec::default();
    let answer = client.unary(Request::new(wire::EmptyRequest {}), path, codec).await;
    answer.map(tonic::Response::into_inner).map_err(|status: Status| failed(status.into()))
}
