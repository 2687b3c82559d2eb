//! The transition tables, row by row.

use std::sync::Arc;

use super::failure::{EnrolmentActivity, FailureReason, StepError};
use super::fsm::{ActionId, EnrolmentAction, EnrolmentFsm, EnrolmentInput, RejectedInput, StepOutput};
use super::plan::{BootstrapPermission, InspectionResult};
use super::progress::{EnrolmentId, EnrolmentKind, EnrolmentProgress};
use super::state::{
    CurrentActivity, EnrolmentPhase, EnrolmentRun, EnrolmentState, NodeMembership, WaitCause,
};

fn state(kind: EnrolmentPhase) -> EnrolmentState {
    let node_id = || format!("n-{}", "0".repeat(32)).parse().expect("a valid name");
    let enrolment_id = EnrolmentId([1; 16]);
    let progress = EnrolmentProgress::new(enrolment_id, EnrolmentKind::Bootstrap);
    match kind {
        EnrolmentPhase::New => EnrolmentState::New,
        EnrolmentPhase::Waiting => EnrolmentState::Waiting(WaitCause::NoInstruction),
        EnrolmentPhase::CreatingCluster => {
            EnrolmentState::CreatingCluster(EnrolmentRun::new(progress, CurrentActivity::RecordingDecision))
        }
        EnrolmentPhase::Joining => EnrolmentState::Joining {
            ticket: None,
            run: EnrolmentRun::new(progress, CurrentActivity::RecordingDecision),
        },
        EnrolmentPhase::Restarting => {
            EnrolmentState::Restarting(EnrolmentRun::new(progress, CurrentActivity::RecordingDecision))
        }
        EnrolmentPhase::Running => EnrolmentState::Running(NodeMembership {
            node_id: node_id(),
            cluster_id: crate::node::ClusterId::from_bytes([1; 16]),
            enrolment_kind: EnrolmentKind::Bootstrap,
            enrolment_id,
        }),
        EnrolmentPhase::Failed => {
            EnrolmentState::Failed(FailureReason::Stopped { during: EnrolmentActivity::Inspecting })
        }
    }
}

/// A state machine in that state.
fn fsm(kind: EnrolmentPhase) -> EnrolmentFsm {
    let mut fsm = EnrolmentFsm::new();
    match kind {
        EnrolmentPhase::New => {}
        EnrolmentPhase::Waiting
        | EnrolmentPhase::CreatingCluster
        | EnrolmentPhase::Joining
        | EnrolmentPhase::Restarting
        | EnrolmentPhase::Failed => {
            fsm.enter_state(state(kind)).expect("a transition from New");
        }
        EnrolmentPhase::Running => {
            fsm.enter_state(state(EnrolmentPhase::CreatingCluster)).expect("a transition from New");
            fsm.enter_state(state(kind)).expect("a transition to Running");
        }
    }
    fsm
}

#[test]
fn only_transitions_in_the_table_are_taken_and_a_rejected_one_changes_nothing() {
    // The table of the reference, with `Restarting`, and with rejections where the original failed the node.
    let allowed = [
        (EnrolmentPhase::New, EnrolmentPhase::Waiting),
        (EnrolmentPhase::Waiting, EnrolmentPhase::CreatingCluster),
        (EnrolmentPhase::Waiting, EnrolmentPhase::Joining),
        (EnrolmentPhase::Waiting, EnrolmentPhase::Restarting),
        (EnrolmentPhase::Waiting, EnrolmentPhase::Failed),
        (EnrolmentPhase::New, EnrolmentPhase::CreatingCluster),
        (EnrolmentPhase::New, EnrolmentPhase::Joining),
        (EnrolmentPhase::New, EnrolmentPhase::Restarting),
        (EnrolmentPhase::New, EnrolmentPhase::Failed),
        (EnrolmentPhase::CreatingCluster, EnrolmentPhase::Running),
        (EnrolmentPhase::CreatingCluster, EnrolmentPhase::Failed),
        (EnrolmentPhase::Joining, EnrolmentPhase::Running),
        (EnrolmentPhase::Joining, EnrolmentPhase::Failed),
        (EnrolmentPhase::Restarting, EnrolmentPhase::Running),
        (EnrolmentPhase::Restarting, EnrolmentPhase::Failed),
    ];
    for from in EnrolmentPhase::ALL {
        for to in EnrolmentPhase::ALL {
            let mut fsm = fsm(from);
            let history = fsm.phase_history().to_vec();
            let entered = fsm.enter_state(state(to));
            if allowed.contains(&(from, to)) {
                assert_eq!((entered, fsm.current_state().phase()), (Ok(()), to), "{from} → {to}");
            } else {
                assert_eq!(entered, Err(RejectedInput::Transition { from, to }));
                assert_eq!(fsm.current_state().phase(), from, "{from} → {to} was rejected and took place");
                assert_eq!(fsm.phase_history(), history);
            }
        }
    }
}

#[test]
fn every_state_handles_every_input_and_final_states_reject_all() {
    let inputs = || {
        let stale = ActionId(77);
        [
            EnrolmentInput::Start,
            EnrolmentInput::Inspected(stale, fresh(BootstrapPermission::Granted)),
            EnrolmentInput::StepDone(stale, StepOutput::Done),
            EnrolmentInput::Recorded(stale),
            EnrolmentInput::ActionFailed(stale, Arc::new(StepError::AddressWatchClosed)),
            EnrolmentInput::DeadlineExceeded(None),
            EnrolmentInput::Stop,
        ]
    };
    for kind in EnrolmentPhase::ALL {
        for input in inputs() {
            let mut fsm = fsm(kind);
            let ends = matches!(input, EnrolmentInput::DeadlineExceeded(_) | EnrolmentInput::Stop)
                && !kind.is_final();
            let begins = matches!(input, EnrolmentInput::Start) && kind == EnrolmentPhase::New;
            let taken = fsm.apply_input(input.clone());
            assert_eq!(taken.is_ok(), ends || begins, "{kind}: {input:?} gave {taken:?}");
            let after = if ends { EnrolmentPhase::Failed } else { kind };
            assert_eq!(fsm.current_state().phase(), after, "{kind}: {input:?}");
            if kind.is_final() {
                assert_eq!(taken, Err(RejectedInput::Final { state: kind }));
            }
        }
    }
}

#[test]
fn a_failed_action_fails_the_run_with_its_activity() {
    let mut fsm = EnrolmentFsm::new();
    let action = fsm.apply_input(EnrolmentInput::Start).expect("accepted").expect("an action");
    let EnrolmentAction::Inspect(action_id) = action else { panic!("the first action is the inspection") };
    let error = Arc::new(StepError::AddressWatchClosed);
    assert_eq!(fsm.apply_input(EnrolmentInput::ActionFailed(action_id, error)), Ok(None));
    let EnrolmentState::Failed(FailureReason::ActionFailed { during: EnrolmentActivity::Inspecting, .. }) =
        fsm.current_state()
    else {
        panic!("{:?}", fsm.current_state())
    };
}

#[test]
fn a_second_start_is_rejected() {
    let mut fsm = EnrolmentFsm::new();
    fsm.apply_input(EnrolmentInput::Start).expect("the first start");
    assert_eq!(
        fsm.apply_input(EnrolmentInput::Start),
        Err(RejectedInput::Unexpected { state: EnrolmentPhase::New })
    );
}

fn fresh(bootstrap: BootstrapPermission) -> InspectionResult {
    InspectionResult::Fresh { ticket: None, enrolment_id: EnrolmentId([0; 16]), bootstrap }
}

#[test]
fn a_node_without_a_ticket_bootstraps_only_where_permitted_and_was_in_no_cluster() {
    let record = std::path::PathBuf::from("/efi/bootstrapped");
    let lost = WaitCause::DataLost { record: record.clone() };
    for (permission, cause) in [
        (BootstrapPermission::NotGranted, WaitCause::NoInstruction),
        (BootstrapPermission::UsedUp(record), lost.clone()),
    ] {
        let mut fsm = EnrolmentFsm::new();
        let mut action = fsm.apply_input(EnrolmentInput::Start).expect("accepted").expect("an action");
        // It waits as long as it finds the same, and tells the present cause.
        for found in [permission, BootstrapPermission::UsedUp("/efi/bootstrapped".into())] {
            let (EnrolmentAction::Inspect(id) | EnrolmentAction::AwaitInstruction(id)) = action else {
                panic!("{action:?}")
            };
            let input = EnrolmentInput::Inspected(id, fresh(found));
            action = fsm.apply_input(input).expect("accepted").expect("an action");
            assert!(matches!(action, EnrolmentAction::AwaitInstruction(_)), "{action:?}");
            let EnrolmentState::Waiting(present) = fsm.current_state() else { panic!("{fsm:?}") };
            assert!([&cause, &lost].contains(&present), "{present:?}");
        }
        assert_eq!(fsm.phase_history(), [EnrolmentPhase::New, EnrolmentPhase::Waiting]);
        let EnrolmentAction::AwaitInstruction(id) = action else { panic!("{action:?}") };
        let told = EnrolmentInput::Inspected(id, fresh(BootstrapPermission::Granted));
        let action = fsm.apply_input(told).expect("accepted");
        assert!(matches!(action, Some(EnrolmentAction::Record(..))), "{action:?}");
        assert_eq!(fsm.current_state().phase(), EnrolmentPhase::CreatingCluster);
    }
}
