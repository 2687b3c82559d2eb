//! Serves /metrics, /healthz and /readyz.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use axum::serve::Listener;
use futures_util::StreamExt as _;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;
use tokio::net::{TcpListener, UnixStream};

use super::MetricsAddress;
use crate::control::{ConnectionStream, NodeSocket, SocketPath};
use crate::health::is_healthy;
use crate::node::NodeState;

/// The OpenMetrics text format. *Source:* prometheus-client's `encoding::text`.
const OPENMETRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Why the metrics are not served.
#[derive(Debug, Error)]
enum ServeError {
    #[error("can't listen on {address}: set metrics.address to another address or port")]
    Listen {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("can't serve metrics: the HTTP server failed")]
    Serve(#[source] io::Error),
}

/// The HTTP server. It listens in each of its incarnations anew.
#[derive(Debug)]
pub(super) struct MetricsServer {
    pub(super) address: MetricsAddress,
    pub(super) state: Arc<NodeState>,
}

impl Runnable for MetricsServer {
    fn run(&self, ctx: Context) -> RunFuture {
        let (address, router) = (self.address.clone(), build_router(&self.state));
        Box::pin(async move {
            match address {
                MetricsAddress::Tcp(address) => {
                    let listener = TcpListener::bind(address).await;
                    let listener = listener.map_err(|source| ServeError::Listen { address, source })?;
                    serve(listener, router, ctx).await
                }
                MetricsAddress::Unix(path) => {
                    let socket = NodeSocket::new(SocketPath::metrics(path))?;
                    serve(SocketListener(socket.listen()?), router, ctx).await
                }
            }
        })
    }
}

async fn serve<L>(listener: L, router: Router, ctx: Context) -> Result<(), Failure>
where
    L: Listener,
    L::Addr: std::fmt::Debug,
{
    ctx.signal_ready()?;
    tokio::select! {
        served = axum::serve(listener, router).into_future() => Err(match served {
            Ok(()) => Failure::new("the HTTP server has ended"),
            Err(error) => ServeError::Serve(error).into(),
        }),
        // An answer in progress is lost: its client asks again.
        canceled = ctx.canceled() => Err(canceled.into()),
    }
}

fn build_router(state: &Arc<NodeState>) -> Router {
    let (of_metrics, of_health) = (Arc::clone(state), Arc::clone(state));
    let metrics = async move || ([(CONTENT_TYPE, OPENMETRICS_TYPE)], of_metrics.encode_metrics().await);
    let readiness = async move || {
        let conditions = of_health.assess_health().await;
        let lines: String =
            conditions.iter().map(|found| format!("{}: {found}\n", found.severity.as_str())).collect();
        match is_healthy(&conditions) {
            true => (StatusCode::OK, format!("ready\n{lines}")),
            false => (StatusCode::SERVICE_UNAVAILABLE, lines),
        }
    };
    Router::new()
        // An answer is enough: the supervisor restarts what has failed.
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(readiness))
        .route("/metrics", get(metrics))
}

/// The connections of a unix socket.
struct SocketListener(ConnectionStream);

impl Listener for SocketListener {
    type Io = UnixStream;
    type Addr = ();

    async fn accept(&mut self) -> (UnixStream, ()) {
        loop {
            // After an error the stream pauses by itself, and it never ends.
            if let Some(Ok(connection)) = self.0.next().await {
                return (connection, ());
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}
