//! Serves /healthz, /readyz and /metrics.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use futures_util::future::join_all;
use nodekeel_provisioner::{Provisioner, StoreHealth, VolumeStore as _};
use nodekeel_supervisor::{Context, RunFuture, Runnable, serve_http};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_stream::wrappers::TcpListenerStream;

use crate::metrics::{DaemonMetrics, StoreSample};
use crate::run::OpenStore;

/// The time within which a disk answers a scrape.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The state that the endpoints read.
#[derive(Debug, Clone)]
pub(crate) struct HttpState {
    pub(crate) metrics: Arc<DaemonMetrics>,
    /// As the provisioner has them.
    pub(crate) stores: Vec<OpenStore>,
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
    let HttpState { metrics, stores, registered, provisioner, not_ready } = state;
    let text = {
        let provisioner = provisioner.clone();
        let turns: Vec<Turn> = stores.iter().map(|_| Turn::default()).collect();
        async move || {
            metrics.set_node_label(provisioner.check_node().is_none());
            // All at once: a disk that hangs delays only what is told of it.
            let samples = stores.iter().zip(provisioner.stores()).zip(&turns);
            let samples = samples.map(async |((store, health), turn)| {
                let asked = Arc::clone(&store.store);
                let asked = async move { tokio::join!(asked.capacity(), asked.list()) };
                let (capacity, volumes) = answer(turn, asked).await.unzip();
                let capacity = capacity.and_then(Result::ok).flatten();
                let volumes = volumes.and_then(Result::ok).map(|volumes| volumes.len());
                StoreSample { health, capacity, volumes, backlog: store.store.erase_backlog() }
            });
            let (api_error, samples) = tokio::join!(provisioner.check_api(), join_all(samples));
            metrics.set_stores(&samples);
            let text = metrics.encode_text(registered.as_ref(), api_error.is_none());
            ([(CONTENT_TYPE, OPENMETRICS_TYPE)], text)
        }
    };
    let is_ready = async move || {
        let api_error = provisioner.check_api().await;
        let mut waiting = not_ready.borrow().clone();
        waiting.extend(api_error.map(|error| format!("the API server ({error})")));
        // One that can be used is enough: a disk that is gone must not keep an update of the DaemonSet from ending.
        let (broken, is_waiting) = find_broken_stores(&provisioner.stores());
        if is_waiting {
            waiting.extend(broken.iter().cloned());
        }
        waiting.extend(provisioner.check_node().map(|error| format!("the label of the node ({error})")));
        waiting.extend(provisioner.check_lease().map(|error| format!("the Lease of the node ({error})")));
        if waiting.is_empty() {
            let besides = broken.iter().map(|store| format!("; not served: {store}")).collect::<String>();
            (StatusCode::OK, format!("ready{besides}\n"))
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

/// The stores in which no volume can be created, with the reason, and whether these are all.
fn find_broken_stores(stores: &[StoreHealth]) -> (Vec<String>, bool) {
    let broken = stores.iter().filter_map(|store| {
        let why = store.ability.inability()?;
        let name = store.name.as_ref().map(|name| format!(" of store {name}")).unwrap_or_default();
        Some(format!("the disk of the volumes{name} ({why})"))
    });
    let broken: Vec<_> = broken.collect();
    let is_all = broken.len() == stores.len();
    (broken, is_all)
}

/// Held by the call that a disk is about to answer: each call of one that hangs takes threads for as long.
type Turn = Arc<tokio::sync::Mutex<()>>;

/// The answer of a disk, unless it hangs, or does since an earlier call.
async fn answer<T: Send + 'static>(
    turn: &Turn,
    asked: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    let call = async {
        let held = Arc::clone(turn).lock_owned().await;
        // In a task: the turn ends with the call, and not with the scrape that gives it up.
        tokio::spawn(async move {
            let _held = held;
            asked.await
        })
        .await
        .ok()
    };
    timeout(ANSWER_TIMEOUT, call).await.ok()?
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

#[cfg(test)]
mod tests {
    use nodekeel_provisioner::{Ability, InabilityCause, StoreStatus};

    use super::*;

    #[tokio::test]
    async fn a_disk_that_hangs_is_asked_once_until_it_answers() {
        let (turn, (release, released)) = (Turn::default(), tokio::sync::oneshot::channel::<()>());
        assert!(answer(&turn, released).await.is_none(), "it hangs");
        assert_eq!(answer(&turn, async { unreachable!("it is not asked") }).await, None::<()>);
        release.send(()).expect("still asked");
        assert_eq!(answer(&turn, async { 3 }).await, Some(3));
    }

    #[test]
    fn a_node_waits_for_its_disks_only_if_it_has_none_that_can_be_used() {
        let store = |name: Option<&str>, is_able: bool| StoreHealth {
            name: name.map(|name| name.parse().expect("a name")),
            status: StoreStatus::Unknown,
            ability: match is_able {
                true => Ability::Able,
                false => Ability::Unable { cause: InabilityCause::ReadOnly, why: "read-only".to_owned() },
            },
            missing_formats: Default::default(),
        };
        let unnamed = "the disk of the volumes (read-only)".to_owned();
        let fast = "the disk of the volumes of store fast (read-only)".to_owned();
        for (is_able, broken, is_waiting) in [
            ([true, true], vec![], false),
            ([true, false], vec![fast.clone()], false),
            ([false, true], vec![unnamed.clone()], false),
            ([false, false], vec![unnamed.clone(), fast], true),
        ] {
            let stores = [store(None, is_able[0]), store(Some("fast"), is_able[1])];
            assert_eq!(find_broken_stores(&stores), (broken, is_waiting), "{is_able:?}");
        }
        assert_eq!(find_broken_stores(&[store(None, false)]), (vec![unnamed], true));
    }
}
