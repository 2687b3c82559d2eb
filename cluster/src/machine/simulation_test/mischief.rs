//! What goes wrong between the driver and the machine, and what operators, clocks and thieves do.

use std::sync::Arc;

use super::super::core::{Action, Input, Outcome, Sequence};
use super::super::decide::Found;
use super::super::reason::StepError;
use super::super::step::{EnrolmentId, Step};
use super::invariants::sequence_of;
use super::{Config, World};
use crate::node::ClusterId;

impl World {
    pub(super) fn deliver(&mut self) {
        if self.inputs.is_empty() {
            return;
        }
        let at = self.pick(self.inputs.len());
        // Some stay, and come again later.
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

    /// Answers that nobody gave.
    pub(super) fn nonsense(&mut self) {
        let awaited = self.pending.as_ref().map_or(0, |action| sequence_of(action).0);
        // The pending action's own sequence only with what can't be its answer.
        let wrong = Sequence([awaited + 1, awaited.wrapping_sub(1), 0, u64::MAX][self.pick(4)]);
        let input = match self.pick(6) {
            0 => Input::Begin,
            1 => Input::Recorded(wrong),
            2 => Input::Done(wrong, Outcome::Storage),
            3 => Input::Failed(wrong, Arc::new(StepError::NoNetwork)),
            4 => Input::Examined(wrong, Found::Fresh { ticket: None, enrolment: EnrolmentId([1; 16]) }),
            _ => match &self.pending {
                Some(Action::Examine(sequence)) => Input::Recorded(*sequence),
                Some(Action::Record(sequence, _)) => Input::Done(*sequence, Outcome::Record),
                Some(Action::Perform(sequence, Step::Network, _)) => Input::Done(*sequence, Outcome::Local),
                Some(Action::Perform(sequence, ..)) => Input::Done(*sequence, Outcome::Network),
                None => return,
            },
        };
        let before = self.machine().history().to_vec();
        let pending = self.pending.clone();
        self.apply(input);
        assert_eq!(self.machine().history(), before, "an answer that nobody gave was taken");
        assert_eq!(self.pending, pending, "an answer that nobody gave was taken");
    }

    /// The clock by which somebody tells the deadline is wrong, and is set right, and wrong again.
    pub(super) fn let_time_pass(&mut self) {
        self.wall += match self.pick(3) {
            0 => i64::try_from(self.pick(60)).expect("it fits"),
            1 => self.jump() / 1000,
            _ => self.jump(),
        };
        if self.wall >= self.deadline {
            self.count("deadlines");
            self.apply(Input::Deadline(None));
            self.deadline = i64::MAX;
        }
    }

    pub(super) fn operate(&mut self) {
        self.count("operations");
        match self.pick(6) {
            0 => self.has_address = !self.has_address,
            1 => self.config = Config::Unreadable,
            2 => self.config = Config::Ticket(1),
            3 => self.config = Config::Ticket(0),
            _ => self.config = Config::Absent,
        }
    }

    /// Somebody takes disks away, swaps them, or restores another's: never while the node runs its steps on them.
    pub(super) fn tamper(&mut self) {
        if self.pick(4) > 0 {
            return;
        }
        self.kill();
        match self.pick(5) {
            0 => self.lose_disk(),
            1 => self.lose_member(),
            _ => self.swap(),
        }
    }

    /// Another disk is in its place, with nothing on it. Where nothing was recorded of it, that is no harm.
    fn lose_disk(&mut self) {
        if self.volume.take().is_some() {
            self.is_tampered |= self.has_recorded(Step::Storage);
            self.count("disks lost");
        }
    }

    /// The member's data is gone from the disk.
    fn lose_member(&mut self) {
        if self.volume.as_mut().and_then(|volume| volume.member.take()).is_some() {
            self.is_tampered |= self.has_recorded(Step::Consensus);
            self.count("members' data lost");
        }
    }

    fn swap(&mut self) {
        let (other, name) = (EnrolmentId(self.bytes()), self.bytes());
        let Some(volume) = &mut self.volume else { return };
        let name = format!("sim-{:032x}", u128::from_be_bytes(name)).parse().expect("a name");
        self.is_tampered = true;
        match self.names % 3 {
            0 => volume.mark = other,
            1 if volume.identity.is_some() => volume.identity = Some(name),
            _ if volume.member.is_some() => volume.member = Some(ClusterId::new(other.0)),
            _ => volume.mark = other,
        }
        self.count("disks tampered with");
    }
}
