//! The Prometheus metrics.

use nodekeel_provisioner::{
    Ability, EraseBacklog, ImageFormat, PrometheusMetrics, StoreCapacity, StoreHealth, StoreStatus,
};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// The labels of a metric of a store; `store` is the name of one that has a name.
type StoreLabels = Vec<(&'static str, String)>;

/// What a scrape has found of a store; what is not known is absent.
#[derive(Debug)]
pub(crate) struct StoreSample {
    pub(crate) health: StoreHealth,
    pub(crate) capacity: Option<StoreCapacity>,
    pub(crate) volumes: Option<usize>,
    pub(crate) backlog: EraseBacklog,
}

/// The metrics; gauges are updated at each scrape.
#[derive(Debug)]
pub(crate) struct DaemonMetrics {
    registry: Registry,
    pub(crate) meter: PrometheusMetrics,
    /// Without a value while their number is unknown.
    volumes: Family<StoreLabels, Gauge>,
    /// The same, while the first lists of the API server are incomplete.
    store_served: Family<StoreLabels, Gauge>,
    /// Without a value while it is not known.
    store_able: Family<StoreLabels, Gauge>,
    format_able: Family<StoreLabels, Gauge>,
    erasing: Gauge,
    erasing_bytes: Gauge,
    registered: Gauge,
    api_server_up: Gauge,
    node_label: Gauge,
    store_bytes: Family<StoreLabels, Gauge>,
}

impl DaemonMetrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::default();
        let meter = PrometheusMetrics::register_in(&mut registry);
        let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("provisionerd_build", "Build information", version);
        // A family can be cleared, and so be absent from the text. A gauge always has a value.
        let (volumes, store_served, erasing_bytes) = (Family::default(), Family::default(), Gauge::default());
        registry.register("provisionerd_volumes", "Volumes in the directory", Family::clone(&volumes));
        registry.register(
            "provisionerd_store_served",
            "Whether the volumes are served: their disk is mounted, and it is the one of this node",
            Family::clone(&store_served),
        );
        let store_able = Family::default();
        registry.register(
            "provisionerd_store_able",
            "Whether volumes can be created, as the last probe of the directory has found, and the cause if not",
            Family::clone(&store_able),
        );
        let format_able = Family::default();
        registry.register(
            "provisionerd_format_able",
            "Whether the program that makes the file system of strict volumes is on the node",
            Family::clone(&format_able),
        );
        registry.register(
            "provisionerd_volumes_erasing_bytes",
            "Bytes of deleted volumes that are still being erased",
            erasing_bytes.clone(),
        );
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
        let (node_label, store_bytes) = (Gauge::default(), Family::default());
        registry.register(
            "provisionerd_node_label_matches",
            "Whether the topology label of the node is its name, as far as known",
            node_label.clone(),
        );
        registry.register(
            "provisionerd_store_bytes",
            "Bytes of the volumes' file system: its size, what is free, what is reserved for other data, what is \
             promised to volumes, and what still can be",
            Family::clone(&store_bytes),
        );
        Self {
            registry,
            meter,
            volumes,
            store_served,
            store_able,
            format_able,
            erasing_bytes,
            node_label,
            store_bytes,
            erasing,
            registered,
            api_server_up,
        }
    }

    /// Sets the metrics of all stores.
    pub(crate) fn set_stores(&self, stores: &[StoreSample]) {
        // Cleared first: what is unknown must not leave the values of the scrape before.
        for family in
            [&self.volumes, &self.store_served, &self.store_able, &self.format_able, &self.store_bytes]
        {
            family.clear();
        }
        stores.iter().for_each(|store| self.set_store(store));
        let sum = |count: fn(&EraseBacklog) -> u64| stores.iter().map(|store| count(&store.backlog)).sum();
        self.erasing.set(signed(sum(|backlog| u64::try_from(backlog.entries).unwrap_or(u64::MAX))));
        self.erasing_bytes.set(signed(sum(|backlog| backlog.bytes)));
    }

    fn set_store(&self, StoreSample { health, capacity, volumes, .. }: &StoreSample) {
        let name = health.name.as_ref().map(|name| ("store", name.to_string()));
        let set = |family: &Family<StoreLabels, Gauge>, label: Option<(&'static str, &str)>, value: i64| {
            let label = label.map(|(key, value)| (key, value.to_owned()));
            family.get_or_create(&label.into_iter().chain(name.clone()).collect()).set(value);
        };
        match &health.status {
            StoreStatus::Served(_) => set(&self.store_served, None, 1),
            StoreStatus::Unserved { .. } => set(&self.store_served, None, 0),
            // Not known yet: the API server may be unreachable.
            _ => {}
        }
        if let Some(count) = volumes {
            set(&self.volumes, None, i64::try_from(*count).unwrap_or(i64::MAX));
        }
        match &health.ability {
            Ability::Able => set(&self.store_able, Some(("cause", "")), 1),
            Ability::Unable { cause, .. } => set(&self.store_able, Some(("cause", cause.as_str())), 0),
            _ => {}
        }
        // Nothing is known of the formats before the store is known to be able.
        let formats = ImageFormat::ALL.into_iter().filter(|format| format.mkfs_program().is_some());
        for format in formats.filter(|_| health.ability != Ability::Unknown) {
            let is_able = !health.missing_formats.contains_key(&format);
            set(&self.format_able, Some(("format", format.as_str())), is_able.into());
        }
        let Some(capacity) = capacity else { return };
        for (kind, bytes) in [
            ("total", capacity.total),
            ("free", capacity.free),
            ("reserved", capacity.reserved),
            ("promised", capacity.promised),
            ("available", capacity.available()),
        ] {
            set(&self.store_bytes, Some(("kind", kind)), signed(bytes.0));
        }
    }

    /// Sets whether pods can be scheduled to the node's volumes.
    pub(crate) fn set_node_label(&self, is_right: bool) {
        self.node_label.set(is_right.into());
    }

    /// Encodes the metrics as text.
    pub(crate) fn encode_text(
        &self,
        registered: Option<&watch::Receiver<bool>>,
        is_api_server_up: bool,
    ) -> String {
        self.registered.set(registered.is_some_and(|registered| *registered.borrow()).into());
        self.api_server_up.set(is_api_server_up.into());
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
