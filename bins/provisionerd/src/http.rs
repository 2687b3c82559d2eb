//! /healthz, /readyz and /metrics.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use nodekeel_provisioner::DirStore;
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;
use tokio::sync::watch;

use crate::metrics::Metrics;

/// What is asked when somebody asks.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) store: Arc<DirStore>,
    /// Whether the kubelet knows the driver; `None` without CSI.
    pub(crate) known: Option<watch::Receiver<bool>>,
    /// What isn't ready yet, by name.
    pub(crate) waiting: watch::Receiver<Vec<String>>,
}

/// Why nobody is told anything.
#[derive(Debug, Error)]
pub(crate) enum HttpError {
    #[error("take the socket")]
    Socket(#[source] io::Error),
    #[error("serve HTTP")]
    Serve(#[source] io::Error),
}

/// Serves on a socket that stays bound over restarts.
#[derive(Debug)]
pub(crate) struct Http {
    pub(crate) listener: TcpListener,
    pub(crate) told: Told,
}

/// The OpenMetrics text format. *Source:* prometheus-client's `encoding::text`.
const METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

fn router(told: Told) -> Router {
    let Told { metrics, store, known, waiting } = told;
    let text = move || std::future::ready(([(CONTENT_TYPE, METRICS)], metrics.text(&store, known.as_ref())));
    let is_ready = move || {
        let waiting = waiting.borrow().clone();
        std::future::ready(match waiting.is_empty() {
            true => (StatusCode::OK, "ready\n".to_owned()).into_response(),
            false => (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", waiting.join(", ")))
                .into_response(),
        })
    };
    Router::new()
        // Who answers lives: what fails inside is restarted inside.
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(is_ready))
        .route("/metrics", get(text))
}

impl Runnable for Http {
    fn run(&self, ctx: Context) -> RunFuture {
        let (listener, router) = (self.listener.try_clone(), router(self.told.clone()));
        Box::pin(async move {
            let listener = listener.map_err(HttpError::Socket)?;
            let listener = tokio::net::TcpListener::from_std(listener).map_err(HttpError::Socket)?;
            ctx.ready()?;
            let token = ctx.token();
            let served =
                axum::serve(listener, router).with_graceful_shutdown(async move { token.cancelled().await });
            tokio::select! {
                served = served => served.map_err(HttpError::Serve)?,
                _ = ctx.cancelled() => {}
            }
            Err(Failure::from(ctx.cancelled().await))
        })
    }
}
