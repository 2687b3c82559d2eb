//! The metrics of the node itself, of one moment.

use nodekeel_logtree::DnStats;
use prometheus_client::encoding::EncodeMetric;
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::health::{ConditionSeverity, DiskSpace, HealthCondition, is_healthy};
use crate::program_name::metric_prefix;
use crate::v1::{Node, State};

/// Maximum number of DNs with restarts of their own; those of all others are summed up as the DN `other`. The
/// configuration names its services, but a builder's runnable may create children without end.
const MAX_DNS: usize = 1000;

/// The DN of the others.
const OTHER_DNS: &str = "other";

const STATES: [(State, &str); 8] = [
    (State::New, "new"),
    (State::Ready, "ready"),
    (State::Done, "done"),
    (State::Waiting, "waiting"),
    (State::Dead, "dead"),
    (State::Canceled, "canceled"),
    (State::Stopped, "stopped"),
    (State::Skipped, "skipped"),
];

type Labels = Vec<(&'static str, String)>;

/// The figures that the metrics show, collected for one scrape.
#[derive(Debug, Default)]
pub(crate) struct NodeFigures {
    pub(crate) nodes: Vec<Node>,
    pub(crate) conditions: Vec<HealthCondition>,
    pub(crate) disks: Vec<DiskSpace>,
    pub(crate) log: Vec<DnStats>,
}

impl NodeFigures {
    pub(super) fn to_registry(&self) -> Registry {
        let mut registry = Registry::with_prefix(metric_prefix());
        let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The release of nodekeel-node", version);
        self.register_tree(&mut registry);
        self.register_health(&mut registry);
        self.register_log(&mut registry);
        self.register_disks(&mut registry);
        registry
    }

    fn register_tree(&self, registry: &mut Registry) {
        let runnables = family::<Gauge>(registry, "runnables", "Runnables of the tree in each state");
        // Each state has a value, also 0: a series that comes and goes is hard to alert on.
        for (state, name) in STATES {
            let count = self.nodes.iter().filter(|node| node.state() == state).count();
            runnables.get_or_create(&vec![("state", name.to_owned())]).set(to_i64(count));
        }
        let restarts = family::<Counter>(registry, "restarts", "Restarts of each runnable");
        let crash_loops = gauge(registry, "crash_loops", "Runnables in a crash loop");
        for (index, node) in self.nodes.iter().enumerate() {
            let dn = if index < MAX_DNS { node.dn.clone() } else { OTHER_DNS.to_owned() };
            restarts.get_or_create(&vec![("dn", dn)]).inc_by(node.restarts);
            crash_loops.inc_by(node.is_crash_looping().into());
        }
    }

    fn register_health(&self, registry: &mut Registry) {
        let healthy = gauge(registry, "healthy", "Whether the node has no problem, as nodectl health says");
        healthy.set(is_healthy(&self.conditions).into());
        let help = "Conditions that nodectl health shows, by part and severity";
        let conditions = family::<Gauge>(registry, "health_conditions", help);
        for severity in [ConditionSeverity::Problem, ConditionSeverity::Warning] {
            for found in self.conditions.iter().filter(|found| found.severity == severity) {
                let labels = vec![("part", found.part.clone()), ("severity", severity.as_str().to_owned())];
                conditions.get_or_create(&labels).inc();
            }
        }
    }

    fn register_log(&self, registry: &mut Registry) {
        let sum = |value: fn(&DnStats) -> u64| self.log.iter().map(value).sum::<u64>();
        for (name, help, value) in [
            ("log_entries", "Log entries that were appended", sum(|dn| dn.appended)),
            ("log_dropped_entries", "Log entries that newer ones have evicted", sum(|dn| dn.dropped)),
        ] {
            let counter = Counter::<u64>::default();
            counter.inc_by(value);
            registry.register(name, help, counter);
        }
        let bytes = sum(|dn| u64::try_from(dn.bytes).unwrap_or(u64::MAX));
        gauge(registry, "log_bytes", "Bytes of the log in memory").set(to_i64(bytes));
        gauge(registry, "log_names", "DNs with a log").set(to_i64(self.log.len()));
    }

    fn register_disks(&self, registry: &mut Registry) {
        for (name, help, value) in [
            (
                "disk_free_bytes",
                "Free bytes of the disk of a directory",
                (|disk| disk.free_bytes) as fn(&DiskSpace) -> u64,
            ),
            ("disk_size_bytes", "Bytes of the disk of a directory", |disk| disk.total_bytes),
            ("disk_free_inodes", "Free inodes of the disk of a directory", |disk| disk.free_inodes),
            ("disk_inodes", "Inodes of the disk of a directory", |disk| disk.total_inodes),
        ] {
            let disks = family::<Gauge>(registry, name, help);
            for disk in &self.disks {
                let labels = vec![("path", disk.path.display().to_string())];
                disks.get_or_create(&labels).set(to_i64(value(disk)));
            }
        }
    }
}

/// A registered metric with labels.
fn family<M>(registry: &mut Registry, name: &str, help: &str) -> Family<Labels, M>
where
    M: Default + Clone + TypedMetric + EncodeMetric + std::fmt::Debug + Send + Sync + 'static,
{
    let family = Family::<Labels, M>::default();
    // The clone shares its values with the registered one.
    registry.register(name, help, family.clone());
    family
}

fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge {
    let gauge = Gauge::default();
    registry.register(name, help, gauge.clone());
    gauge
}

fn to_i64(value: impl TryInto<i64>) -> i64 {
    value.try_into().unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::MetricsRegistries;
    use super::*;

    fn node(dn: &str, state: State, restarts: u64) -> Node {
        Node { dn: dn.into(), state: state.into(), restarts, ..Node::default() }
    }

    #[test]
    fn the_metrics_show_tree_health_and_disks() {
        let warning = HealthCondition::warning("clock", "is wrong");
        let problem =
            HealthCondition { part: "etcd".into(), ..HealthCondition::problem("root.etcd", "hangs") };
        let disk = DiskSpace {
            path: "/data".into(),
            free_bytes: 7,
            total_bytes: u64::MAX,
            free_inodes: 8,
            total_inodes: 9,
        };
        let figures = NodeFigures {
            nodes: vec![node("root", State::Ready, 0), Node { failures: 2, ..node("root.a", State::New, 3) }],
            conditions: vec![problem.clone(), problem, HealthCondition { part: "node".into(), ..warning }],
            disks: vec![disk],
            log: Vec::new(),
        };
        let text = MetricsRegistries::default().encode(&figures);
        for line in [
            "nodekeel_runnables{state=\"ready\"} 1",
            "nodekeel_runnables{state=\"dead\"} 0",
            "nodekeel_restarts_total{dn=\"root.a\"} 3",
            "nodekeel_crash_loops 1",
            "nodekeel_healthy 0",
            "nodekeel_health_conditions{part=\"etcd\",severity=\"problem\"} 2",
            "nodekeel_health_conditions{part=\"node\",severity=\"warning\"} 1",
            "nodekeel_log_entries_total 0",
            "nodekeel_log_dropped_entries_total 0",
            "nodekeel_log_bytes 0",
            "nodekeel_disk_free_bytes{path=\"/data\"} 7",
            "nodekeel_disk_inodes{path=\"/data\"} 9",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn the_number_of_names_is_bounded_and_no_restart_is_lost() {
        let nodes = (0..MAX_DNS + 50).map(|number| node(&format!("root.{number}"), State::Ready, 2));
        let text = MetricsRegistries::default()
            .encode(&NodeFigures { nodes: nodes.collect(), ..Default::default() });
        let restarts: Vec<_> =
            text.lines().filter(|line| line.starts_with("nodekeel_restarts_total{")).collect();
        assert_eq!(restarts.len(), MAX_DNS + 1);
        assert!(restarts.contains(&"nodekeel_restarts_total{dn=\"other\"} 100"), "{restarts:?}");
    }
}
