//! The tables, row by row.

use std::sync::Arc;

use super::core::{Action, Input, Machine, Outcome, Rejected, Sequence};
use super::decide::Found;
use super::reason::{Activity, Reason, StepError};
use super::state::{Doing, Kind, Membership, State, Work};
use super::step::{EnrolmentId, Flow, Progress};

fn state(kind: Kind) -> State {
    let node = || format!("n-{}", "0".repeat(32)).parse().expect("a name");
    let enrolment = EnrolmentId([1; 16]);
    let progress = Progress::new(enrolment, Flow::Create);
    match kind {
        Kind::New => State::New,
        Kind::CreatingCluster => State::CreatingCluster(Work::new(progress, Doing::Deciding)),
        Kind::Joining => State::Joining { ticket: None, work: Work::new(progress, Doing::Deciding) },
        Kind::Restarting => State::Restarting(Work::new(progress, Doing::Deciding)),
        Kind::Running => State::Running(Membership {
            node: node(),
            cluster: crate::node::ClusterId::new([1; 16]),
            flow: Flow::Create,
            enrolment,
        }),
        Kind::Failed => State::Failed(Reason::Stopped { during: Activity::Examining }),
    }
}

/// A machine in that state.
fn machine(kind: Kind) -> Machine {
    let mut machine = Machine::new();
    match kind {
        Kind::New => {}
        Kind::CreatingCluster | Kind::Joining | Kind::Restarting | Kind::Failed => {
            machine.enter(state(kind)).expect("it follows New");
        }
        Kind::Running => {
            machine.enter(state(Kind::CreatingCluster)).expect("it follows New");
            machine.enter(state(kind)).expect("it follows");
        }
    }
    machine
}

#[test]
fn each_pair_of_states_is_as_the_table_has_it_and_what_is_refused_changes_nothing() {
    // The table of the reference, with `Restarting` and with refusals where the original failed the node.
    let allowed = [
        (Kind::New, Kind::CreatingCluster),
        (Kind::New, Kind::Joining),
        (Kind::New, Kind::Restarting),
        (Kind::New, Kind::Failed),
        (Kind::CreatingCluster, Kind::Running),
        (Kind::CreatingCluster, Kind::Failed),
        (Kind::Joining, Kind::Running),
        (Kind::Joining, Kind::Failed),
        (Kind::Restarting, Kind::Running),
        (Kind::Restarting, Kind::Failed),
    ];
    for from in Kind::ALL {
        for to in Kind::ALL {
            let mut machine = machine(from);
            let history = machine.history().to_vec();
            let entered = machine.enter(state(to));
            if allowed.contains(&(from, to)) {
                assert_eq!((entered, machine.state().kind()), (Ok(()), to), "{from} → {to}");
            } else {
                assert_eq!(entered, Err(Rejected::Transition { from, to }));
                assert_eq!(machine.state().kind(), from, "{from} → {to} was refused and happened");
                assert_eq!(machine.history(), history);
            }
        }
    }
}

#[test]
fn every_input_is_answered_in_every_state_and_final_ones_take_none() {
    let inputs = || {
        let stale = Sequence(77);
        [
            Input::Begin,
            Input::Examined(stale, Found::Fresh { ticket: None, enrolment: EnrolmentId([0; 16]) }),
            Input::Done(stale, Outcome::Network),
            Input::Recorded(stale),
            Input::Failed(stale, Arc::new(StepError::NoNetwork)),
            Input::Deadline(None),
            Input::Stop,
        ]
    };
    for kind in Kind::ALL {
        for input in inputs() {
            let mut machine = machine(kind);
            let ends = matches!(input, Input::Deadline(_) | Input::Stop) && !kind.is_final();
            let begins = matches!(input, Input::Begin) && kind == Kind::New;
            let taken = machine.apply(input.clone());
            assert_eq!(taken.is_ok(), ends || begins, "{kind}: {input:?} gave {taken:?}");
            let after = if ends { Kind::Failed } else { kind };
            assert_eq!(machine.state().kind(), after, "{kind}: {input:?}");
            if kind.is_final() {
                assert_eq!(taken, Err(Rejected::Final { state: kind }));
            }
        }
    }
}

#[test]
fn a_handlers_error_is_failed_with_what_it_was_doing() {
    let mut machine = Machine::new();
    let action = machine.apply(Input::Begin).expect("taken").expect("there is something to do");
    let Action::Examine(sequence) = action else { panic!("it looks first") };
    let error = Arc::new(StepError::NoNetwork);
    assert_eq!(machine.apply(Input::Failed(sequence, error)), Ok(None));
    let State::Failed(Reason::Step { during: Activity::Examining, .. }) = machine.state() else {
        panic!("{:?}", machine.state())
    };
}

#[test]
fn a_second_begin_is_refused() {
    let mut machine = Machine::new();
    machine.apply(Input::Begin).expect("the first");
    assert_eq!(machine.apply(Input::Begin), Err(Rejected::Unexpected { state: Kind::New }));
}
