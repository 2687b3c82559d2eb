//! Metrics of the cluster: the phase of the node's enrolment, whether it takes part, its voters, and the size of the store.

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
        ConstGauge::new(i64::from(takes_part)).encode(metric)?;
        // While the node can't take part, nothing is known of the others.
        let Some(access) = self.0.cluster_access().ok().filter(|_| takes_part) else { return Ok(()) };
        let report = access.cluster_report();
        let (voters, silent) = (report.voter_count(), report.silent_voters().count());
        let help = "Voters of the cluster, by whether they answer this node";
        let mut gauges =
            encoder.encode_descriptor("nodekeel_cluster_voters", help, None, MetricType::Gauge)?;
        for (state, count) in [("answering", voters - silent), ("silent", silent)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            ConstGauge::new(count).encode(gauges.encode_family(&[("state", state)])?)?;
        }
        let help =
            "Whether this node's copy of the store was compared with another voter's at the last attempt";
        let metric = encoder.encode_descriptor("nodekeel_cluster_compared", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::from(report.uncompared_since.is_none())).encode(metric)?;
        let own = report.members.iter().find(|report| report.member.id == access.this_member().id);
        let Some(store) = own.and_then(|own| own.facts.as_ref()?.store.as_ref()) else { return Ok(()) };
        let help = "Size of this node's copy of the store; it rejects writes when the size reaches the quota";
        let mut gauges =
            encoder.encode_descriptor("nodekeel_cluster_store_bytes", help, None, MetricType::Gauge)?;
        let kinds = [
            ("size", Some(store.store_bytes)),
            ("used", Some(store.used_bytes)),
            ("quota", store.quota_bytes),
        ];
        for (kind, bytes) in kinds {
            let Some(bytes) = bytes else { continue };
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            ConstGauge::new(bytes).encode(gauges.encode_family(&[("kind", kind)])?)?;
        }
        Ok(())
    }
}
