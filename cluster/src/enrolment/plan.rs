//! The plan of a node that starts, decided by the content of its disk alone.

use std::path::PathBuf;
use std::sync::Arc;

use super::failure::FailureReason;
use super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress};
use super::state::WaitCause;
use super::step::{EnrolmentStep, StepMode};
use crate::node::{EnrolmentTicket, GoldenTicket};

/// The findings of a run at its start. If something could not be read, the inspection fails instead.
#[derive(Clone, Debug)]
pub(super) enum InspectionResult {
    /// The journal is empty.
    Fresh {
        ticket: Option<EnrolmentTicket>,
        /// Random bytes that identify the new attempt.
        enrolment_id: EnrolmentId,
        bootstrap: BootstrapPermission,
    },
    /// The journal records an attempt in progress.
    InProgress {
        progress: EnrolmentProgress,
        /// The ticket that the enrolment configuration holds now, if any.
        ticket: Option<EnrolmentTicket>,
    },
    /// The journal records a completed attempt. The enrolment configuration is ignored.
    Complete { progress: EnrolmentProgress },
}

/// The permission of a node without a ticket to bootstrap a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BootstrapPermission {
    NotGranted,
    /// The node may bootstrap, and has not been in a cluster yet.
    Granted,
    /// An operator has asked the node to restore a cluster, also one that has been in a cluster before.
    Restore,
    /// This host has been in a cluster before, as the file at this path records.
    UsedUp(PathBuf),
}

#[derive(Clone, Debug)]
pub(super) enum EnrolmentPlan {
    Wait(WaitCause),
    Bootstrap { progress: EnrolmentProgress, is_recorded: bool },
    Join { ticket: Option<Arc<GoldenTicket>>, progress: EnrolmentProgress, is_recorded: bool },
    Restart { progress: EnrolmentProgress },
}

/// Decides what to do.
///
/// | Journal | Ticket | Plan |
/// |---|---|---|
/// | empty | none, and bootstrap is permitted | bootstrap a cluster, once |
/// | empty | none, and a restore is requested | restore a cluster |
/// | empty | none | wait for a ticket, or for the permission to bootstrap |
/// | empty | a golden one | join by it |
/// | empty | a join ticket | wait until it is redeemed for a golden one |
/// | bootstrapping, or restoring | none | resume that |
/// | bootstrapping, or restoring | one | [`FailureReason::TicketDuringBootstrap`] |
/// | joining, member not started | the same | resume joining |
/// | joining, member not started | none | [`FailureReason::TicketMissing`] |
/// | joining, member started | the same, or none | resume joining |
/// | joining | another | [`FailureReason::TicketChanged`] |
/// | complete | any | restart |
///
/// Two tickets are the same if they are for the same node, even if they list other members: a ticket may be
/// reissued.
///
/// A node never switches from one way to another: that is how nodes end up alone in a cluster. For the same
/// reason it bootstraps only where permitted, and never after it has been in a cluster.
pub(super) fn decide_plan(found: InspectionResult) -> Result<EnrolmentPlan, FailureReason> {
    match found {
        InspectionResult::Fresh { ticket: None, enrolment_id, bootstrap } => Ok(match bootstrap {
            BootstrapPermission::Granted => EnrolmentPlan::Bootstrap {
                progress: EnrolmentProgress::new(enrolment_id, EnrolmentKind::Bootstrap),
                is_recorded: false,
            },
            BootstrapPermission::Restore => EnrolmentPlan::Bootstrap {
                progress: EnrolmentProgress::new(enrolment_id, EnrolmentKind::Restore),
                is_recorded: false,
            },
            BootstrapPermission::NotGranted => EnrolmentPlan::Wait(WaitCause::NoInstruction),
            // A second cluster would hide that the data of the first one is lost.
            BootstrapPermission::UsedUp(record) => EnrolmentPlan::Wait(WaitCause::DataLost { record }),
        }),
        // A ticket takes precedence over the permission to bootstrap.
        InspectionResult::Fresh { ticket: Some(EnrolmentTicket::Join(_)), .. } => {
            Ok(EnrolmentPlan::Wait(WaitCause::Redemption))
        }
        InspectionResult::Fresh { ticket: Some(EnrolmentTicket::Golden(ticket)), enrolment_id, .. } => {
            let progress = EnrolmentProgress::new(enrolment_id, EnrolmentKind::Join(ticket.digest()));
            Ok(EnrolmentPlan::Join { ticket: Some(ticket), progress, is_recorded: false })
        }
        InspectionResult::Complete { progress } => Ok(EnrolmentPlan::Restart { progress }),
        InspectionResult::InProgress { progress, ticket } => match (progress.enrolment_kind, ticket) {
            (EnrolmentKind::Bootstrap | EnrolmentKind::Restore, None) => {
                Ok(EnrolmentPlan::Bootstrap { progress, is_recorded: true })
            }
            (EnrolmentKind::Bootstrap | EnrolmentKind::Restore, Some(_)) => {
                Err(FailureReason::TicketDuringBootstrap)
            }
            (EnrolmentKind::Join(started_with), Some(EnrolmentTicket::Golden(ticket)))
                if ticket.digest() == started_with =>
            {
                Ok(EnrolmentPlan::Join { ticket: Some(ticket), progress, is_recorded: true })
            }
            (EnrolmentKind::Join(started_with), Some(ticket)) => {
                Err(FailureReason::TicketChanged { started_with, found: ticket.id() })
            }
            // Until the member has started, its credentials and its peers are in the ticket alone; then they
            // are in its own files.
            (EnrolmentKind::Join(started_with), None) => match progress.step_mode(EnrolmentStep::Consensus) {
                StepMode::FirstRun => Err(FailureReason::TicketMissing { started_with }),
                StepMode::Rerun => Ok(EnrolmentPlan::Join { ticket: None, progress, is_recorded: true }),
            },
        },
    }
}
