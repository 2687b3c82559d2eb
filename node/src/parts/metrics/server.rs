//! Serves /metrics, /healthz and /readyz.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use axum::serve::Listener;
use nodekeel_logtree::is_unprintable;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;
use tokio::net::TcpListener;

use super::MetricsAddress;
use super::listener::{BoundedListener, SocketListener};
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
    #[error("can't serve metrics: the HTTP server failed")]
    Serve(#[source] io::Error),
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
                    let listener = TcpListener::bind(address).await;
                    let listener = listener.map_err(|source| ServeError::Listen { address, source })?;
                    serve(listener, router, ctx).await
                }
                MetricsAddress::Unix(path) => {
                    // The socket of this incarnation closes with it. Unlike that of the control API, it need not
                    // outlive a restart.
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
    // The address is bound by now, and the kernel queues connections.
    ctx.signal_ready()?;
    tokio::select! {
        served = axum::serve(BoundedListener::new(listener), router).into_future() => Err(match served {
            Ok(()) => Failure::new("the HTTP server has ended"),
            Err(error) => ServeError::Serve(error).into(),
        }),
        // Connections without a request are closed; an answer in progress is still sent while the program runs.
        canceled = ctx.canceled() => Err(canceled.into()),
    }
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
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(readiness))
        .route("/metrics", get(metrics))
}
