//! The Prometheus metrics.

use std::sync::Arc;

use nodekeel_provisioner::{DirStore, PrometheusMetrics};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// The metrics; gauges are updated at each scrape.
#[derive(Debug)]
pub(crate) struct DaemonMetrics {
    registry: Registry,
    pub(crate) meter: PrometheusMetrics,
    erasing: Gauge,
    registered: Gauge,
    api_server_up: Gauge,
}

impl DaemonMetrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::default();
        let meter = PrometheusMetrics::register_in(&mut registry);
        let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("provisionerd_build", "Build information", version);
        let (erasing, registered, api_server_up) = (Gauge::default(), Gauge::default(), Gauge::default());
        registry.register(
            "provisionerd_volumes_erasing",
            "Deleted volumes that are still being erased",
            erasing.clone(),
        );
        registry.register(
            "provisionerd_kubelet_registered",
            "Whether the kubelet knows the driver",
            registered.clone(),
        );
        registry.register(
            "provisionerd_api_server_up",
            "Whether the API server answers, and accepts the credentials",
            api_server_up.clone(),
        );
        Self { registry, meter, erasing, registered, api_server_up }
    }

    /// Encodes the metrics as text.
    pub(crate) fn encode_text(
        &self,
        store: &Arc<DirStore>,
        registered: Option<&watch::Receiver<bool>>,
        is_api_server_up: bool,
    ) -> String {
        self.erasing.set(i64::try_from(store.pending_erasures()).unwrap_or(i64::MAX));
        self.registered.set(registered.is_some_and(|registered| *registered.borrow()).into());
        self.api_server_up.set(is_api_server_up.into());
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
