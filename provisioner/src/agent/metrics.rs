//! Metrics of the agent.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::metrics::VolumeMetrics;

#[cfg(feature = "metrics")]
pub use prometheus::PrometheusAgentMetrics;

/// Records what an agent finds and does. `()` records nothing.
///
/// # Contract
/// Methods are called from any thread, and must not block.
pub trait AgentMetrics: Send + Sync + fmt::Debug {
    /// The agent leads from now on, or no longer does.
    fn set_leading(&self, is_leading: bool) {
        let _ = is_leading;
    }

    /// The reported volumes of deleted nodes, by the node's name; empty while the agent doesn't lead.
    fn set_gone_volumes(&self, by_node: &BTreeMap<String, usize>) {
        let _ = by_node;
    }

    /// The number of pending claims that no node can serve, as reported in events.
    fn set_unserved_claims(&self, count: usize) {
        let _ = count;
    }

    /// The number of nodes whose provisioner no longer renews its Lease.
    fn set_unresponsive_nodes(&self, count: usize) {
        let _ = count;
    }

    /// A watch of the API server fails, or none does any more: while one does, the agent that leads acts on nothing.
    fn set_watches_failing(&self, are_failing: bool) {
        let _ = are_failing;
    }

    /// A node was deselected from a claim. `reason` is `deleted`, `no_driver`, `lease_expired`, `cordoned` or
    /// `not_ready`.
    fn record_deselection(&self, reason: &str) {
        let _ = reason;
    }

    /// The PersistentVolume of a deleted node was removed.
    fn record_removal(&self) {}

    /// A call of the API server failed. `call` is a verb and a kind, such as `patch_persistentvolumeclaim`.
    fn record_api_error(&self, call: &str) {
        let _ = call;
    }
}

impl AgentMetrics for () {}

/// Passes the API errors, which watches count in a [`VolumeMetrics`], on to the agent's metrics.
#[derive(Debug)]
pub(super) struct AgentWatchMetrics(pub(super) Arc<dyn AgentMetrics>);

impl VolumeMetrics for AgentWatchMetrics {
    fn record_provision(&self, _class: &str, _took: Duration, _succeeded: bool) {}

    fn record_delete(&self, _class: &str, _took: Duration, _succeeded: bool) {}

    fn record_api_error(&self, call: &str) {
        self.0.record_api_error(call);
    }
}

#[cfg(feature = "metrics")]
mod prometheus {
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::family::Family;
    use prometheus_client::metrics::gauge::Gauge;
    use prometheus_client::registry::Registry;

    use super::{AgentMetrics, BTreeMap};

    type MetricLabels = Vec<(&'static str, String)>;

    /// Records into a Prometheus registry.
    ///
    /// - `provisionerd_agent_leading`: 1 in the agent that holds the Lease, 0 in the others;
    /// - `provisionerd_agent_gone_node_volumes`, with `node`: reported volumes of deleted nodes;
    /// - `provisionerd_agent_unserved_claims`: pending claims that no node can serve;
    /// - `provisionerd_agent_unresponsive_nodes`: nodes whose provisioner no longer renews its Lease;
    /// - `provisionerd_agent_watches_failing`: 1 in the leading agent while it acts on nothing, since a watch fails;
    /// - `provisionerd_agent_deselections_total`, with `reason`: nodes that were deselected from claims;
    /// - `provisionerd_agent_removals_total`: removed PersistentVolumes of deleted nodes;
    /// - `controller_api_errors_total`, with `call`: failed calls of the API server.
    #[derive(Debug, Clone, Default)]
    pub struct PrometheusAgentMetrics {
        leading: Gauge,
        gone_volumes: Family<MetricLabels, Gauge>,
        unserved_claims: Gauge,
        unresponsive_nodes: Gauge,
        watches_failing: Gauge,
        deselections: Family<MetricLabels, Counter>,
        removals: Counter,
        api_errors: Family<MetricLabels, Counter>,
    }

    impl PrometheusAgentMetrics {
        /// Creates the metrics and registers them.
        pub fn register_in(registry: &mut Registry) -> Self {
            let this = Self::default();
            let help = "Whether this agent holds the Lease";
            registry.register("provisionerd_agent_leading", help, this.leading.clone());
            let help = "Volumes whose node is deleted";
            registry.register("provisionerd_agent_gone_node_volumes", help, this.gone_volumes.clone());
            let help = "Pending claims that no node can serve";
            registry.register("provisionerd_agent_unserved_claims", help, this.unserved_claims.clone());
            let help = "Nodes whose provisioner no longer renews its Lease";
            registry.register("provisionerd_agent_unresponsive_nodes", help, this.unresponsive_nodes.clone());
            let help = "Whether this agent acts on nothing, since a watch of the API server fails";
            registry.register("provisionerd_agent_watches_failing", help, this.watches_failing.clone());
            let help = "Nodes deselected from claims that they could not serve";
            registry.register("provisionerd_agent_deselections", help, this.deselections.clone());
            let help = "PersistentVolumes of deleted nodes that were removed";
            registry.register("provisionerd_agent_removals", help, this.removals.clone());
            let help = "Calls of the API server that failed";
            registry.register("controller_api_errors", help, this.api_errors.clone());
            this
        }
    }

    impl AgentMetrics for PrometheusAgentMetrics {
        fn set_leading(&self, is_leading: bool) {
            self.leading.set(is_leading.into());
        }

        fn set_gone_volumes(&self, by_node: &BTreeMap<String, usize>) {
            // A node that has come back must not keep its last number.
            self.gone_volumes.clear();
            for (node, count) in by_node {
                let gauge = self.gone_volumes.get_or_create_owned(&vec![("node", node.clone())]);
                gauge.set(i64::try_from(*count).unwrap_or(i64::MAX));
            }
        }

        fn set_unserved_claims(&self, count: usize) {
            self.unserved_claims.set(i64::try_from(count).unwrap_or(i64::MAX));
        }

        fn set_unresponsive_nodes(&self, count: usize) {
            self.unresponsive_nodes.set(i64::try_from(count).unwrap_or(i64::MAX));
        }

        fn set_watches_failing(&self, are_failing: bool) {
            self.watches_failing.set(are_failing.into());
        }

        fn record_deselection(&self, reason: &str) {
            self.deselections.get_or_create_owned(&vec![("reason", reason.to_owned())]).inc();
        }

        fn record_removal(&self) {
            self.removals.inc();
        }

        fn record_api_error(&self, call: &str) {
            self.api_errors.get_or_create_owned(&vec![("call", call.to_owned())]).inc();
        }
    }
}
