//! Faults between the driver and the state machine, and what operators, clocks and thieves do.

use std::sync::Arc;

use super::super::failure::StepError;
use super::super::fsm::{ActionId, EnrolmentAction, EnrolmentInput, StepOutput};
use super::super::plan::{BootstrapPermission, InspectionResult};
use super::super::progress::EnrolmentId;
use super::super::step::EnrolmentStep;
use super::invariants::action_id_of;
use super::{OTHERS, SimConfig, SimWorld};
use crate::node::ClusterId;

impl SimWorld {
    pub(super) fn deliver(&mut self) {
        if self.inputs.is_empty() {
            return;
        }
        let at = self.pick(self.inputs.len());
        // Some inputs stay queued, and are delivered again later.
        let input = match self.pick(10) {
            0 => self.inputs[at].clone(),
            _ => self.inputs.remove(at),
        };
        self.apply(input);
    }

    pub(super) fn lose(&mut self) {
        if !self.inputs.is_empty() {
            let at = self.pick(self.inputs.len());
            self.inputs.remove(at);
            self.count("answers lost");
        }
    }

    /// Applies inputs that are not the result of any action.
    pub(super) fn nonsense(&mut self) {
        let awaited = self.pending.as_ref().map_or(0, |action| action_id_of(action).0);
        // The id of the pending action itself is used only with an input that can't be its result.
        let wrong = ActionId([awaited + 1, awaited.wrapping_sub(1), 0, u64::MAX][self.pick(4)]);
        let input = match self.pick(6) {
            0 => EnrolmentInput::Start,
            1 => EnrolmentInput::Recorded(wrong),
            2 => EnrolmentInput::StepDone(wrong, StepOutput::Done),
            3 => EnrolmentInput::ActionFailed(wrong, Arc::new(StepError::AddressWatchClosed)),
            4 => EnrolmentInput::Inspected(
                wrong,
                InspectionResult::Fresh {
                    ticket: None,
                    enrolment_id: EnrolmentId([1; 16]),
                    bootstrap: BootstrapPermission::Granted,
                },
            ),
            _ => match &self.pending {
                Some(EnrolmentAction::Inspect(action_id) | EnrolmentAction::AwaitInstruction(action_id)) => {
                    EnrolmentInput::Recorded(*action_id)
                }
                Some(EnrolmentAction::Record(action_id, _)) => {
                    EnrolmentInput::StepDone(*action_id, StepOutput::Done)
                }
                // The output of another step.
                Some(EnrolmentAction::RunStep(
                    action_id,
                    EnrolmentStep::Identity | EnrolmentStep::Consensus,
                    _,
                )) => EnrolmentInput::StepDone(*action_id, StepOutput::Done),
                Some(EnrolmentAction::RunStep(action_id, ..)) => {
                    EnrolmentInput::StepDone(*action_id, StepOutput::Cluster(OTHERS))
                }
                None => return,
            },
        };
        let before = self.fsm().phase_history().to_vec();
        let pending = self.pending.clone();
        self.apply(input);
        assert_eq!(self.fsm().phase_history(), before, "an input without an action was accepted");
        assert_eq!(self.pending, pending, "an input without an action was accepted");
    }

    /// The clock that measures the deadline is wrong, is corrected, and is wrong again.
    pub(super) fn let_time_pass(&mut self) {
        self.wall += match self.pick(3) {
            0 => i64::try_from(self.pick(60)).expect("within range"),
            1 => self.jump() / 1000,
            _ => self.jump(),
        };
        if self.wall >= self.deadline {
            self.count("deadlines");
            self.apply(EnrolmentInput::DeadlineExceeded(None));
            self.deadline = i64::MAX;
        }
    }

    pub(super) fn operate(&mut self) {
        self.count("operations");
        match self.pick(7) {
            6 => self.is_told = !self.is_told,
            0 => self.has_address = !self.has_address,
            1 => self.config = SimConfig::Unreadable,
            2 => self.config = SimConfig::Ticket(1),
            3 => self.config = SimConfig::Ticket(0),
            _ => self.config = SimConfig::Absent,
        }
    }

    /// Disks are removed, swapped, or replaced by another node's: never while the node runs its steps on
    /// them.
    pub(super) fn tamper(&mut self) {
        if self.pick(4) > 0 {
            return;
        }
        self.kill();
        match self.pick(6) {
            5 => self.lose_everything(),
            0 => self.lose_disk(),
            1 => self.lose_member(),
            _ => self.swap(),
        }
    }

    /// An empty disk replaces the volume. If nothing was recorded about it, that does no harm.
    fn lose_disk(&mut self) {
        if self.volume.take().is_some() {
            self.is_tampered |= self.has_recorded(EnrolmentStep::Storage);
            self.count("disks lost");
        }
    }

    /// The disk with journal and volume is lost; the record of the bootstrap is on another.
    fn lose_everything(&mut self) {
        if self.journal.take().is_some() {
            self.volume = None;
            self.is_tampered = false;
            self.count("everything lost");
        }
    }

    /// The member's data disappears from the disk.
    fn lose_member(&mut self) {
        if self.volume.as_mut().and_then(|volume| volume.member.take()).is_some() {
            self.is_tampered |= self.has_recorded(EnrolmentStep::Consensus);
            self.count("members' data lost");
        }
    }

    fn swap(&mut self) {
        let (other, name) = (EnrolmentId(self.bytes()), self.bytes());
        let Some(volume) = &mut self.volume else { return };
        let name = format!("sim-{:032x}", u128::from_be_bytes(name)).parse().expect("a valid name");
        self.is_tampered = true;
        match self.names % 3 {
            0 => volume.mark = other,
            1 if volume.identity.is_some() => volume.identity = Some(name),
            _ if volume.member.is_some() => volume.member = Some(ClusterId::from_bytes(other.0)),
            _ => volume.mark = other,
        }
        self.count("disks tampered with");
    }
}
