//! The configuration and the metrics of release 0.1.0 are those of this release.

use std::collections::BTreeMap;
use std::time::Duration;

use nodekeel_localstorage::FileMode;
use nodekeel_provisioner::{
    Ability, EraseBacklog, ImageFormat, InabilityCause, StoreFault, StoreHealth, StoreIdentity, StoreStatus,
    VolumeMetrics as _,
};

use crate::config::{DaemonConfig, LogConfig, LogFormat};
use crate::metrics::{DaemonMetrics, StoreSample};

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
        stores: DaemonConfig::default().stores,
        store: None,
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

/// What a scrape has found of a store of this ability.
pub(crate) fn sample_store(status: StoreStatus, ability: Ability) -> StoreSample {
    let health = StoreHealth { name: None, status, ability, missing_formats: BTreeMap::new() };
    StoreSample { health, capacity: None, volumes: None, backlog: EraseBacklog::default() }
}

#[test]
fn every_metric_of_the_first_release_has_its_name_type_and_labels() {
    let metrics = DaemonMetrics::new();
    for succeeded in [true, false] {
        metrics.meter.record_provision("local", Duration::from_millis(3), succeeded);
        metrics.meter.record_delete("local", Duration::from_millis(3), succeeded);
    }
    metrics.meter.set_orphans(2, 1);
    let samples = list_samples(&metrics.encode_text(None, true));
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
        metrics.set_stores(&[sample_store(StoreStatus::Unknown, ability)]);
        let text = metrics.encode_text(None, true);
        let found: Vec<_> =
            text.lines().filter(|line| line.starts_with("provisionerd_store_able{")).collect();
        assert_eq!(found, Vec::from_iter(expected));
    }
}

#[test]
fn whether_the_store_is_served_is_absent_while_it_is_unknown() {
    let metrics = DaemonMetrics::new();
    let is_served = |status: StoreStatus| {
        metrics.set_stores(&[sample_store(status, Ability::Unknown)]);
        let text = metrics.encode_text(None, true);
        text.lines().find_map(|line| line.strip_prefix("provisionerd_store_served{} ")?.parse::<u8>().ok())
    };
    assert_eq!(is_served(StoreStatus::Served(StoreIdentity::Absent)), Some(1));
    assert_eq!(is_served(StoreStatus::Unknown), None);
    let unserved = StoreStatus::Unserved { fault: StoreFault::Absent, why: "unmounted".to_owned() };
    assert_eq!(is_served(unserved), Some(0));
}

#[test]
fn the_metrics_of_each_store_have_its_name_and_those_of_one_do_not_hide_another() {
    let metrics = DaemonMetrics::new();
    let served = || StoreStatus::Served(StoreIdentity::Absent);
    let unable = Ability::Unable { cause: InabilityCause::ReadOnly, why: "read-only".to_owned() };
    let mut fast = sample_store(served(), unable);
    fast.health.name = Some("fast".parse().expect("a name"));
    (fast.volumes, fast.health.missing_formats) = (Some(3), [(ImageFormat::Xfs, "none".to_owned())].into());
    metrics.set_stores(&[sample_store(served(), Ability::Able), fast]);
    let meter = metrics.meter.of_store(&"fast".parse().expect("a name"));
    metrics.meter.set_orphans(1, 0);
    meter.set_orphans(2, 0);
    let text = metrics.encode_text(None, true);
    for line in [
        "provisionerd_store_able{cause=\"\"} 1",
        "provisionerd_store_able{cause=\"read_only\",store=\"fast\"} 0",
        "provisionerd_format_able{format=\"xfs\"} 1",
        "provisionerd_format_able{format=\"xfs\",store=\"fast\"} 0",
        "provisionerd_volumes{store=\"fast\"} 3",
        "controller_persistentvolume_orphans{missing=\"persistentvolume\"} 1",
        "controller_persistentvolume_orphans{missing=\"persistentvolume\",store=\"fast\"} 2",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}
