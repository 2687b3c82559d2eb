//! Prometheus metrics under the names of the external-provisioner.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::metrics::VolumeMetrics;

/// Names and values of labels.
type MetricLabels = Vec<(&'static str, String)>;

/// Records into a Prometheus registry.
///
/// - `controller_persistentvolumeclaim_provision_total`, `..._provision_failed_total`,
///   `..._provision_duration_seconds`, with the labels `class` and `source` (always empty: volumes start
///   empty);
/// - `controller_persistentvolume_delete_total`, `..._delete_failed_total`, `..._delete_duration_seconds`,
///   with `class`;
/// - `controller_persistentvolume_orphans`, with `missing`: `persistentvolume` counts volumes that may hold
///   data and have no PersistentVolume, `volume` counts PersistentVolumes whose volume does not exist.
///
/// - `controller_api_errors_total`, with `call`: failed calls of the API server.
///
/// Durations are those of successful attempts, in buckets from 1 ms to about 16 s.
///
/// *Source:* sig-storage-lib-external-provisioner, `controller/metrics`.
#[derive(Debug, Clone)]
pub struct PrometheusMetrics {
    provision: OperationMetrics,
    delete: OperationMetrics,
    /// Volumes without a PersistentVolume.
    orphaned_volumes: Gauge,
    /// PersistentVolumes without a volume.
    orphaned_objects: Gauge,
    api_errors: Family<MetricLabels, Counter>,
}

#[derive(Debug, Clone)]
struct OperationMetrics {
    total: Family<MetricLabels, Counter>,
    failed: Family<MetricLabels, Counter>,
    seconds: Family<MetricLabels, Histogram, DurationBuckets>,
}

#[derive(Debug, Clone, Copy)]
struct DurationBuckets;

impl MetricConstructor<Histogram> for DurationBuckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.001, 2.0, 15))
    }
}

impl PrometheusMetrics {
    /// Creates the metrics and registers them.
    pub fn register_in(registry: &mut Registry) -> Self {
        let provision = OperationMetrics::register_in(
            registry,
            "controller_persistentvolumeclaim_provision",
            "provisioned",
        );
        let delete = OperationMetrics::register_in(registry, "controller_persistentvolume_delete", "deleted");
        let orphans: Family<MetricLabels, Gauge> = Family::default();
        let help = "Volumes without a PersistentVolume, and PersistentVolumes without a volume, on this node";
        registry.register("controller_persistentvolume_orphans", help, Family::clone(&orphans));
        let missing = |what: &str| orphans.get_or_create(&vec![("missing", what.to_owned())]).clone();
        let (orphaned_volumes, orphaned_objects) = (missing("persistentvolume"), missing("volume"));
        let api_errors = Family::default();
        registry.register(
            "controller_api_errors",
            "Calls of the API server that failed",
            Family::clone(&api_errors),
        );
        Self { provision, delete, orphaned_volumes, orphaned_objects, api_errors }
    }
}

impl OperationMetrics {
    fn register_in(registry: &mut Registry, prefix: &str, done: &str) -> Self {
        let (total, failed) = (Family::default(), Family::default());
        let seconds = Family::new_with_constructor(DurationBuckets);
        // The registry adds `_total` to a counter's name.
        registry.register(prefix, format!("Volumes {done}"), Family::clone(&total));
        registry.register(
            format!("{prefix}_failed"),
            format!("Failed attempts: volume not {done}"),
            Family::clone(&failed),
        );
        let help = format!("Time until a volume was {done}");
        registry.register(format!("{prefix}_duration_seconds"), help, Family::clone(&seconds));
        Self { total, failed, seconds }
    }

    fn record_attempt(&self, labels: &MetricLabels, took: Duration, succeeded: bool) {
        match succeeded {
            true => {
                self.total.get_or_create(labels).inc();
                self.seconds.get_or_create(labels).observe(took.as_secs_f64());
            }
            false => drop(self.failed.get_or_create(labels).inc()),
        }
    }
}

impl VolumeMetrics for PrometheusMetrics {
    fn record_provision(&self, class: &str, took: Duration, succeeded: bool) {
        let labels = vec![("class", class.to_owned()), ("source", String::new())];
        self.provision.record_attempt(&labels, took, succeeded);
    }

    fn record_delete(&self, class: &str, took: Duration, succeeded: bool) {
        self.delete.record_attempt(&vec![("class", class.to_owned())], took, succeeded);
    }

    fn set_orphans(&self, volumes: usize, objects: usize) {
        self.orphaned_volumes.set(i64::try_from(volumes).unwrap_or(i64::MAX));
        self.orphaned_objects.set(i64::try_from(objects).unwrap_or(i64::MAX));
    }

    fn record_api_error(&self, call: &str) {
        self.api_errors.get_or_create(&vec![("call", call.to_owned())]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_names_match_the_external_provisioner() {
        let mut registry = Registry::default();
        let metrics = PrometheusMetrics::register_in(&mut registry);
        for succeeded in [true, false] {
            metrics.record_provision("local", Duration::from_millis(3), succeeded);
            metrics.record_delete("local", Duration::from_millis(3), succeeded);
        }
        metrics.set_orphans(2, 1);
        metrics.record_api_error("create_persistentvolume");
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("encode");
        for line in [
            "controller_persistentvolumeclaim_provision_total{class=\"local\",source=\"\"} 1",
            "controller_persistentvolumeclaim_provision_failed_total{class=\"local\",source=\"\"} 1",
            "controller_persistentvolumeclaim_provision_duration_seconds_count{class=\"local\",source=\"\"} 1",
            "controller_persistentvolume_delete_total{class=\"local\"} 1",
            "controller_persistentvolume_delete_failed_total{class=\"local\"} 1",
            "controller_persistentvolume_delete_duration_seconds_count{class=\"local\"} 1",
            "controller_persistentvolume_orphans{missing=\"persistentvolume\"} 2",
            "controller_persistentvolume_orphans{missing=\"volume\"} 1",
            "controller_api_errors_total{call=\"create_persistentvolume\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
