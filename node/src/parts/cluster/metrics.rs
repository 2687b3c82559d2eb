//! Metrics of the cluster: the phase of the node's enrolment, and whether it takes part.

use std::fmt;

use nodekeel_cluster::enrolment::{ClusterNode, EnrolmentPhase, EnrolmentState};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

pub(super) fn cluster_registry(cluster: ClusterNode) -> Registry {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(ClusterCollector(cluster)));
    registry
}

/// Reads the state at each scrape.
struct ClusterCollector(ClusterNode);

impl fmt::Debug for ClusterCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterCollector")
    }
}

impl Collector for ClusterCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let state = self.0.current_state();
        let help = "1 for the phase of the node's enrolment, as in nodectl cluster status";
        let mut phases =
            encoder.encode_descriptor("nodekeel_cluster_phase", help, None, MetricType::Gauge)?;
        // Each phase has a value, so that a query for one phase always has a result.
        for phase in EnrolmentPhase::ALL {
            let labels = [("phase", phase.to_string())];
            ConstGauge::new(i64::from(phase == state.phase())).encode(phases.encode_family(&labels)?)?;
        }
        let takes_part = matches!(state, EnrolmentState::Running(_)) && self.0.condition().is_none();
        let help = "Whether the node takes part in its cluster: it has a leader, a vote, and no alarm";
        let metric = encoder.encode_descriptor("nodekeel_cluster_healthy", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::from(takes_part)).encode(metric)
    }
}
