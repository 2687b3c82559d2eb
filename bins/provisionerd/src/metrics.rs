//! The Prometheus metrics.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodekeel_provisioner::{Ability, DirStore, ImageFormat, PrometheusMetrics, StoreCapacity};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

/// The metrics; gauges are updated at each scrape.
#[derive(Debug)]
pub(crate) struct DaemonMetrics {
    registry: Registry,
    pub(crate) meter: PrometheusMetrics,
    /// Without labels, and without a value while their number is unknown.
    volumes: Family<Vec<(&'static str, &'static str)>, Gauge>,
    /// The same, while the first lists of the API server are incomplete.
    store_served: Family<Vec<(&'static str, &'static str)>, Gauge>,
    /// Without a value while it is not known.
    store_able: Family<Vec<(&'static str, &'static str)>, Gauge>,
    format_able: Family<Vec<(&'static str, &'static str)>, Gauge>,
    erasing: Gauge,
    erasing_bytes: Gauge,
    registered: Gauge,
    api_server_up: Gauge,
    node_label: Gauge,
    store_bytes: Family<Vec<(&'static str, &'static str)>, Gauge>,
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

    /// Sets the capacity of the store; an unknown one is absent.
    pub(crate) fn set_capacity(&self, capacity: Option<StoreCapacity>) {
        // Cleared first: an unknown capacity must not leave the values of the scrape before.
        self.store_bytes.clear();
        let Some(capacity) = capacity else { return };
        for (kind, bytes) in [
            ("total", capacity.total),
            ("free", capacity.free),
            ("reserved", capacity.reserved),
            ("promised", capacity.promised),
            ("available", capacity.available()),
        ] {
            let gauge = self.store_bytes.get_or_create(&vec![("kind", kind)]);
            gauge.set(i64::try_from(bytes.0).unwrap_or(i64::MAX));
        }
    }

    /// Sets whether the node can create volumes; what is not known is absent.
    pub(crate) fn set_ability(&self, ability: &Ability) {
        self.store_able.clear();
        let (is_able, cause) = match ability {
            Ability::Able => (true, ""),
            Ability::Unable { cause, .. } => (false, cause.as_str()),
            _ => return,
        };
        self.store_able.get_or_create(&vec![("cause", cause)]).set(is_able.into());
    }

    /// Sets of which formats strict volumes can be created; nothing is known before the node is known to be able.
    pub(crate) fn set_formats(&self, ability: &Ability, missing: &BTreeMap<ImageFormat, String>) {
        self.format_able.clear();
        let formats = ImageFormat::ALL.into_iter().filter(|format| format.mkfs_program().is_some());
        for format in formats.filter(|_| *ability != Ability::Unknown) {
            let gauge = self.format_able.get_or_create(&vec![("format", format.as_str())]);
            gauge.set((!missing.contains_key(&format)).into());
        }
    }

    /// Sets whether pods can be scheduled to the node's volumes.
    pub(crate) fn set_node_label(&self, is_right: bool) {
        self.node_label.set(is_right.into());
    }

    /// Sets whether the volumes are served, and their number; an unknown value is absent.
    pub(crate) fn set_volumes(&self, is_served: Option<bool>, count: Option<usize>) {
        self.store_served.clear();
        if let Some(is_served) = is_served {
            self.store_served.get_or_create(&Vec::new()).set(is_served.into());
        }
        self.volumes.clear();
        if let Some(count) = count {
            self.volumes.get_or_create(&Vec::new()).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Encodes the metrics as text.
    pub(crate) fn encode_text(
        &self,
        store: &Arc<DirStore>,
        registered: Option<&watch::Receiver<bool>>,
        is_api_server_up: bool,
    ) -> String {
        let backlog = store.erase_backlog();
        self.erasing.set(i64::try_from(backlog.entries).unwrap_or(i64::MAX));
        self.erasing_bytes.set(i64::try_from(backlog.bytes).unwrap_or(i64::MAX));
        self.registered.set(registered.is_some_and(|registered| *registered.borrow()).into());
        self.api_server_up.set(is_api_server_up.into());
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
