//! Serves /metrics, /healthz and /readyz.

use std::future::ready;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use futures_util::{Stream, StreamExt as _};
use nix::unistd::geteuid;
use nodekeel_logtree::is_unprintable;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable, listen_http, serve_http};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixStream};
use tokio_stream::wrappers::TcpListenerStream;

use super::MetricsAddress;
use crate::control::socket::{NodeSocket, SocketPath};
use crate::health::is_healthy;
use crate::running::RunningNode;

/// The OpenMetrics text format. *Source:* prometheus-client's `encoding::text`.
const OPENMETRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The reason why the metrics are not served.
#[derive(Debug, Error)]
enum ServeError {
    #[error("can't listen on {address}: set metrics.address to another address or port")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// The HTTP server. It listens in each of its incarnations anew.
#[derive(Debug)]
pub(super) struct MetricsServer {
    pub(super) address: MetricsAddress,
    pub(super) running: Arc<RunningNode>,
}

impl Runnable for MetricsServer {
    fn run(&self, ctx: Context) -> RunFuture {
        let (address, router) = (self.address.clone(), build_router(&self.running));
        Box::pin(async move {
            match address {
                MetricsAddress::Tcp(address) => {
                    let listener = listen_http(address).and_then(TcpListener::from_std);
                    let listener = listener.map_err(|source| ServeError::Listen { address, source })?;
                    serve(TcpListenerStream::new(listener), router, ctx).await
                }
                MetricsAddress::Unix(path) => {
                    // The socket of this incarnation closes with it. Unlike that of the control API, it need not
                    // outlive a restart.
                    let socket = Arc::new(NodeSocket::new(SocketPath::metrics(path))?);
                    let admitted = socket
                        .listen()?
                        .filter(|accepted| ready(accepted.as_ref().map_or(true, is_admitted)));
                    serve(admitted, router, ctx).await
                }
            }
        })
    }
}

async fn serve<I>(
    connections: impl Stream<Item = io::Result<I>>,
    router: Router,
    ctx: Context,
) -> Result<(), Failure>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // The address is bound by now, and the kernel queues connections.
    ctx.signal_ready()?;
    tokio::select! {
        () = serve_http(connections, router) => Err(Failure::new("the listener has closed")),
        canceled = ctx.canceled() => Err(canceled.into()),
    }
}

/// Returns whether the client is of the node's user or root. The mode of the file ensures the same, but only from
/// just after its creation on.
fn is_admitted(connection: &UnixStream) -> bool {
    connection.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == geteuid().as_raw())
}

fn build_router(running: &Arc<RunningNode>) -> Router {
    let (of_metrics, of_health) = (Arc::clone(running), Arc::clone(running));
    let metrics = async move || ([(CONTENT_TYPE, OPENMETRICS_TYPE)], of_metrics.encode_metrics().await);
    let readiness = async move || {
        let conditions = of_health.assess_health().await;
        // A text of a daemon stays in its line, and can't control a terminal.
        let line = |text: String| format!("{}\n", text.replace(is_unprintable, " "));
        let lines: String =
            conditions.iter().map(|found| line(format!("{}: {found}", found.severity.as_str()))).collect();
        if is_healthy(&conditions) {
            (StatusCode::OK, format!("ready\n{lines}"))
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, lines)
        }
    };
    Router::new()
        // An answer is enough: the supervisor restarts what has failed.
        .route("/healthz", get(|| ready("ok\n")))
        .route("/readyz", get(readiness))
        .route("/metrics", get(metrics))
}
