//! What there is to do on the way into a cluster, and how far it is done.

use std::fmt;

use prost::Message as _;
use thiserror::Error;

use crate::node::{ClusterId, InvalidNodeId, NodeId, TicketDigest};

/// One of the things that are done, in this order, at every start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature: whoever matches on it must know all")]
pub enum Step {
    /// Wait for an address.
    Network,
    /// Make or open the data volume.
    Storage,
    /// Make, take from the ticket, or load what the node is known by.
    Identity,
    /// Start the member of the cluster's store, and wait until it serves.
    Consensus,
    /// Put the node's record into the cluster.
    Record,
    /// Tell this system its name.
    Local,
}

/// How a step is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Mode {
    /// For the first time, as far as is recorded: it may have been begun, or done, by a run that was killed.
    Make,
    /// It was done and recorded: what it made is opened and checked, and nothing takes its place.
    Again,
}

impl Step {
    /// All of them, in order.
    pub const ALL: [Self; 6] =
        [Self::Network, Self::Storage, Self::Identity, Self::Consensus, Self::Record, Self::Local];

    /// Those that the journal knows, in order. The others make nothing that lasts, and are done at every start.
    pub const RECORDED: [Self; 4] = [Self::Storage, Self::Identity, Self::Consensus, Self::Record];

    /// Its name, in the journal too.
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
    pub(super) fn recorded(name: &str) -> Option<Self> {
        Self::RECORDED.into_iter().find(|step| step.name() == name)
    }

    pub(super) fn is_recorded(self) -> bool {
        Self::RECORDED.contains(&self)
    }

    pub(super) fn following(self) -> Option<Self> {
        Self::ALL.into_iter().find(|step| *step > self)
    }

    fn following_recorded(self) -> Option<Self> {
        Self::RECORDED.into_iter().find(|step| *step > self)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which attempt at getting into a cluster this is: 16 random bytes, made with the decision. The data volume bears them
/// too, so that the journal of one node and the disk of another are never taken for one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct EnrolmentId(pub(crate) [u8; 16]);

impl EnrolmentId {
    /// As it is written to the data volume: 32 hexadecimal digits.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for EnrolmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnrolmentId({})", self.to_hex())
    }
}

/// How a node that is in no cluster gets into one. It is decided once, and recorded before anything is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Flow {
    /// It founds one.
    Create,
    /// It joins the one of this ticket.
    Join(TicketDigest),
}

/// What the journal knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    pub(super) enrolment: EnrolmentId,
    pub(super) flow: Flow,
    /// The first recorded step that is not done; none when all are.
    pub(super) next: Option<Step>,
    /// Known once [`Step::Identity`] is done.
    pub(super) node: Option<NodeId>,
    /// Known once [`Step::Consensus`] is done.
    pub(super) cluster: Option<ClusterId>,
}

/// Why what a journal holds is no progress. The file is whole: another program has written it, or another version.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidProgress {
    /// It is no such message.
    #[error("it is no progress of an enrolment")]
    Message,
    /// A newer program has written it: run that one.
    #[error("it has format {0}, which is newer than this program")]
    Newer(u32),
    /// A field has a length that it can't have.
    #[error("its {0} has a wrong length")]
    Length(&'static str),
    /// The node's name is none.
    #[error("its node has an invalid name")]
    Node(#[source] InvalidNodeId),
    /// What it knows does not fit the steps that it says are done.
    #[error("it does not know what it should after its steps: {0}")]
    Inconsistent(&'static str),
}

/// The format that is written.
const FORMAT: u32 = 1;

/// A progress on the disk. The next step is not in it: the list of steps keeps that.
#[derive(Clone, PartialEq, prost::Message)]
struct Wire {
    #[prost(uint32, tag = "1")]
    format: u32,
    #[prost(bytes = "vec", tag = "2")]
    enrolment: Vec<u8>,
    /// SHA-256 of the ticket; empty where a cluster is founded.
    #[prost(bytes = "vec", tag = "3")]
    ticket: Vec<u8>,
    #[prost(string, tag = "4")]
    node: String,
    #[prost(bytes = "vec", tag = "5")]
    cluster: Vec<u8>,
}

impl Progress {
    /// Nothing is done yet.
    pub(super) fn new(enrolment: EnrolmentId, flow: Flow) -> Self {
        Self { enrolment, flow, next: Some(Step::RECORDED[0]), node: None, cluster: None }
    }

    /// The first recorded step that is not done; none when all are.
    pub fn next(&self) -> Option<Step> {
        self.next
    }

    /// How it is to get into a cluster.
    pub fn flow(&self) -> Flow {
        self.flow
    }

    /// Which attempt it is.
    pub fn enrolment(&self) -> EnrolmentId {
        self.enrolment
    }

    /// The node's name, once it has one.
    pub fn node(&self) -> Option<&NodeId> {
        self.node.as_ref()
    }

    /// The cluster, once the node's member has served in it.
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster
    }

    /// The cluster that it has to be: recorded, or to be founded.
    pub(super) fn expected_cluster(&self) -> Option<ClusterId> {
        let founded = (self.flow == Flow::Create).then(|| ClusterId::new(self.enrolment.0));
        self.cluster.or(founded)
    }

    pub(super) fn mode(&self, step: Step) -> Mode {
        let is_done = step.is_recorded() && self.next.is_none_or(|next| step < next);
        if is_done { Mode::Again } else { Mode::Make }
    }

    /// The same with one more step done.
    pub(super) fn after(&self, step: Step) -> Self {
        Self { next: step.following_recorded(), ..self.clone() }
    }

    /// As the state of a step's journal.
    pub(super) fn encode(&self) -> Vec<u8> {
        let ticket = match &self.flow {
            Flow::Create => Vec::new(),
            Flow::Join(ticket) => ticket.as_bytes().to_vec(),
        };
        let node = self.node.as_ref().map(ToString::to_string).unwrap_or_default();
        let cluster = self.cluster.map(|id| id.as_bytes().to_vec()).unwrap_or_default();
        Wire { format: FORMAT, enrolment: self.enrolment.0.to_vec(), ticket, node, cluster }.encode_to_vec()
    }

    /// Reads the state of a journal whose next step is `next`.
    ///
    /// # Errors
    /// [`InvalidProgress`].
    pub(super) fn parse(state: &[u8], next: Option<Step>) -> Result<Self, InvalidProgress> {
        let wire = Wire::decode(state).map_err(|_| InvalidProgress::Message)?;
        match wire.format {
            FORMAT => {}
            0 => return Err(InvalidProgress::Message),
            newer => return Err(InvalidProgress::Newer(newer)),
        }
        let length = InvalidProgress::Length;
        let enrolment = wire.enrolment.try_into().map_err(|_| length("enrolment"))?;
        let flow = match wire.ticket.as_slice() {
            [] => Flow::Create,
            digest => Flow::Join(TicketDigest::from_bytes(digest.try_into().map_err(|_| length("ticket"))?)),
        };
        let node = match wire.node.as_str() {
            "" => None,
            name => Some(name.parse().map_err(InvalidProgress::Node)?),
        };
        let cluster = match wire.cluster.as_slice() {
            [] => None,
            id => Some(ClusterId::new(id.try_into().map_err(|_| length("cluster"))?)),
        };
        let progress = Self { enrolment: EnrolmentId(enrolment), flow, next, node, cluster };
        progress.check().map(|()| progress)
    }

    /// It knows its node exactly when it has one, and so its cluster.
    fn check(&self) -> Result<(), InvalidProgress> {
        let is_done = |step| self.mode(step) == Mode::Again;
        if self.node.is_some() != is_done(Step::Identity) {
            return Err(InvalidProgress::Inconsistent("its node"));
        }
        if self.cluster.is_some() != is_done(Step::Consensus) {
            return Err(InvalidProgress::Inconsistent("its cluster"));
        }
        // Who founds a cluster knows which one it is.
        let founded = (self.flow == Flow::Create).then_some(ClusterId::new(self.enrolment.0));
        if self.cluster.is_some() && founded.is_some_and(|founded| self.cluster != Some(founded)) {
            return Err(InvalidProgress::Inconsistent("its cluster"));
        }
        Ok(())
    }
}

/// What a journal of steps may hold: never panics, and a progress is read as it was written.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn arbitrary(bytes: &[u8]) {
    for next in Step::RECORDED.into_iter().map(Some).chain([None]) {
        if let Ok(progress) = Progress::parse(bytes, next) {
            let again = Progress::parse(&progress.encode(), next);
            assert_eq!(again, Ok(progress), "a progress is read as it was written");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Some progress with `done` recorded steps.
    fn progress(done: usize, flow: Flow) -> Progress {
        let is_done = |step: Step| Step::RECORDED[..done].contains(&step);
        let node = || format!("node-{}", "0f".repeat(16)).parse().expect("a name");
        Progress {
            enrolment: EnrolmentId([7; 16]),
            flow,
            next: Step::RECORDED.get(done).copied(),
            node: is_done(Step::Identity).then(node),
            cluster: is_done(Step::Consensus).then_some(ClusterId::new([7; 16])),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for done in 0..=Step::RECORDED.len() {
            for flow in [Flow::Create, Flow::Join(TicketDigest::from_bytes([9; 32]))] {
                let one = progress(done, flow);
                assert_eq!(Progress::parse(&one.encode(), one.next), Ok(one));
            }
        }
    }

    #[test]
    fn a_progress_of_other_steps_than_its_journals_is_refused() {
        for done in 0..=Step::RECORDED.len() {
            for said in 0..=Step::RECORDED.len() {
                let one = progress(done, Flow::Create);
                let next = Step::RECORDED.get(said).copied();
                let knows_the_same = |step| one.mode(step) == progress(said, Flow::Create).mode(step);
                let fits = knows_the_same(Step::Identity) && knows_the_same(Step::Consensus);
                assert_eq!(Progress::parse(&one.encode(), next).is_ok(), fits, "{done} done, {said} said");
            }
        }
    }

    #[test]
    fn a_newer_format_is_told_from_another_thing() {
        let newer = Wire { format: 2, ..Wire::default() }.encode_to_vec();
        assert_eq!(Progress::parse(&newer, None), Err(InvalidProgress::Newer(2)));
        assert_eq!(Progress::parse(b"", None), Err(InvalidProgress::Message));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_progress_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            arbitrary(&bytes);
        }
    }
}
