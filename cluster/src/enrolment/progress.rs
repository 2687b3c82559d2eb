//! How far the steps of an enrolment are done.

use std::fmt;

use prost::Message as _;
use thiserror::Error;

use super::step::{EnrolmentStep, StepMode};
use crate::node::{ClusterId, InvalidNodeId, NodeId, TicketId};

/// Identifies an attempt to enrol: 16 random bytes, generated with the decision. They are also written to the
/// data volume, so that the journal of one node is never used with the disk of another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct EnrolmentId(pub(crate) [u8; 16]);

impl EnrolmentId {
    /// 32 hexadecimal digits, as written to the data volume.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for EnrolmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnrolmentId({})", self.to_hex())
    }
}

/// The way of a node into a cluster. It is decided once, and recorded before anything is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnrolmentKind {
    /// The node bootstraps a cluster.
    Bootstrap,
    /// The node joins the cluster of this ticket.
    Join(TicketId),
    /// The node restores a cluster from a snapshot, as its only node.
    Restore,
}

/// The record in the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnrolmentProgress {
    pub(super) enrolment_id: EnrolmentId,
    pub(super) enrolment_kind: EnrolmentKind,
    /// The recorded steps that are done. A release that added a step finds later ones done before it.
    pub(super) completed_steps: Vec<EnrolmentStep>,
    /// Known once [`EnrolmentStep::Identity`] is done.
    pub(super) node_id: Option<NodeId>,
    /// Known once [`EnrolmentStep::Consensus`] is done.
    pub(super) cluster_id: Option<ClusterId>,
}

/// A defect in the content of a journal. The file is complete: another program or another release has
/// written it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidProgress {
    /// The content is not an enrolment progress record.
    #[error("the content is not an enrolment progress record: restore the journal, or reset the node")]
    Malformed,
    /// A newer release has written it: run that release.
    #[error("the enrolment progress record has format {0}, written by a newer release: run that release")]
    NewerFormat(u32),
    /// A field has an invalid length.
    #[error("the enrolment progress record is damaged: field {0} has an invalid length")]
    Length(&'static str),
    /// The node's name is invalid.
    #[error("the enrolment progress record has an invalid node name")]
    NodeName(#[source] InvalidNodeId),
    /// The record does not match the steps that are done.
    #[error("the enrolment progress record is inconsistent: {0} does not match the completed steps")]
    Inconsistent(&'static str),
}

/// The format that this release writes.
const FORMAT_VERSION: u32 = 1;

/// A progress record on disk. It omits the completed steps, which the step journal itself records.
#[derive(Clone, PartialEq, prost::Message)]
struct ProgressMessage {
    #[prost(uint32, tag = "1")]
    format: u32,
    #[prost(bytes = "vec", tag = "2")]
    enrolment: Vec<u8>,
    /// SHA-256 of the ticket; empty if the node bootstraps a cluster.
    #[prost(bytes = "vec", tag = "3")]
    ticket: Vec<u8>,
    #[prost(string, tag = "4")]
    node: String,
    #[prost(bytes = "vec", tag = "5")]
    cluster: Vec<u8>,
    /// Without a ticket: true if the node restores a cluster.
    #[prost(bool, tag = "6")]
    restore: bool,
}

impl EnrolmentProgress {
    /// No step is done yet.
    pub(super) fn new(enrolment_id: EnrolmentId, enrolment_kind: EnrolmentKind) -> Self {
        Self { enrolment_id, enrolment_kind, completed_steps: Vec::new(), node_id: None, cluster_id: None }
    }

    /// The first recorded step that is not done; `None` when all are.
    pub fn next_step(&self) -> Option<EnrolmentStep> {
        EnrolmentStep::RECORDED.into_iter().find(|step| !self.completed_steps.contains(step))
    }

    /// Returns whether the node has been in its cluster: no step that a later release adds needs the ticket again.
    pub(super) fn is_enrolled(&self) -> bool {
        self.completed_steps.contains(&EnrolmentStep::Record)
    }

    /// The way into the cluster.
    pub fn enrolment_kind(&self) -> EnrolmentKind {
        self.enrolment_kind
    }

    /// Identifies the attempt.
    pub fn enrolment_id(&self) -> EnrolmentId {
        self.enrolment_id
    }

    /// The node's name, once it has one.
    pub fn node_id(&self) -> Option<&NodeId> {
        self.node_id.as_ref()
    }

    /// The cluster, once the node's member has served in it.
    pub fn cluster_id(&self) -> Option<ClusterId> {
        self.cluster_id
    }

    /// The cluster that the node bootstraps: the attempt determines its id.
    pub(super) fn founded_cluster(&self) -> Option<ClusterId> {
        // Derived, not random: a killed run that resumes finds the id that it has written as its own.
        let is_bootstrap = self.enrolment_kind == EnrolmentKind::Bootstrap;
        is_bootstrap.then(|| ClusterId::from_bytes(self.enrolment_id.0))
    }

    /// The cluster that the node must be in: the recorded one, or the one that it bootstraps.
    pub(super) fn expected_cluster(&self) -> Option<ClusterId> {
        self.cluster_id.or(self.founded_cluster())
    }

    pub(super) fn step_mode(&self, step: EnrolmentStep) -> StepMode {
        if self.completed_steps.contains(&step) { StepMode::Rerun } else { StepMode::FirstRun }
    }

    /// The same progress with one more step done.
    pub(super) fn with_step_done(&self, step: EnrolmentStep) -> Self {
        let mut progress = self.clone();
        progress.completed_steps.push(step);
        progress
    }

    /// Encoded as the state of a step journal.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let ticket = match &self.enrolment_kind {
            EnrolmentKind::Bootstrap | EnrolmentKind::Restore => Vec::new(),
            EnrolmentKind::Join(ticket) => ticket.as_bytes().to_vec(),
        };
        let node = self.node_id.as_ref().map(ToString::to_string).unwrap_or_default();
        let cluster = self.cluster_id.map(|id| id.as_bytes().to_vec()).unwrap_or_default();
        ProgressMessage {
            format: FORMAT_VERSION,
            enrolment: self.enrolment_id.0.to_vec(),
            ticket,
            node,
            cluster,
            restore: self.enrolment_kind == EnrolmentKind::Restore,
        }
        .encode_to_vec()
    }

    /// Reads the state of a journal that records these steps as completed.
    ///
    /// # Errors
    /// [`InvalidProgress`].
    pub(super) fn from_journal(
        state: &[u8],
        completed_steps: Vec<EnrolmentStep>,
    ) -> Result<Self, InvalidProgress> {
        let wire = ProgressMessage::decode(state).map_err(|_| InvalidProgress::Malformed)?;
        match wire.format {
            FORMAT_VERSION => {}
            // protobuf omits a zero, so that content without the field, which no release writes, has format 0.
            0 => return Err(InvalidProgress::Malformed),
            newer => return Err(InvalidProgress::NewerFormat(newer)),
        }
        let length = InvalidProgress::Length;
        let enrolment = wire.enrolment.try_into().map_err(|_| length("enrolment"))?;
        // protobuf does not distinguish an empty field from a missing one: emptiness stands for "none" in all
        // three.
        let enrolment_kind = match wire.ticket.as_slice() {
            [] if wire.restore => EnrolmentKind::Restore,
            [] => EnrolmentKind::Bootstrap,
            digest => {
                EnrolmentKind::Join(TicketId::from_bytes(digest.try_into().map_err(|_| length("ticket"))?))
            }
        };
        let node = match wire.node.as_str() {
            "" => None,
            name => Some(name.parse().map_err(InvalidProgress::NodeName)?),
        };
        let cluster = match wire.cluster.as_slice() {
            [] => None,
            id => Some(ClusterId::from_bytes(id.try_into().map_err(|_| length("cluster"))?)),
        };
        let progress = Self {
            enrolment_id: EnrolmentId(enrolment),
            enrolment_kind,
            completed_steps,
            node_id: node,
            cluster_id: cluster,
        };
        progress.check_consistency().map(|()| progress)
    }

    /// The node and the cluster are known exactly when the steps that determine them are done.
    fn check_consistency(&self) -> Result<(), InvalidProgress> {
        let is_done = |step| self.step_mode(step) == StepMode::Rerun;
        if self.node_id.is_some() != is_done(EnrolmentStep::Identity) {
            return Err(InvalidProgress::Inconsistent("node"));
        }
        if self.cluster_id.is_some() != is_done(EnrolmentStep::Consensus) {
            return Err(InvalidProgress::Inconsistent("cluster"));
        }
        // The attempt determines the id of its cluster: another id would be another attempt's.
        if self.cluster_id.is_some() && self.founded_cluster().is_some_and(|id| self.cluster_id != Some(id)) {
            return Err(InvalidProgress::Inconsistent("cluster"));
        }
        Ok(())
    }
}

/// Arbitrary content of a step journal: never panics, and a valid record survives a round trip.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn check_arbitrary_progress(bytes: &[u8]) {
    for done in 0..=EnrolmentStep::RECORDED.len() {
        let completed = EnrolmentStep::RECORDED[..done].to_vec();
        if let Ok(progress) = EnrolmentProgress::from_journal(bytes, completed.clone()) {
            let again = EnrolmentProgress::from_journal(&progress.to_bytes(), completed);
            assert_eq!(again, Ok(progress), "a progress record survives a round trip");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A progress record with `done` recorded steps.
    fn progress(done: usize, enrolment_kind: EnrolmentKind) -> EnrolmentProgress {
        let is_done = |step: EnrolmentStep| EnrolmentStep::RECORDED[..done].contains(&step);
        let node = || format!("node-{}", "0f".repeat(16)).parse().expect("a valid name");
        EnrolmentProgress {
            enrolment_id: EnrolmentId([7; 16]),
            enrolment_kind,
            completed_steps: EnrolmentStep::RECORDED[..done].to_vec(),
            node_id: is_done(EnrolmentStep::Identity).then(node),
            cluster_id: is_done(EnrolmentStep::Consensus).then_some(ClusterId::from_bytes([7; 16])),
        }
    }

    #[test]
    fn progress_survives_a_round_trip() {
        for done in 0..=EnrolmentStep::RECORDED.len() {
            for enrolment_kind in [
                EnrolmentKind::Bootstrap,
                EnrolmentKind::Restore,
                EnrolmentKind::Join(TicketId::from_bytes([9; 32])),
            ] {
                let one = progress(done, enrolment_kind);
                let completed = one.completed_steps.clone();
                assert_eq!(EnrolmentProgress::from_journal(&one.to_bytes(), completed), Ok(one));
            }
        }
    }

    #[test]
    fn progress_that_disagrees_with_its_journals_steps_is_rejected() {
        for done in 0..=EnrolmentStep::RECORDED.len() {
            for said in 0..=EnrolmentStep::RECORDED.len() {
                let one = progress(done, EnrolmentKind::Bootstrap);
                let completed = EnrolmentStep::RECORDED[..said].to_vec();
                let knows_the_same =
                    |step| one.step_mode(step) == progress(said, EnrolmentKind::Bootstrap).step_mode(step);
                let fits =
                    knows_the_same(EnrolmentStep::Identity) && knows_the_same(EnrolmentStep::Consensus);
                assert_eq!(
                    EnrolmentProgress::from_journal(&one.to_bytes(), completed).is_ok(),
                    fits,
                    "{done} done, {said} said"
                );
            }
        }
    }

    #[test]
    fn a_newer_format_is_reported_as_such() {
        let newer = ProgressMessage { format: 2, ..ProgressMessage::default() }.encode_to_vec();
        let read = |bytes| EnrolmentProgress::from_journal(bytes, Vec::new());
        assert_eq!(read(&newer), Err(InvalidProgress::NewerFormat(2)));
        assert_eq!(read(b""), Err(InvalidProgress::Malformed));
    }

    #[test]
    fn a_step_that_a_later_release_added_runs_for_the_first_time_between_completed_ones() {
        // As if this release had added the first step.
        let completed = EnrolmentStep::RECORDED[1..].to_vec();
        let state = progress(4, EnrolmentKind::Bootstrap).to_bytes();
        let upgraded = EnrolmentProgress::from_journal(&state, completed).expect("complete for its release");
        assert!(upgraded.is_enrolled());
        assert_eq!(upgraded.next_step(), Some(EnrolmentStep::Storage));
        assert_eq!(upgraded.step_mode(EnrolmentStep::Storage), StepMode::FirstRun);
        assert_eq!(upgraded.step_mode(EnrolmentStep::Identity), StepMode::Rerun);
        assert_eq!(upgraded.with_step_done(EnrolmentStep::Storage).next_step(), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_progress_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            check_arbitrary_progress(&bytes);
        }
    }
}
