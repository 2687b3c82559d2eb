//! Prometheus metrics under the names of the external-provisioner.

use std::time::Duration;

use nodekeel_fsquota::AuditSummary;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::metrics::VolumeMetrics;
use crate::name::StoreName;

type MetricLabels = Vec<(&'static str, String)>;

/// Records into a Prometheus registry.
///
/// - `controller_persistentvolumeclaim_provision_total`, `..._provision_failed_total`,
///   `..._provision_duration_seconds`, with the labels `class` and `source` (always empty: volumes start
///   empty);
/// - `controller_persistentvolume_delete_total`, `..._delete_failed_total`, `..._delete_duration_seconds`,
///   with `class`;
/// - `controller_persistentvolumeclaim_resize_total`, `..._resize_failed_total`, `..._resize_duration_seconds`, of
///   expansions, and the same with `modify` of VolumeAttributesClasses, with `class`, the StorageClass;
/// - `controller_persistentvolume_orphans`, with `missing`: `persistentvolume` counts volumes that may hold
///   data and have no PersistentVolume, `volume` counts PersistentVolumes whose volume does not exist.
///
/// - `controller_persistentvolume_uncounted_bytes`, `..._uncounted_files`, with `reason`, as of the last audit, and absent
///   before the first one: `escaped` left the limits of its volume, `outside` counts for a volume that it is not in,
///   `unowned` has limits of an unknown owner;
/// - `controller_persistentvolume_audit_unread`: files and directories that the last audit could not inspect.
/// - `controller_persistentvolume_over_limit`: volumes that use more than their limits, as of the last audit.
/// - `controller_persistentvolume_wrong_limits`: volumes whose limits are not those of their PersistentVolume and can't be
///   set, or that have files which don't count against them; `controller_persistentvolume_restored_limits_total`: limits that were set again;
/// - `csistoragecapacities_desired_goal`, `csistoragecapacities_desired_current` and `csistoragecapacities_obsolete`: the
///   CSIStorageCapacity objects that this node should have, those that are up to date, and those to delete;
/// - `controller_api_errors_total`, with `call`: failed calls of the API server.
///
/// Those of the objects and volumes of a store with a name have the label `store`: [`of_store`](Self::of_store).
///
/// Durations are those of successful attempts, in buckets from 1 ms to about 16 s.
///
/// *Source:* sig-storage-lib-external-provisioner, `controller/metrics`.
#[derive(Debug, Clone)]
pub struct PrometheusMetrics {
    provision: OperationMetrics,
    delete: OperationMetrics,
    resize: OperationMetrics,
    modification: OperationMetrics,
    /// The label of a store with a name.
    store: Option<(&'static str, String)>,
    orphans: Family<MetricLabels, Gauge>,
    audit: AuditMetrics,
    wrong_limits: Family<MetricLabels, Gauge>,
    restored_limits: Counter,
    capacity_objects: [Family<MetricLabels, Gauge>; 3],
    api_errors: Family<MetricLabels, Counter>,
}

/// Without values before the first audit: zero would mean that nothing escaped.
#[derive(Debug, Clone, Default)]
struct AuditMetrics {
    bytes: Family<MetricLabels, Gauge>,
    files: Family<MetricLabels, Gauge>,
    unread: Family<MetricLabels, Gauge>,
    over_limit: Family<MetricLabels, Gauge>,
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
        let resize =
            OperationMetrics::register_in(registry, "controller_persistentvolumeclaim_resize", "expanded");
        let modification =
            OperationMetrics::register_in(registry, "controller_persistentvolumeclaim_modify", "modified");
        let orphans: Family<MetricLabels, Gauge> = Family::default();
        let help = "Volumes and snapshots that no object names, and PersistentVolumes without a volume, on this node";
        // Clones share their values, so the registry exports each change.
        registry.register("controller_persistentvolume_orphans", help, Family::clone(&orphans));
        let audit = AuditMetrics::register_in(registry);
        let (wrong_limits, restored_limits) = (Family::default(), Counter::default());
        registry.register(
            "controller_persistentvolume_wrong_limits",
            "Volumes whose limits are not those of their PersistentVolume, and can't be set",
            Family::clone(&wrong_limits),
        );
        registry.register(
            "controller_persistentvolume_restored_limits",
            "Limits of volumes that were lost, and set again",
            restored_limits.clone(),
        );
        let capacity_objects = register_capacity_objects(registry);
        let api_errors = Family::default();
        registry.register(
            "controller_api_errors",
            "Calls of the API server that failed",
            Family::clone(&api_errors),
        );
        let this = Self {
            store: None,
            provision,
            delete,
            resize,
            modification,
            orphans,
            audit,
            wrong_limits,
            restored_limits,
            capacity_objects,
            api_errors,
        };
        this.export_zeros();
        this
    }

    /// The same metrics for a store with this name: those of its objects and volumes have the label `store`.
    #[must_use]
    pub fn of_store(&self, name: &StoreName) -> Self {
        let this = Self { store: Some(("store", name.to_string())), ..self.clone() };
        this.export_zeros();
        this
    }

    /// Sets what is counted from the start, so that it is exported before the first count.
    fn export_zeros(&self) {
        self.set_orphans(0, 0);
        self.set_orphaned_snapshots(0);
        self.set_wrong_limits(0);
        self.set_capacity_objects(0, 0, 0);
    }

    /// Sets a gauge of this store.
    fn set(&self, family: &Family<MetricLabels, Gauge>, label: Option<(&'static str, &str)>, value: u64) {
        let label = label.map(|(name, value)| (name, value.to_owned()));
        let labels = label.into_iter().chain(self.store.clone()).collect();
        family.get_or_create(&labels).set(i64::try_from(value).unwrap_or(i64::MAX));
    }
}

/// *Source:* external-provisioner, `pkg/capacity`.
fn register_capacity_objects(registry: &mut Registry) -> [Family<MetricLabels, Gauge>; 3] {
    [
        ("desired_goal", "CSIStorageCapacity objects that this node should have"),
        ("desired_current", "CSIStorageCapacity objects of this node that are up to date"),
        ("obsolete", "CSIStorageCapacity objects of this node that are to be deleted"),
    ]
    .map(|(name, help)| {
        let family = Family::default();
        registry.register(format!("csistoragecapacities_{name}"), help, Family::clone(&family));
        family
    })
}

impl AuditMetrics {
    fn register_in(registry: &mut Registry) -> Self {
        let this = Self::default();
        for (name, help, family) in [
            ("uncounted_bytes", "Bytes that do not count where they lie, as of the last audit", &this.bytes),
            (
                "uncounted_files",
                "Files and directories that do not count where they lie, as of the last audit",
                &this.files,
            ),
            ("audit_unread", "Files and directories that the last audit could not inspect", &this.unread),
            ("over_limit", "Volumes that use more than their limits, as of the last audit", &this.over_limit),
        ] {
            registry.register(format!("controller_persistentvolume_{name}"), help, Family::clone(family));
        }
        this
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

    fn record_resize(&self, class: &str, took: Duration, succeeded: bool) {
        self.resize.record_attempt(&vec![("class", class.to_owned())], took, succeeded);
    }

    fn record_modification(&self, class: &str, took: Duration, succeeded: bool) {
        self.modification.record_attempt(&vec![("class", class.to_owned())], took, succeeded);
    }

    fn set_capacity_objects(&self, desired: usize, current: usize, obsolete: usize) {
        for (family, count) in self.capacity_objects.iter().zip([desired, current, obsolete]) {
            self.set(family, None, count as u64);
        }
    }

    fn set_orphaned_snapshots(&self, snapshots: usize) {
        self.set(&self.orphans, Some(("missing", "volumesnapshotcontent")), snapshots as u64);
    }

    fn set_orphans(&self, volumes: usize, objects: usize) {
        self.set(&self.orphans, Some(("missing", "persistentvolume")), volumes as u64);
        self.set(&self.orphans, Some(("missing", "volume")), objects as u64);
    }

    fn set_audit(&self, summary: &AuditSummary) {
        let AuditSummary { escaped, outside, unowned, unread, over_limit, .. } = summary;
        for (reason, usage) in [("escaped", escaped), ("outside", outside), ("unowned", unowned)] {
            self.set(&self.audit.bytes, Some(("reason", reason)), usage.bytes.0);
            self.set(&self.audit.files, Some(("reason", reason)), usage.inodes.0);
        }
        self.set(&self.audit.unread, None, *unread);
        self.set(&self.audit.over_limit, None, *over_limit);
    }

    fn record_restored_limits(&self) {
        self.restored_limits.inc();
    }

    fn set_wrong_limits(&self, volumes: usize) {
        self.set(&self.wrong_limits, None, volumes as u64);
    }

    fn record_api_error(&self, call: &str) {
        self.api_errors.get_or_create(&vec![("call", call.to_owned())]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_of_an_audit_are_absent_before_the_first_one() {
        let mut registry = Registry::default();
        let metrics = PrometheusMetrics::register_in(&mut registry);
        let encode = |registry: &Registry| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, registry).expect("encode");
            text
        };
        let names = ["uncounted", "audit_unread", "over_limit"];
        let is_value = |line: &&str| names.iter().any(|name| line.contains(name));
        let values = |text: &str| text.lines().filter(|line| !line.starts_with('#')).filter(is_value).count();
        let text = encode(&registry);
        assert_eq!(values(&text), 0, "{text}");
        let mut summary = AuditSummary::default();
        (summary.escaped.bytes.0, summary.escaped.inodes.0, summary.outside.inodes.0) = (4096, 2, 1);
        (summary.unread, summary.over_limit) = (3, 1);
        metrics.set_audit(&summary);
        let text = encode(&registry);
        for line in [
            "controller_persistentvolume_uncounted_bytes{reason=\"escaped\"} 4096",
            "controller_persistentvolume_uncounted_files{reason=\"escaped\"} 2",
            "controller_persistentvolume_uncounted_files{reason=\"outside\"} 1",
            "controller_persistentvolume_uncounted_bytes{reason=\"unowned\"} 0",
            "controller_persistentvolume_audit_unread{} 3",
            "controller_persistentvolume_over_limit{} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        metrics.set_audit(&AuditSummary::default());
        let text = encode(&registry);
        assert!(text.contains("uncounted_bytes{reason=\"escaped\"} 0"), "{text}");
    }

    #[test]
    fn metric_names_match_the_external_provisioner() {
        let mut registry = Registry::default();
        let metrics = PrometheusMetrics::register_in(&mut registry);
        for succeeded in [true, false] {
            metrics.record_provision("local", Duration::from_millis(3), succeeded);
            metrics.record_delete("local", Duration::from_millis(3), succeeded);
            metrics.record_resize("local", Duration::from_millis(3), succeeded);
            metrics.record_modification("local", Duration::from_millis(3), succeeded);
        }
        metrics.set_orphans(2, 1);
        metrics.set_orphaned_snapshots(3);
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
            "controller_persistentvolumeclaim_resize_total{class=\"local\"} 1",
            "controller_persistentvolumeclaim_resize_failed_total{class=\"local\"} 1",
            "controller_persistentvolumeclaim_modify_total{class=\"local\"} 1",
            "controller_persistentvolumeclaim_modify_failed_total{class=\"local\"} 1",
            "controller_persistentvolume_orphans{missing=\"persistentvolume\"} 2",
            "controller_persistentvolume_orphans{missing=\"volume\"} 1",
            "controller_persistentvolume_orphans{missing=\"volumesnapshotcontent\"} 3",
            "controller_api_errors_total{call=\"create_persistentvolume\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
