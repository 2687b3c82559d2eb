//! A tonic server as a runnable.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::path::Path;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use nodekeel_supervisor::testing::Recorder;
use nodekeel_supervisor::{Child, Context, Exit, State, Supervisor, serve};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::Server;

use crate::tree::steady;

/// A service that answers nothing: what is tested is the server's life.
#[derive(Clone)]
struct Silent;

impl NamedService for Silent {
    const NAME: &'static str = "test.Silent";
}

impl Service<http::Request<tonic::body::Body>> for Silent {
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

fn serving(socket: &Path, recorder: &Recorder) -> Supervisor {
    let socket = socket.to_owned();
    Supervisor::builder().hook(recorder.clone()).start(move |ctx: Context| {
        let socket = socket.clone();
        async move {
            let listen = move || {
                let bound = UnixListener::bind(&socket).map(UnixListenerStream::new);
                ready(bound)
            };
            let router = |_: &Context| Server::builder().add_service(Silent);
            ctx.run_group([Child::new("grpc", serve(listen, router, Duration::from_millis(200)))])?;
            steady(ctx).await
        }
    })
}

#[tokio::test]
async fn a_server_is_ready_once_it_is_bound_and_cuts_what_outstays_its_grace() {
    let dir = tempfile::tempdir().expect("a directory");
    let (socket, recorder) = (dir.path().join("grpc.sock"), Recorder::default());
    let supervisor = serving(&socket, &recorder);
    recorder.until("root.grpc", State::Ready).await;
    let mut client = UnixStream::connect(&socket).await.expect("it listens when it says that it is ready");
    // The preface and an empty SETTINGS frame, then silence: an idle connection that never ends by itself.
    client
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .await
        .expect("it takes the preface");
    let mut first = [0; 9];
    client.read_exact(&mut first).await.expect("it answers");
    let report = tokio::time::timeout(Duration::from_secs(5), supervisor.shutdown()).await.expect("it ends");
    assert!(report.stragglers.is_empty());
    assert_eq!(recorder.states("root.grpc").last(), Some(&State::Canceled));
    let mut rest = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(5), client.read_to_end(&mut rest)).await;
    assert!(read.is_ok(), "the connection outlives its server");
}

#[tokio::test]
async fn a_listener_that_cannot_be_bound_is_a_failure_that_says_so() {
    let recorder = Recorder::default();
    let _supervisor = serving(Path::new("/nowhere/at/all.sock"), &recorder);
    let dead = recorder.until("root.grpc", State::Dead).await;
    let nodekeel_supervisor::Change::Exited { exit: Exit::Failed { error, .. }, .. } = dead.change else {
        panic!("{dead:?}")
    };
    assert_eq!(error, "listen for gRPC: No such file or directory (os error 2)");
    assert!(!recorder.states("root.grpc").contains(&State::Ready));
}
