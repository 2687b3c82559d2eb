//! What the driver does to the disk and the cluster, as the real steps do: it may fail before its effect or after it.

use std::sync::Arc;

use super::super::core::{Action, Input, Outcome};
use super::super::decide::Found;
use super::super::reason::StepError;
use super::super::state::State;
use super::super::step::{EnrolmentId, Flow, Mode, Progress, Step};
use super::invariants::sequence_of;
use super::{Config, OTHERS, TICKETS, Volume, World};
use crate::node::ClusterId;

impl World {
    /// The driver does what is pending, and its answer is on its way: after its effect, or without.
    pub(super) fn act(&mut self) {
        let Some(action) = self.pending.clone() else { return };
        let fault = if self.pick(100) < self.trouble { self.pick(20) } else { 2 };
        if fault == 0 {
            self.count("failures before the effect");
            return self.answer(Input::Failed(sequence_of(&action), Arc::new(StepError::NoNetwork)));
        }
        let Some(input) = self.perform(&action) else { return };
        if fault == 1 {
            self.count("failures after the effect");
            return self.answer(Input::Failed(sequence_of(&action), Arc::new(StepError::NoNetwork)));
        }
        self.count("actions");
        self.answer(input);
    }

    pub(super) fn answer(&mut self, input: Input) {
        self.inputs.push(input);
        if self.pick(8) == 0 {
            self.count("answers repeated");
            let again = self.inputs[self.inputs.len() - 1].clone();
            self.inputs.push(again);
        }
    }

    pub(super) fn perform(&mut self, action: &Action) -> Option<Input> {
        let sequence = sequence_of(action);
        let failed = || Some(Input::Failed(sequence, Arc::new(StepError::NoNetwork)));
        match action {
            // Once in a run; of its answer there may be more than one.
            Action::Examine(_) if self.examined.is_some() => None,
            Action::Examine(_) => match self.found() {
                Some(found) => Some(Input::Examined(sequence, found)),
                None => failed(),
            },
            Action::Record(_, progress) => {
                self.journal = Some(progress.clone());
                Some(Input::Recorded(sequence))
            }
            Action::Perform(_, Step::Network, _) if !self.has_address => None,
            Action::Perform(_, step, mode) => match self.do_step(*step, *mode) {
                Some(outcome) => Some(Input::Done(sequence, outcome)),
                None => failed(),
            },
        }
    }

    pub(super) fn found(&mut self) -> Option<Found> {
        self.examined = Some(self.config);
        if let Some(progress) = self.journal.clone().filter(|progress| progress.next.is_none()) {
            return Some(Found::Complete { progress });
        }
        let ticket = match self.config {
            Config::Absent => None,
            Config::Ticket(which) => Some(Arc::clone(&TICKETS[which])),
            Config::Unreadable => return None,
        };
        Some(match self.journal.clone() {
            Some(progress) => Found::Begun { progress, ticket },
            None => Found::Fresh { ticket, enrolment: EnrolmentId(self.bytes()) },
        })
    }

    /// The effect of a step, as the shell has it; none where it refuses.
    pub(super) fn do_step(&mut self, step: Step, mode: Mode) -> Option<Outcome> {
        let progress = self.machine().state().work().expect("steps are done on the way").progress().clone();
        match step {
            Step::Network => Some(Outcome::Network),
            Step::Local => Some(Outcome::Local),
            Step::Storage => {
                if self.volume.is_none() && mode == Mode::Make {
                    assert!(!self.has_recorded(Step::Storage), "a data volume was made a second time");
                    self.volume = Some(Volume { mark: progress.enrolment, identity: None, member: None });
                }
                let volume = self.volume.as_ref()?;
                (volume.mark == progress.enrolment).then_some(Outcome::Storage)
            }
            Step::Identity => {
                let fresh =
                    format!("sim-{:032x}", u128::from_be_bytes(self.bytes())).parse().expect("a name");
                let new = match self.machine().state() {
                    State::Joining { ticket: Some(ticket), .. } => ticket.node().clone(),
                    _ => fresh,
                };
                let volume = self.volume.as_mut()?;
                if mode == Mode::Make {
                    volume.identity.get_or_insert(new);
                }
                volume.identity.clone().map(Outcome::Identity)
            }
            Step::Consensus => self.start_member(&progress, mode),
            Step::Record => {
                let volume = self.volume.clone()?;
                let here = (volume.member?, volume.identity?);
                if mode == Mode::Again && !self.records.contains(&here) {
                    return None;
                }
                if !self.records.contains(&here) {
                    self.records.push(here);
                }
                Some(Outcome::Record)
            }
        }
    }

    pub(super) fn start_member(&mut self, progress: &Progress, mode: Mode) -> Option<Outcome> {
        let cluster = match progress.flow {
            Flow::Create => ClusterId::new(progress.enrolment.0),
            Flow::Join(_) => OTHERS,
        };
        let is_recorded = self.has_recorded(Step::Consensus);
        let volume = self.volume.as_mut()?;
        if volume.member.is_none() && mode == Mode::Make {
            assert!(!is_recorded, "a second cluster was founded, or joined");
            volume.member = Some(cluster);
        }
        volume.member.map(Outcome::Consensus)
    }

    /// Whether the journal has it that this was done.
    pub(super) fn has_recorded(&self, step: Step) -> bool {
        self.journal.as_ref().is_some_and(|progress| progress.next.is_none_or(|next| step < next))
    }
}
