//! The steps of an enrolment, their order and their names in the journal.

use std::fmt;

/// One step of an enrolment. All steps run in this order at every start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum EnrolmentStep {
    /// Wait for an address.
    Network,
    /// Create or open the data volume.
    Storage,
    /// Create the node's credentials, install them from the ticket, or load them.
    Identity,
    /// Start the member of the cluster's store, and wait until it serves.
    Consensus,
    /// Write the node's record into the cluster.
    Record,
    /// Set hostname, machine-id and hosts.
    Local,
}

/// The first run of a step, or a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepMode {
    /// The journal does not record it as done: a killed run may have started or even completed it.
    FirstRun,
    /// The journal records it as done: what it created is opened and checked, and never replaced.
    Rerun,
}

impl EnrolmentStep {
    /// All steps, in order.
    pub const ALL: [Self; 6] =
        [Self::Network, Self::Storage, Self::Identity, Self::Consensus, Self::Record, Self::Local];

    /// The steps that the journal records, in order. The others create nothing durable, and run at every
    /// start.
    pub const RECORDED: [Self; 4] = [Self::Storage, Self::Identity, Self::Consensus, Self::Record];

    /// The name of the step, also in the journal.
    pub fn name(self) -> &'static str {
        match self {
            Self::Network => "network",
            Self::Storage => "storage",
            Self::Identity => "identity",
            Self::Consensus => "consensus",
            Self::Record => "record",
            Self::Local => "local",
        }
    }

    /// The recorded step of that name.
    pub(super) fn from_recorded_name(name: &str) -> Option<Self> {
        Self::RECORDED.into_iter().find(|step| step.name() == name)
    }

    pub(super) fn is_recorded(self) -> bool {
        Self::RECORDED.contains(&self)
    }

    pub(super) fn next_step(self) -> Option<Self> {
        Self::ALL.into_iter().find(|step| *step > self)
    }
}

impl fmt::Display for EnrolmentStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
