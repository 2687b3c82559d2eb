//! The counters under the names that dashboards know.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::meter::Meter;

/// Labels, as the registry takes them.
type Labels = Vec<(&'static str, String)>;

/// Counts into a Prometheus registry.
///
/// - `controller_persistentvolumeclaim_provision_total`, `..._provision_failed_total`,
///   `..._provision_duration_seconds`, with the labels `class` and `source` (always empty: volumes are made empty);
/// - `controller_persistentvolume_delete_total`, `..._delete_failed_total`, `..._delete_duration_seconds`, with `class`;
/// - `controller_persistentvolume_orphans`, with `missing`: `persistentvolume` counts volumes that may hold data and have
///   none, `volume` counts PersistentVolumes whose volume isn't there.
///
/// Durations are of attempts that succeeded, from 1 ms to about 16 s.
///
/// *Source:* sig-storage-lib-external-provisioner, `controller/metrics`.
#[derive(Debug, Clone)]
pub struct PrometheusMeter {
    provision: Counters,
    delete: Counters,
    /// Volumes without a PersistentVolume.
    unowned: Gauge,
    /// PersistentVolumes without a volume.
    lost: Gauge,
}

#[derive(Debug, Clone)]
struct Counters {
    total: Family<Labels, Counter>,
    failed: Family<Labels, Counter>,
    seconds: Family<Labels, Histogram, Buckets>,
}

#[derive(Debug, Clone, Copy)]
struct Buckets;

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.001, 2.0, 15))
    }
}

impl PrometheusMeter {
    /// Makes the counters and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let provision =
            Counters::register(registry, "controller_persistentvolumeclaim_provision", "provisioned");
        let delete = Counters::register(registry, "controller_persistentvolume_delete", "deleted");
        let orphans: Family<Labels, Gauge> = Family::default();
        let help = "Volumes and PersistentVolumes of this node of which the other is missing";
        registry.register("controller_persistentvolume_orphans", help, Family::clone(&orphans));
        let missing = |what: &str| orphans.get_or_create(&vec![("missing", what.to_owned())]).clone();
        let (unowned, lost) = (missing("persistentvolume"), missing("volume"));
        Self { provision, delete, unowned, lost }
    }
}

impl Counters {
    fn register(registry: &mut Registry, prefix: &str, done: &str) -> Self {
        let (total, failed) = (Family::default(), Family::default());
        let seconds = Family::new_with_constructor(Buckets);
        // The registry adds `_total` to a counter's name.
        registry.register(prefix, format!("Volumes {done}"), Family::clone(&total));
        registry.register(
            format!("{prefix}_failed"),
            format!("Attempts that failed, volume not {done}"),
            Family::clone(&failed),
        );
        let help = format!("How long it took until a volume was {done}");
        registry.register(format!("{prefix}_duration_seconds"), help, Family::clone(&seconds));
        Self { total, failed, seconds }
    }

    fn count(&self, labels: &Labels, took: Duration, succeeded: bool) {
        match succeeded {
            true => {
                self.total.get_or_create(labels).inc();
                self.seconds.get_or_create(labels).observe(took.as_secs_f64());
            }
            false => drop(self.failed.get_or_create(labels).inc()),
        }
    }
}

impl Meter for PrometheusMeter {
    fn provisioned(&self, class: &str, took: Duration, succeeded: bool) {
        let labels = vec![("class", class.to_owned()), ("source", String::new())];
        self.provision.count(&labels, took, succeeded);
    }

    fn deleted(&self, class: &str, took: Duration, succeeded: bool) {
        self.delete.count(&vec![("class", class.to_owned())], took, succeeded);
    }

    fn orphans(&self, volumes: usize, objects: usize) {
        self.unowned.set(i64::try_from(volumes).unwrap_or(i64::MAX));
        self.lost.set(i64::try_from(objects).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_that_dashboards_know() {
        let mut registry = Registry::default();
        let meter = PrometheusMeter::register(&mut registry);
        for succeeded in [true, false] {
            meter.provisioned("local", Duration::from_millis(3), succeeded);
            meter.deleted("local", Duration::from_millis(3), succeeded);
        }
        meter.orphans(2, 1);
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
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
