//! Calls that a part adds to the control API.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::Poll;

use hyper_util::rt::TokioIo;
use nodekeel_node::part::PreparedRunnable;
use nodekeel_node::v1::TreeRequest;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::{NTP, ntp_node};
use crate::harness::{TEST_TIMEOUT, TestNode, TestPart, run_ready};

/// A gRPC service that answers an empty message.
#[derive(Clone)]
struct PingService;

impl NamedService for PingService {
    const NAME: &'static str = "example.Ping";
}

impl Service<http::Request<Body>> for PingService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let answer = tower::service_fn(async |_: Request<()>| Ok::<_, Status>(Response::new(())));
        let codec = ProstCodec::<(), ()>::default();
        Box::pin(async move { Ok(tonic::server::Grpc::new(codec).unary(answer, request).await) })
    }
}

/// A part that adds a call to the control API.
fn ping_part(name: &str) -> TestPart {
    TestPart::prepared(name, |node| {
        node.control_services().add_service(PingService)?;
        Ok(PreparedRunnable::new(run_ready))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_adds_calls_to_the_control_api() {
    let mut node = TestNode::start_with("", |builder| builder.with(ping_part("ping"))).await;
    let socket = node.node.control_socket().to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    let channel = Endpoint::from_static("http://node").connect_with_connector(connector).await.unwrap();
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.unwrap();
    let path = http::uri::PathAndQuery::from_static("/example.Ping/Ping");
    let codec = ProstCodec::<(), ()>::default();
    timeout(TEST_TIMEOUT, client.unary(Request::new(()), path, codec)).await.unwrap().unwrap();
    node.client.tree(TreeRequest {}).await.unwrap();
    node.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_parts_that_add_one_grpc_service_keep_the_node_from_starting() {
    let error = ntp_node("").1.with(ping_part("ping")).with(ping_part("second")).start().unwrap_err();
    assert!(error.to_string().starts_with("duplicate gRPC service example.Ping: "), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_the_control_api_runs_and_stops() {
    let (scratch, builder) = ntp_node(NTP);
    let node = builder.without("control").start().unwrap();
    for dn in ["root", "root.ntp"] {
        timeout(TEST_TIMEOUT, node.wait_ready(dn)).await.unwrap();
    }
    assert!(!scratch.path().join("data/run/control.sock").exists());
    assert!(node.shutdown().await.stragglers.is_empty());
}
