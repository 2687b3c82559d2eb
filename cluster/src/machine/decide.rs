//! What a node does that has just been started: decided by what is there, and by nothing else.

use std::sync::Arc;

use super::reason::Reason;
use super::step::{EnrolmentId, Flow, Progress, Step};
use crate::node::GoldenTicket;

/// What was found when the run began. What could not be read is none of these: then the examination has failed.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Found {
    /// The journal knows of nothing.
    Fresh {
        /// What the enrolment configuration holds, where there is one.
        ticket: Option<Arc<GoldenTicket>>,
        /// Random bytes for the attempt that begins now.
        enrolment: EnrolmentId,
    },
    /// The journal knows of an attempt that was begun.
    Begun {
        /// How far it is.
        progress: Progress,
        /// What the enrolment configuration holds now, where there is one.
        ticket: Option<Arc<GoldenTicket>>,
    },
    /// The journal knows of an attempt that is complete. The enrolment configuration has no say.
    Complete {
        /// What was recorded.
        progress: Progress,
    },
}

/// What to do.
#[derive(Clone, Debug)]
pub(super) enum Plan {
    Create { progress: Progress, is_recorded: bool },
    Join { ticket: Option<Arc<GoldenTicket>>, progress: Progress, is_recorded: bool },
    Restart { progress: Progress },
}

impl Plan {
    pub(super) fn progress(&self) -> &Progress {
        match self {
            Self::Create { progress, .. } | Self::Join { progress, .. } | Self::Restart { progress } => {
                progress
            }
        }
    }

    /// Whether the journal knows of it already.
    pub(super) fn is_recorded(&self) -> bool {
        match self {
            Self::Create { is_recorded, .. } | Self::Join { is_recorded, .. } => *is_recorded,
            Self::Restart { .. } => true,
        }
    }
}

/// Decides.
///
/// | Journal | Ticket | |
/// |---|---|---|
/// | nothing | none | create |
/// | nothing | one | join by it |
/// | creating | none | go on creating |
/// | creating | one | [`Reason::TicketAfterCreation`] |
/// | joining, member not started | the same | go on joining |
/// | joining, member not started | none | [`Reason::TicketGone`] |
/// | joining, member started | the same, or none | go on joining |
/// | joining | another | [`Reason::TicketChanged`] |
/// | complete | any | restart |
///
/// The same ticket is one for the same node, whatever members it names: it may have been made again since.
///
/// A node that has begun one way never goes another: that is how nodes end up in a cluster of their own.
pub(super) fn decide(found: Found) -> Result<Plan, Reason> {
    match found {
        Found::Fresh { ticket: None, enrolment } => {
            Ok(Plan::Create { progress: Progress::new(enrolment, Flow::Create), is_recorded: false })
        }
        Found::Fresh { ticket: Some(ticket), enrolment } => {
            let progress = Progress::new(enrolment, Flow::Join(ticket.digest()));
            Ok(Plan::Join { ticket: Some(ticket), progress, is_recorded: false })
        }
        Found::Complete { progress } => Ok(Plan::Restart { progress }),
        Found::Begun { progress, ticket } => match (progress.flow, ticket) {
            (Flow::Create, None) => Ok(Plan::Create { progress, is_recorded: true }),
            (Flow::Create, Some(_)) => Err(Reason::TicketAfterCreation),
            (Flow::Join(begun), Some(ticket)) if ticket.digest() == begun => {
                Ok(Plan::Join { ticket: Some(ticket), progress, is_recorded: true })
            }
            (Flow::Join(begun), Some(ticket)) => Err(Reason::TicketChanged { begun, found: ticket.digest() }),
            (Flow::Join(begun), None) => match progress.next {
                Some(Step::Network | Step::Storage | Step::Identity | Step::Consensus) => {
                    Err(Reason::TicketGone { begun })
                }
                Some(Step::Record | Step::Local) | None => {
                    Ok(Plan::Join { ticket: None, progress, is_recorded: true })
                }
            },
        },
    }
}
