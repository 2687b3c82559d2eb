//! The driver's effects on disk and cluster, as the real steps have them. An action may fail before its
//! effect or after it.

use std::sync::Arc;

use super::super::failure::StepError;
use super::super::fsm::{EnrolmentAction, EnrolmentInput, StepOutput};
use super::super::plan::{BootstrapPermission, InspectionResult};
use super::super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress};
use super::super::state::EnrolmentState;
use super::super::step::{EnrolmentStep, StepMode};
use super::invariants::action_id_of;
use super::{OTHERS, SimConfig, SimVolume, SimWorld, TICKETS};
use crate::node::{ClusterId, EnrolmentTicket};

impl SimWorld {
    /// Performs the pending action and queues its result: after its effect, or without it.
    pub(super) fn act(&mut self) {
        let Some(action) = self.pending.clone() else { return };
        let fault = if self.pick(100) < self.fault_percent { self.pick(20) } else { 2 };
        if fault == 0 {
            self.count("failures before the effect");
            return self.answer(EnrolmentInput::ActionFailed(
                action_id_of(&action),
                Arc::new(StepError::AddressWatchClosed),
            ));
        }
        let Some(input) = self.perform(&action) else { return };
        if fault == 1 {
            self.count("failures after the effect");
            return self.answer(EnrolmentInput::ActionFailed(
                action_id_of(&action),
                Arc::new(StepError::AddressWatchClosed),
            ));
        }
        self.count("actions");
        self.answer(input);
    }

    pub(super) fn answer(&mut self, input: EnrolmentInput) {
        self.inputs.push(input);
        if self.pick(8) == 0 {
            self.count("answers repeated");
            let again = self.inputs[self.inputs.len() - 1].clone();
            self.inputs.push(again);
        }
    }

    pub(super) fn perform(&mut self, action: &EnrolmentAction) -> Option<EnrolmentInput> {
        let action_id = action_id_of(action);
        let failed =
            || Some(EnrolmentInput::ActionFailed(action_id, Arc::new(StepError::AddressWatchClosed)));
        match action {
            EnrolmentAction::AwaitInstruction(_)
                if self.config == SimConfig::Absent && !self.may_bootstrap() =>
            {
                None
            }
            EnrolmentAction::AwaitInstruction(_) => match self.found() {
                Some(found) => Some(EnrolmentInput::Inspected(action_id, found)),
                None => failed(),
            },
            // At most once in a run; its result may be delivered repeatedly.
            EnrolmentAction::Inspect(_) if self.examined.is_some() => None,
            EnrolmentAction::Inspect(_) => match self.found() {
                Some(found) => Some(EnrolmentInput::Inspected(action_id, found)),
                None => failed(),
            },
            EnrolmentAction::Record(_, progress) => {
                self.journal = Some(progress.clone());
                Some(EnrolmentInput::Recorded(action_id))
            }
            EnrolmentAction::RunStep(_, EnrolmentStep::Network, _) if !self.has_address => None,
            EnrolmentAction::RunStep(_, step, mode) => match self.do_step(*step, *mode) {
                Some(outcome) => Some(EnrolmentInput::StepDone(action_id, outcome)),
                None => failed(),
            },
        }
    }

    pub(super) fn found(&mut self) -> Option<InspectionResult> {
        self.examined = Some(self.config);
        if let Some(progress) = self.journal.clone().filter(|progress| progress.next_step().is_none()) {
            return Some(InspectionResult::Complete { progress });
        }
        let ticket = match self.config {
            SimConfig::Absent => None,
            SimConfig::Ticket(which) => Some(EnrolmentTicket::Golden(Arc::clone(&TICKETS[which]))),
            SimConfig::Unreadable => return None,
        };
        Some(match self.journal.clone() {
            Some(progress) => InspectionResult::InProgress { progress, ticket },
            None => {
                let bootstrap = match (self.bootstrap_record, self.is_told) {
                    (Some(_), _) => BootstrapPermission::UsedUp("record".into()),
                    (None, true) => BootstrapPermission::Granted,
                    (None, false) => BootstrapPermission::NotGranted,
                };
                InspectionResult::Fresh { ticket, enrolment_id: EnrolmentId(self.bytes()), bootstrap }
            }
        })
    }

    fn may_bootstrap(&self) -> bool {
        self.is_told && self.bootstrap_record.is_none()
    }

    /// The effect of a step, as the real one has it; `None` if the step is rejected.
    pub(super) fn do_step(&mut self, step: EnrolmentStep, mode: StepMode) -> Option<StepOutput> {
        let progress = self.fsm().current_state().active_run().expect("a run in progress").progress().clone();
        match step {
            EnrolmentStep::Network | EnrolmentStep::Local => Some(StepOutput::Done),
            EnrolmentStep::Storage => {
                if mode == StepMode::FirstRun {
                    let record = *self.bootstrap_record.get_or_insert(progress.enrolment_id);
                    let is_bootstrap = progress.enrolment_kind == EnrolmentKind::Bootstrap;
                    if is_bootstrap && record != progress.enrolment_id {
                        return None;
                    }
                }
                if self.volume.is_none() && mode == StepMode::FirstRun {
                    assert!(
                        !self.has_recorded(EnrolmentStep::Storage),
                        "a data volume was created a second time"
                    );
                    self.volume =
                        Some(SimVolume { mark: progress.enrolment_id, identity: None, member: None });
                }
                let volume = self.volume.as_ref()?;
                (volume.mark == progress.enrolment_id).then_some(StepOutput::Done)
            }
            EnrolmentStep::Identity => {
                let fresh =
                    format!("sim-{:032x}", u128::from_be_bytes(self.bytes())).parse().expect("a valid name");
                let new = match self.fsm().current_state() {
                    EnrolmentState::Joining { ticket: Some(ticket), .. } => ticket.node_id().clone(),
                    _ => fresh,
                };
                let volume = self.volume.as_mut()?;
                if mode == StepMode::FirstRun {
                    volume.identity.get_or_insert(new);
                }
                volume.identity.clone().map(StepOutput::Node)
            }
            EnrolmentStep::Consensus => self.start_member(&progress, mode),
            EnrolmentStep::Record => {
                let volume = self.volume.clone()?;
                let here = (volume.member?, volume.identity?);
                if mode == StepMode::Rerun && !self.records.contains(&here) {
                    return None;
                }
                if !self.records.contains(&here) {
                    self.records.push(here);
                }
                Some(StepOutput::Done)
            }
        }
    }

    pub(super) fn start_member(
        &mut self,
        progress: &EnrolmentProgress,
        mode: StepMode,
    ) -> Option<StepOutput> {
        let cluster = match progress.enrolment_kind {
            EnrolmentKind::Bootstrap => ClusterId::from_bytes(progress.enrolment_id.0),
            EnrolmentKind::Join(_) | EnrolmentKind::Restore => OTHERS,
        };
        let is_recorded = self.has_recorded(EnrolmentStep::Consensus);
        let volume = self.volume.as_mut()?;
        if volume.member.is_none() && mode == StepMode::FirstRun {
            assert!(!is_recorded, "a second cluster was bootstrapped, or joined");
            if progress.enrolment_kind == EnrolmentKind::Bootstrap {
                self.bootstrapped.insert(progress.enrolment_id.0);
                assert_eq!(self.bootstrapped.len(), 1, "a host has bootstrapped a second cluster");
            }
            volume.member = Some(cluster);
        }
        volume.member.map(StepOutput::Cluster)
    }

    /// Returns whether the journal records this step as done.
    pub(super) fn has_recorded(&self, step: EnrolmentStep) -> bool {
        self.journal.as_ref().is_some_and(|progress| progress.next_step().is_none_or(|next| step < next))
    }
}
