//! Additions of the parts to the node.

use std::collections::BTreeMap;

use nodekeel_supervisor::process::ProcessHandle;
use tonic::Extensions;

use crate::control::ControlServices;
use crate::health::HealthSources;
use crate::metrics::MetricsRegistries;

/// The additions of all parts to the node. A reload prepares a copy, and replaces the whole.
#[derive(Debug, Clone, Default)]
pub(crate) struct PartAdditions {
    pub(crate) extensions: Extensions,
    pub(crate) services: ControlServices,
    pub(crate) health: HealthSources,
    pub(crate) metrics: MetricsRegistries,
    /// The processes that clients may signal, by DN. A runnable that a reload has removed leaves its handle.
    pub(crate) processes: BTreeMap<String, ProcessHandle>,
}
