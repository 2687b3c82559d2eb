//! A tonic server as a runnable.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::path::Path;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use nodekeel_supervisor::testing::EventRecorder;
use nodekeel_supervisor::{ChildSpec, Context, ExitReason, RunnableState, Supervisor, serve_grpc};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::Server;

use crate::harness::parent_of;

/// A service without methods: the tests cover only the server's lifecycle.
#[derive(Clone)]
struct SilentService;

impl NamedService for SilentService {
    const NAME: &'static str = "test.Silent";
}

impl Service<http::Request<tonic::body::Body>> for SilentService {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut TaskContext<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<tonic::body::Body>) -> Self::Future {
        ready(Ok(http::Response::new(tonic::body::Body::empty())))
    }
}

fn start_server(socket: &Path, recorder: &EventRecorder) -> Supervisor {
    let socket = socket.to_owned();
    Supervisor::builder().event_hook(recorder.clone()).start(parent_of(move |ctx| {
        let socket = socket.clone();
        let listen = move || {
            let bound = UnixListener::bind(&socket).map(UnixListenerStream::new);
            ready(bound)
        };
        let router = |_: &Context| Server::builder().add_service(SilentService);
        ctx.run_child_with(ChildSpec::new("grpc", serve_grpc(listen, router, Duration::from_millis(200))))
    }))
}

#[tokio::test]
async fn a_server_is_ready_once_bound_and_closes_connections_after_the_grace_period() {
    let dir = tempfile::tempdir().expect("a directory");
    let (socket, recorder) = (dir.path().join("grpc.sock"), EventRecorder::default());
    let supervisor = start_server(&socket, &recorder);
    recorder.wait_for_state("root.grpc", RunnableState::Ready).await;
    let mut client = UnixStream::connect(&socket).await.expect("it listens when it is ready");
    // The preface and an empty SETTINGS frame, then silence: an idle connection that never closes by itself.
    client
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .expect("the server accepts the preface");
    let mut first = [0; 9];
    client.read_exact(&mut first).await.expect("the server answers");
    let report =
        tokio::time::timeout(Duration::from_secs(5), supervisor.shutdown()).await.expect("the shutdown ends");
    assert!(report.stragglers.is_empty());
    assert_eq!(recorder.states_of("root.grpc").last(), Some(&RunnableState::Canceled));
    let mut rest = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(5), client.read_to_end(&mut rest)).await;
    assert!(read.is_ok(), "the connection outlives its server");
}

#[tokio::test]
async fn a_listener_that_cannot_be_bound_fails_the_runnable_with_the_reason() {
    let recorder = EventRecorder::default();
    let _supervisor = start_server(Path::new("/nowhere/at/all.sock"), &recorder);
    let dead = recorder.wait_for_state("root.grpc", RunnableState::Dead).await;
    let nodekeel_supervisor::RunnableChange::Exited { exit: ExitReason::Failed { error, .. }, .. } =
        dead.change
    else {
        panic!("{dead:?}")
    };
    assert_eq!(error, "can't listen for gRPC connections: No such file or directory (os error 2)");
    assert!(!recorder.states_of("root.grpc").contains(&RunnableState::Ready));
}
