//! The configuration and the metrics of release 0.1.0 are those of this release.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nodekeel_fsquota::testing::MemQuota;
use nodekeel_localstorage::{Dir, FileMode};
use nodekeel_provisioner::{Ability, DirStore, InabilityCause, VolumeMetrics as _};

use crate::config::{DaemonConfig, LogConfig, LogFormat};
use crate::metrics::DaemonMetrics;

const DEFAULT_CONFIG: &str = include_str!("../testdata/golden/provisionerd.toml");
const OTHER_VALUES: &str = include_str!("../testdata/golden/provisionerd-other-values.toml");
const METRICS: &str = include_str!("../testdata/golden/metrics.txt");

#[test]
fn configurations_of_the_first_release_are_read() {
    assert_eq!(toml::from_str::<DaemonConfig>(DEFAULT_CONFIG), Ok(DaemonConfig::default()));
    let config: DaemonConfig = toml::from_str(OTHER_VALUES).expect("a configuration");
    let expected = DaemonConfig {
        driver: "volumes.example".parse().expect("a driver name"),
        node: Some("node-a".parse().expect("a node name")),
        directory: "/srv/nodekeel".into(),
        kubelet: "/srv/kubelet".into(),
        csi: false,
        listen: "[::1]:9811".parse().expect("an address"),
        kubeconfig: Some("/etc/kubernetes/provisionerd.conf".into()),
        concurrency: 3.try_into().expect("not 0"),
        volume_mode: FileMode::new(0o750),
        capacity: DaemonConfig::default().capacity,
        audit: DaemonConfig::default().audit,
        log: LogConfig { format: LogFormat::Json, level: "info,nodekeel_provisioner=debug".into() },
    };
    assert_eq!(config, expected);
}

/// The types of the metrics, and their samples with labels and without values, except the release's number.
fn list_samples(text: &str) -> Vec<String> {
    let samples = text.lines().filter(|line| !line.starts_with("# HELP"));
    let release = concat!("version=\"", env!("CARGO_PKG_VERSION"), "\"");
    samples
        .map(|line| {
            if line.starts_with('#') {
                line.to_owned()
            } else {
                line.rsplit_once(' ').expect("a value").0.replace(release, "version=\"0.1.0\"")
            }
        })
        .collect()
}

/// The metrics of a daemon with an empty store.
pub(crate) fn encode_metrics(metrics: &DaemonMetrics) -> String {
    let base = tempfile::tempdir().expect("a directory");
    let base = Dir::open(Path::new(base.path())).expect("the base");
    let store = Arc::new(DirStore::new(base, Arc::new(MemQuota::new())).expect("a store"));
    metrics.encode_text(&store, None, true)
}

#[test]
fn every_metric_of_the_first_release_has_its_name_type_and_labels() {
    let metrics = DaemonMetrics::new();
    for succeeded in [true, false] {
        metrics.meter.record_provision("local", Duration::from_millis(3), succeeded);
        metrics.meter.record_delete("local", Duration::from_millis(3), succeeded);
    }
    metrics.meter.set_orphans(2, 1);
    let samples = list_samples(&encode_metrics(&metrics));
    let missing: Vec<_> = list_samples(METRICS).into_iter().filter(|line| !samples.contains(line)).collect();
    assert!(missing.is_empty(), "no longer exported: {missing:#?}");
}

#[test]
fn whether_volumes_can_be_created_is_absent_while_it_is_unknown_and_has_its_cause() {
    let metrics = DaemonMetrics::new();
    let unable = Ability::Unable { cause: InabilityCause::ReadOnly, why: "read-only".to_owned() };
    for (ability, expected) in [
        (Ability::Able, Some("provisionerd_store_able{cause=\"\"} 1")),
        (unable, Some("provisionerd_store_able{cause=\"read_only\"} 0")),
        (Ability::Unknown, None),
    ] {
        metrics.set_ability(&ability);
        let text = encode_metrics(&metrics);
        let found: Vec<_> =
            text.lines().filter(|line| line.starts_with("provisionerd_store_able{")).collect();
        assert_eq!(found, Vec::from_iter(expected));
    }
}

#[test]
fn whether_the_store_is_served_is_absent_while_it_is_unknown() {
    let metrics = DaemonMetrics::new();
    metrics.set_volumes(Some(true), None);
    metrics.set_volumes(None, None);
    assert!(!encode_metrics(&metrics).contains("provisionerd_store_served{"));
    metrics.set_volumes(Some(false), None);
    assert!(encode_metrics(&metrics).contains("provisionerd_store_served{} 0"));
}
