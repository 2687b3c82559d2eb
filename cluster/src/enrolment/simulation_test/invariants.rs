//! The invariants after each input.

use super::super::fsm::{ActionId, EnrolmentAction, EnrolmentInput, RejectedInput};
use super::super::progress::{EnrolmentKind, EnrolmentProgress};
use super::super::state::{EnrolmentPhase, EnrolmentState};
use super::super::step::EnrolmentStep;
use super::{OTHERS, SimConfig, SimWorld};
use crate::node::ClusterId;

impl SimWorld {
    /// Applies an input, and checks the invariants.
    pub(super) fn apply(&mut self, input: EnrolmentInput) {
        let Some(fsm) = &mut self.fsm else { return };
        let (before, history) = (format!("{:?}", fsm.current_state()), fsm.phase_history().to_vec());
        let kind = fsm.current_state().phase();
        let awaited = self.pending.as_ref().map(action_id_of);
        match fsm.apply_input(input.clone()) {
            Err(rejected) => {
                assert_eq!(
                    format!("{:?}", fsm.current_state()),
                    before,
                    "{input:?} was rejected and changed the state"
                );
                assert_eq!(fsm.phase_history(), history, "{input:?} was rejected and changed the history");
                assert_eq!(kind.is_final(), matches!(rejected, RejectedInput::Final { .. }), "{rejected}");
                self.count("inputs rejected");
            }
            Ok(action) => {
                assert!(!kind.is_final(), "a final state took {input:?}");
                if let Some(given) = answered(&input) {
                    assert_eq!(
                        awaited,
                        Some(given),
                        "a result was accepted that is not of the pending action"
                    );
                }
                let to = fsm.current_state().phase();
                if to != kind {
                    assert!(kind.can_lead_to(to), "{kind} → {to}");
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

    pub(super) fn entered(&mut self, to: EnrolmentPhase) {
        match to {
            EnrolmentPhase::CreatingCluster => {
                assert_eq!(
                    self.examined,
                    Some(SimConfig::Absent),
                    "a cluster is bootstrapped although a ticket exists, or may exist"
                );
                let is_resumed = self.journal.is_some();
                assert!(is_resumed || self.bootstrap_record.is_none(), "a host bootstraps a second time");
                self.count("creating");
            }
            EnrolmentPhase::Joining => {
                assert_ne!(self.examined, Some(SimConfig::Unreadable), "a node joins by what can't be read");
                let EnrolmentState::Joining { ticket, run } = self.fsm().current_state() else {
                    panic!("not Joining")
                };
                let by = ticket.as_ref().map(|ticket| EnrolmentKind::Join(ticket.digest()));
                let by_journal = run.progress().enrolment_kind();
                assert!(
                    by.is_none_or(|by| by == by_journal),
                    "a node joins by another ticket than it started with"
                );
                self.count("joining");
            }
            EnrolmentPhase::Restarting => self.count("restarting"),
            EnrolmentPhase::Running => self.check_running(),
            EnrolmentPhase::Failed => self.count("failed"),
            EnrolmentPhase::Waiting => {
                assert_eq!(self.examined, Some(SimConfig::Absent), "a node waits for the ticket that it has");
                assert!(self.journal.is_none(), "a node waits that has an enrolment");
                self.count("waiting");
            }
            EnrolmentPhase::New => panic!("nothing leads back to New"),
        }
    }

    /// Checks that a running node is that of its journal and disk.
    pub(super) fn check_running(&mut self) {
        self.count("running");
        let EnrolmentState::Running(membership) = self.fsm().current_state().clone() else {
            panic!("not Running")
        };
        let journal = self.journal.as_ref().expect("a running node was recorded");
        assert_eq!(journal.next_step(), None, "a node runs whose way is not complete");
        assert_eq!(journal.node_id.as_ref(), Some(&membership.node_id), "the journal is of another node");
        assert_eq!(journal.cluster_id, Some(membership.cluster_id), "the journal is of another cluster");
        let volume = self.volume.as_ref().expect("a running node has a volume");
        assert_eq!(volume.mark, membership.enrolment_id, "it runs on another enrolment's volume");
        assert_eq!(volume.identity.as_ref(), Some(&membership.node_id), "it runs with another node's key");
        assert_eq!(volume.member, Some(membership.cluster_id), "its member is of another cluster");
        let here = (membership.cluster_id, membership.node_id.clone());
        assert!(self.records.contains(&here), "a node runs that the cluster does not know");
        let expected = match journal.enrolment_kind {
            EnrolmentKind::Bootstrap => ClusterId::from_bytes(membership.enrolment_id.0),
            EnrolmentKind::Join(_) | EnrolmentKind::Restore => OTHERS,
        };
        assert!(membership.cluster_id == expected || self.is_tampered, "it is in the wrong cluster");
    }

    /// Checks that the action fits what is recorded.
    pub(super) fn check_action(&mut self, action: &EnrolmentAction) {
        let recorded = self.journal.clone();
        match action {
            EnrolmentAction::Inspect(_) | EnrolmentAction::AwaitInstruction(_) => {}
            EnrolmentAction::RunStep(_, step, mode) => {
                let recorded = recorded.expect("nothing is done before the decision is recorded");
                assert_eq!(
                    recorded.step_mode(*step),
                    *mode,
                    "{step} is done as {mode:?} against the journal"
                );
                let volume = self.volume.as_ref();
                if *step > EnrolmentStep::Identity && recorded.node_id.is_some() {
                    let identity = volume.and_then(|volume| volume.identity.clone());
                    assert_eq!(identity, recorded.node_id, "{step} is done with another node's key");
                }
                if *step > EnrolmentStep::Consensus {
                    let member = volume.and_then(|volume| volume.member);
                    let is_right =
                        member == recorded.expected_cluster() || recorded.expected_cluster().is_none();
                    assert!(is_right, "{step} is done in another cluster");
                }
            }
            EnrolmentAction::Record(_, progress) => match recorded {
                None => assert_eq!(
                    progress.next_step(),
                    Some(EnrolmentStep::RECORDED[0]),
                    "the decision is recorded first"
                ),
                Some(recorded) => {
                    let done = recorded.next_step().expect("nothing is recorded after the last step");
                    assert_eq!(
                        progress.next_step(),
                        recorded.with_step_done(done).next_step(),
                        "one step at a time is recorded"
                    );
                    let same = (progress.enrolment_id, progress.enrolment_kind)
                        == (recorded.enrolment_id, recorded.enrolment_kind);
                    assert!(same, "a node switched between bootstrap and join");
                    self.check_done(done, progress);
                }
            },
        }
    }

    /// Checks that a step recorded as done is done.
    pub(super) fn check_done(&self, step: EnrolmentStep, progress: &EnrolmentProgress) {
        if self.is_tampered {
            return;
        }
        let volume = self.volume.as_ref();
        match step {
            EnrolmentStep::Storage => {
                assert!(volume.is_some_and(|volume| volume.mark == progress.enrolment_id))
            }
            EnrolmentStep::Identity => {
                assert_eq!(volume.and_then(|volume| volume.identity.clone()), progress.node_id);
            }
            EnrolmentStep::Consensus => {
                assert_eq!(volume.and_then(|volume| volume.member), progress.cluster_id)
            }
            EnrolmentStep::Record => {
                let here = progress.cluster_id.zip(progress.node_id.clone()).expect("both are known");
                assert!(self.records.contains(&here), "a missing record is recorded as written");
            }
            EnrolmentStep::Network | EnrolmentStep::Local => panic!("{step} is not recorded"),
        }
    }
}

pub(super) fn action_id_of(action: &EnrolmentAction) -> ActionId {
    match action {
        EnrolmentAction::Inspect(action_id)
        | EnrolmentAction::AwaitInstruction(action_id)
        | EnrolmentAction::Record(action_id, _)
        | EnrolmentAction::RunStep(action_id, ..) => *action_id,
    }
}

pub(super) fn answered(input: &EnrolmentInput) -> Option<ActionId> {
    match input {
        EnrolmentInput::Inspected(action_id, _)
        | EnrolmentInput::StepDone(action_id, _)
        | EnrolmentInput::Recorded(action_id)
        | EnrolmentInput::ActionFailed(action_id, _) => Some(*action_id),
        EnrolmentInput::Start | EnrolmentInput::DeadlineExceeded(_) | EnrolmentInput::Stop => None,
    }
}
