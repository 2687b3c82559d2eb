//! What has to be so after each input, whatever has happened.

use super::super::core::{Action, Input, Rejected, Sequence};
use super::super::state::{Kind, State};
use super::super::step::{Flow, Progress, Step};
use super::{Config, OTHERS, World};
use crate::node::ClusterId;

impl World {
    /// Gives the machine an input, and holds what it does to the invariants.
    pub(super) fn apply(&mut self, input: Input) {
        let Some(machine) = &mut self.machine else { return };
        let (before, history) = (format!("{:?}", machine.state()), machine.history().to_vec());
        let kind = machine.state().kind();
        let awaited = self.pending.as_ref().map(sequence_of);
        match machine.apply(input.clone()) {
            Err(rejected) => {
                assert_eq!(
                    format!("{:?}", machine.state()),
                    before,
                    "{input:?} was rejected and changed the state"
                );
                assert_eq!(machine.history(), history, "{input:?} was rejected and changed the history");
                assert_eq!(kind.is_final(), matches!(rejected, Rejected::Final { .. }), "{rejected}");
                self.count("inputs rejected");
            }
            Ok(action) => {
                assert!(!kind.is_final(), "a final state took {input:?}");
                if let Some(given) = answered(&input) {
                    assert_eq!(awaited, Some(given), "an answer was taken that nobody waits for");
                }
                let to = machine.state().kind();
                if to != kind {
                    assert!(kind.leads_to(to), "{kind} → {to}");
                    self.entered(to);
                }
                if let Some(action) = &action {
                    self.check_action(action);
                }
                self.pending = action;
                self.count("inputs taken");
            }
        }
    }

    pub(super) fn entered(&mut self, to: Kind) {
        match to {
            Kind::CreatingCluster => {
                assert_eq!(
                    self.examined,
                    Some(Config::Absent),
                    "a cluster is founded where there is, or may be, a ticket"
                );
                self.count("creating");
            }
            Kind::Joining => {
                assert_ne!(self.examined, Some(Config::Unreadable), "a node joins by what can't be read");
                let State::Joining { ticket, work } = self.machine().state() else { panic!("it is Joining") };
                let by = ticket.as_ref().map(|ticket| Flow::Join(ticket.digest()));
                let began = work.progress().flow();
                assert!(by.is_none_or(|by| by == began), "a node joins by another ticket than it began with");
                self.count("joining");
            }
            Kind::Restarting => self.count("restarting"),
            Kind::Running => self.check_running(),
            Kind::Failed => self.count("failed"),
            Kind::New => panic!("nothing leads back to New"),
        }
    }

    /// Running is what it says.
    pub(super) fn check_running(&mut self) {
        self.count("running");
        let State::Running(membership) = self.machine().state().clone() else { panic!("it is Running") };
        let journal = self.journal.as_ref().expect("what runs was recorded");
        assert_eq!(journal.next, None, "a node runs whose way is not complete");
        assert_eq!(journal.node.as_ref(), Some(&membership.node), "the journal is of another node");
        assert_eq!(journal.cluster, Some(membership.cluster), "the journal is of another cluster");
        let volume = self.volume.as_ref().expect("what runs has a volume");
        assert_eq!(volume.mark, membership.enrolment, "it runs on another enrolment's volume");
        assert_eq!(volume.identity.as_ref(), Some(&membership.node), "it runs with another node's key");
        assert_eq!(volume.member, Some(membership.cluster), "its member is of another cluster");
        let here = (membership.cluster, membership.node.clone());
        assert!(self.records.contains(&here), "a node runs that the cluster does not know");
        let expected = match journal.flow {
            Flow::Create => ClusterId::new(membership.enrolment.0),
            Flow::Join(_) => OTHERS,
        };
        assert!(membership.cluster == expected || self.is_tampered, "it is in the wrong cluster");
    }

    /// What is asked for now fits what is recorded.
    pub(super) fn check_action(&mut self, action: &Action) {
        let recorded = self.journal.clone();
        match action {
            Action::Examine(_) => {}
            Action::Perform(_, step, mode) => {
                let recorded = recorded.expect("nothing is done before the decision is recorded");
                assert_eq!(recorded.mode(*step), *mode, "{step} is done as {mode:?} against the journal");
                let volume = self.volume.as_ref();
                if *step > Step::Identity && recorded.node.is_some() {
                    let identity = volume.and_then(|volume| volume.identity.clone());
                    assert_eq!(identity, recorded.node, "{step} is done with another node's key");
                }
                if *step > Step::Consensus {
                    let member = volume.and_then(|volume| volume.member);
                    let is_right =
                        member == recorded.expected_cluster() || recorded.expected_cluster().is_none();
                    assert!(is_right, "{step} is done in another cluster");
                }
            }
            Action::Record(_, progress) => match recorded {
                None => assert_eq!(progress.next, Some(Step::RECORDED[0]), "the decision is recorded first"),
                Some(recorded) => {
                    let done = recorded.next.expect("nothing is recorded once all is");
                    assert_eq!(progress.next, recorded.after(done).next, "one step at a time is recorded");
                    let same = (progress.enrolment, progress.flow) == (recorded.enrolment, recorded.flow);
                    assert!(same, "a node that began one way went another");
                    self.check_done(done, progress);
                }
            },
        }
    }

    /// What is recorded as done is done.
    pub(super) fn check_done(&self, step: Step, progress: &Progress) {
        if self.is_tampered {
            return;
        }
        let volume = self.volume.as_ref();
        match step {
            Step::Storage => assert!(volume.is_some_and(|volume| volume.mark == progress.enrolment)),
            Step::Identity => {
                assert_eq!(volume.and_then(|volume| volume.identity.clone()), progress.node);
            }
            Step::Consensus => assert_eq!(volume.and_then(|volume| volume.member), progress.cluster),
            Step::Record => {
                let here = progress.cluster.zip(progress.node.clone()).expect("both are known");
                assert!(self.records.contains(&here), "a record is recorded that is not there");
            }
            Step::Network | Step::Local => panic!("{step} is not recorded"),
        }
    }
}

pub(super) fn sequence_of(action: &Action) -> Sequence {
    match action {
        Action::Examine(sequence) | Action::Record(sequence, _) | Action::Perform(sequence, ..) => *sequence,
    }
}

pub(super) fn answered(input: &Input) -> Option<Sequence> {
    match input {
        Input::Examined(sequence, _)
        | Input::Done(sequence, _)
        | Input::Recorded(sequence)
        | Input::Failed(sequence, _) => Some(*sequence),
        Input::Begin | Input::Deadline(_) | Input::Stop => None,
    }
}
