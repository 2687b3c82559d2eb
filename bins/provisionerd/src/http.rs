//! Serves /healthz, /readyz and /metrics.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use nodekeel_provisioner::{DirStore, Provisioner, StoreStatus, VolumeStore as _};
use nodekeel_supervisor::{Context, RunFuture, Runnable, serve_http};
use thiserror::Error;
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;

use crate::metrics::DaemonMetrics;

/// The state that the endpoints read.
#[derive(Debug, Clone)]
pub(crate) struct HttpState {
    pub(crate) metrics: Arc<DaemonMetrics>,
    pub(crate) store: Arc<DirStore>,
    /// True once the kubelet has registered the driver; `None` without CSI.
    pub(crate) registered: Option<watch::Receiver<bool>>,
    /// Knows whether the API server can be used.
    pub(crate) provisioner: Provisioner,
    /// The DNs of the runnables that are not ready.
    pub(crate) not_ready: watch::Receiver<Vec<String>>,
}

#[derive(Debug, Error)]
pub(crate) enum HttpError {
    #[error("can't listen on the HTTP socket")]
    Listen(#[source] io::Error),
    #[error("the HTTP listener has closed")]
    Closed,
}

/// The HTTP server, on a socket that stays bound over restarts.
#[derive(Debug)]
pub(crate) struct HttpServer {
    pub(crate) listener: TcpListener,
    pub(crate) state: HttpState,
}

/// The OpenMetrics text format. *Source:* prometheus-client's `encoding::text`.
pub(crate) const OPENMETRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

fn build_router(state: HttpState) -> Router {
    let HttpState { metrics, store, registered, provisioner, not_ready } = state;
    let text = {
        let provisioner = provisioner.clone();
        async move || {
            let is_up = provisioner.check_api().await.is_none();
            metrics.set_capacity(store.capacity().await.ok().flatten());
            metrics.set_node_label(provisioner.check_node().is_none());
            let is_served = match provisioner.store_status() {
                StoreStatus::Served(_) => Some(true),
                StoreStatus::Unserved { .. } => Some(false),
                // Not known yet: the API server may be unreachable.
                _ => None,
            };
            metrics.set_volumes(is_served, store.list().await.ok().map(|volumes| volumes.len()));
            let ability = provisioner.ability();
            metrics.set_ability(&ability);
            metrics.set_formats(&ability, &provisioner.missing_formats());
            let text = metrics.encode_text(&store, registered.as_ref(), is_up);
            ([(CONTENT_TYPE, OPENMETRICS_TYPE)], text)
        }
    };
    let is_ready = async move || {
        let api_error = provisioner.check_api().await;
        let mut waiting = not_ready.borrow().clone();
        waiting.extend(api_error.map(|error| format!("the API server ({error})")));
        if let Some(why) = provisioner.ability().inability() {
            waiting.push(format!("the disk of the volumes ({why})"));
        }
        waiting.extend(provisioner.check_node().map(|error| format!("the label of the node ({error})")));
        waiting.extend(provisioner.check_lease().map(|error| format!("the Lease of the node ({error})")));
        if waiting.is_empty() {
            (StatusCode::OK, "ready\n".to_owned())
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", waiting.join(", ")))
        }
    };
    Router::new()
        // An answer is enough: the supervisor restarts failed parts.
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(is_ready))
        .route("/metrics", get(text))
}

impl Runnable for HttpServer {
    fn run(&self, ctx: Context) -> RunFuture {
        // A clone for each incarnation, so that the socket stays bound over restarts.
        let (listener, router) = (self.listener.try_clone(), build_router(self.state.clone()));
        Box::pin(async move {
            let listener = listener.map_err(HttpError::Listen)?;
            let listener = tokio::net::TcpListener::from_std(listener).map_err(HttpError::Listen)?;
            ctx.signal_ready()?;
            tokio::select! {
                () = serve_http(TcpListenerStream::new(listener), router) => Err(HttpError::Closed.into()),
                canceled = ctx.canceled() => Err(canceled.into()),
            }
        })
    }
}
