//! What Prometheus is told.

use std::sync::Arc;

use nodekeel_provisioner::{DirStore, PrometheusMeter};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// The counters, and what is looked up when somebody asks.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) meter: PrometheusMeter,
    erasing: Gauge,
    registered: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::default();
        let meter = PrometheusMeter::register(&mut registry);
        let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("provisionerd_build", "What runs", version);
        let (erasing, registered) = (Gauge::default(), Gauge::default());
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
        Self { registry, meter, erasing, registered }
    }

    /// The text that Prometheus reads.
    pub(crate) fn text(&self, store: &Arc<DirStore>, known: Option<&watch::Receiver<bool>>) -> String {
        self.erasing.set(i64::try_from(store.erasing()).unwrap_or(i64::MAX));
        self.registered.set(known.is_some_and(|known| *known.borrow()).into());
        let mut text = String::new();
        // Writing into a text can't fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
