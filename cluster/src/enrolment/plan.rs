//! What a node does when it starts, decided by what is on the disk alone.

use std::sync::Arc;

use super::failure::FailureReason;
use super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress, EnrolmentStep};
use crate::node::GoldenTicket;

/// What a run found when it started. If something could not be read, the inspection fails instead.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum InspectionResult {
    /// The journal is empty.
    Fresh {
        /// The ticket in the enrolment configuration, if any.
        ticket: Option<Arc<GoldenTicket>>,
        /// Random bytes that identify the new attempt.
        enrolment_id: EnrolmentId,
    },
    /// The journal records an attempt in progress.
    InProgress {
        /// How far the attempt is.
        progress: EnrolmentProgress,
        /// The ticket that the enrolment configuration holds now, if any.
        ticket: Option<Arc<GoldenTicket>>,
    },
    /// The journal records a completed attempt. The enrolment configuration is ignored.
    Complete {
        /// What was recorded.
        progress: EnrolmentProgress,
    },
}

/// What to do.
#[derive(Clone, Debug)]
pub(super) enum EnrolmentPlan {
    Bootstrap { progress: EnrolmentProgress, is_recorded: bool },
    Join { ticket: Option<Arc<GoldenTicket>>, progress: EnrolmentProgress, is_recorded: bool },
    Restart { progress: EnrolmentProgress },
}

impl EnrolmentPlan {
    pub(super) fn progress(&self) -> &EnrolmentProgress {
        match self {
            Self::Bootstrap { progress, .. } | Self::Join { progress, .. } | Self::Restart { progress } => {
                progress
            }
        }
    }

    /// Whether the journal already records this plan.
    pub(super) fn is_recorded(&self) -> bool {
        match self {
            Self::Bootstrap { is_recorded, .. } | Self::Join { is_recorded, .. } => *is_recorded,
            Self::Restart { .. } => true,
        }
    }
}

/// Decides what to do.
///
/// | Journal | Ticket | Plan |
/// |---|---|---|
/// | empty | none | bootstrap a cluster |
/// | empty | one | join by it |
/// | bootstrapping | none | resume bootstrapping |
/// | bootstrapping | one | [`FailureReason::TicketDuringBootstrap`] |
/// | joining, member not started | the same | resume joining |
/// | joining, member not started | none | [`FailureReason::TicketMissing`] |
/// | joining, member started | the same, or none | resume joining |
/// | joining | another | [`FailureReason::TicketChanged`] |
/// | complete | any | restart |
///
/// Two tickets are the same if they are for the same node, whatever members they list: a ticket may be
/// reissued.
///
/// A node never switches from one way to another: that is how nodes end up alone in a cluster.
pub(super) fn decide_plan(found: InspectionResult) -> Result<EnrolmentPlan, FailureReason> {
    match found {
        InspectionResult::Fresh { ticket: None, enrolment_id } => Ok(EnrolmentPlan::Bootstrap {
            progress: EnrolmentProgress::new(enrolment_id, EnrolmentKind::Bootstrap),
            is_recorded: false,
        }),
        InspectionResult::Fresh { ticket: Some(ticket), enrolment_id } => {
            let progress = EnrolmentProgress::new(enrolment_id, EnrolmentKind::Join(ticket.digest()));
            Ok(EnrolmentPlan::Join { ticket: Some(ticket), progress, is_recorded: false })
        }
        InspectionResult::Complete { progress } => Ok(EnrolmentPlan::Restart { progress }),
        InspectionResult::InProgress { progress, ticket } => match (progress.enrolment_kind, ticket) {
            (EnrolmentKind::Bootstrap, None) => Ok(EnrolmentPlan::Bootstrap { progress, is_recorded: true }),
            (EnrolmentKind::Bootstrap, Some(_)) => Err(FailureReason::TicketDuringBootstrap),
            (EnrolmentKind::Join(started_with), Some(ticket)) if ticket.digest() == started_with => {
                Ok(EnrolmentPlan::Join { ticket: Some(ticket), progress, is_recorded: true })
            }
            (EnrolmentKind::Join(started_with), Some(ticket)) => {
                Err(FailureReason::TicketChanged { started_with, found: ticket.digest() })
            }
            (EnrolmentKind::Join(started_with), None) => match progress.next_step {
                Some(
                    EnrolmentStep::Network
                    | EnrolmentStep::Storage
                    | EnrolmentStep::Identity
                    | EnrolmentStep::Consensus,
                ) => Err(FailureReason::TicketMissing { started_with }),
                Some(EnrolmentStep::Record | EnrolmentStep::Local) | None => {
                    Ok(EnrolmentPlan::Join { ticket: None, progress, is_recorded: true })
                }
            },
        },
    }
}
