//! A proxy before containerd's socket, whose CRI lists images late.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::UnixListener;
use tokio::time::sleep;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response};
use tonic::transport::Channel;
use tower::{ServiceExt as _, service_fn};

const LIST_IMAGES: &str = "/runtime.v1.ImageService/ListImages";

/// The pause between two attempts to connect to a containerd that starts.
const CONNECT_PAUSE: Duration = Duration::from_millis(20);

/// The lists that it has answered.
pub(crate) type ListCount = Arc<AtomicUsize>;

/// Forwards all calls from one socket to another, once that listens, and answers the first `late` lists of images with
/// an empty one.
pub(crate) fn start_proxy(front: &Path, back: &Path, late: usize) -> ListCount {
    let lists = ListCount::default();
    let (front, back, counted) = (front.to_owned(), back.to_owned(), Arc::clone(&lists));
    tokio::spawn(async move {
        let channel = loop {
            match containerd_client::connect(&back).await {
                Ok(channel) => break channel,
                Err(_) => sleep(CONNECT_PAUSE).await,
            }
        };
        let listener = UnixListener::bind(front).unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            let (channel, counted) = (channel.clone(), Arc::clone(&counted));
            let service =
                service_fn(move |request| answer(channel.clone(), Arc::clone(&counted), late, request));
            tokio::spawn(async move {
                let connection = Builder::new(TokioExecutor::new()).http2_only();
                drop(
                    connection
                        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
                        .await,
                );
            });
        }
    });
    lists
}

async fn answer<B>(
    channel: Channel,
    lists: ListCount,
    late: usize,
    request: Request<B>,
) -> Result<Response<Body>, tonic::transport::Error>
where
    B: tonic::codegen::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<tonic::codegen::StdError>,
{
    if request.uri().path() == LIST_IMAGES && lists.fetch_add(1, Ordering::Relaxed) < late {
        return Ok(empty_answer());
    }
    channel.oneshot(request.map(Body::new)).await
}

/// A message without fields, and the status of a success.
fn empty_answer() -> Response<Body> {
    let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
    let body = Full::new(Bytes::from_static(&[0; 5])).with_trailers(async { Some(Ok(trailers)) });
    let mut answer = Response::new(Body::new(body));
    answer.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    answer
}
