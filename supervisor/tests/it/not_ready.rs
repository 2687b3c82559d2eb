//! A runnable that can't do its work at present is not ready, and tells why.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_supervisor::{Context, Failure, RunnableChange, RunnableState, WaitReason};
use tokio::sync::watch;

use nodekeel_supervisor::testing::settle;

use crate::harness::TestTree;

/// A tree whose child is ready while the channel holds no reason.
fn tree_with_reasons(reasons: watch::Receiver<Option<&'static str>>) -> TestTree {
    TestTree::with_children(move |ctx| {
        let reasons = reasons.clone();
        ctx.run_child("child", move |ctx| report_reasons(ctx, reasons.clone()))
    })
}

async fn report_reasons(
    ctx: Context,
    mut reasons: watch::Receiver<Option<&'static str>>,
) -> Result<(), Failure> {
    loop {
        let reason = *reasons.borrow_and_update();
        match reason {
            Some(reason) => ctx.signal_not_ready(reason)?,
            None => ctx.signal_ready()?,
        }
        tokio::select! {
            canceled = ctx.canceled() => return Err(canceled.into()),
            changed = reasons.changed() => changed?,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_ready_runnable_that_can_not_work_is_not_ready_with_its_reason_until_it_is_ready_again() {
    let (reasons, watched) = watch::channel(Some("waits for a disk"));
    let tree = tree_with_reasons(watched);
    let state = || {
        let status = tree.supervisor.snapshot().swap_remove(1);
        (status.state, status.waiting_for, status.generation)
    };
    let not_ready = |reason: &str| (RunnableState::New, WaitReason::Condition(Arc::from(reason)), 1);
    settle().await;
    assert_eq!(state(), not_ready("waits for a disk"));
    for _ in 0..3 {
        let mut changes = tree.supervisor.watch_changes();
        changes.borrow_and_update();
        reasons.send_replace(None);
        settle().await;
        assert_eq!(state(), (RunnableState::Ready, WaitReason::Nothing, 1));
        for reason in ["has no leader", "waits for a majority"] {
            changes.borrow_and_update();
            reasons.send_replace(Some(reason));
            settle().await;
            assert_eq!(state(), not_ready(reason));
            assert!(changes.has_changed().expect("a tree"), "a new reason is not announced");
        }
    }
    let of_child = |change: &RunnableChange| match change {
        RunnableChange::NotReady { reason } => Some(Some(Arc::clone(reason))),
        RunnableChange::Ready => Some(None),
        _ => None,
    };
    let events = tree.recorder.events();
    let seen: Vec<_> = events
        .iter()
        .filter(|event| &*event.dn == "root.child")
        .filter_map(|event| of_child(&event.change))
        .collect();
    let lost = Some(Arc::from("has no leader"));
    assert_eq!(seen, [None, lost.clone(), None, lost.clone(), None, lost]);
}

#[tokio::test(start_paused = true)]
async fn a_runnable_that_was_ready_for_long_has_no_failures_when_it_stops_being_ready() {
    let (reasons, watched) = watch::channel(None);
    let tree = tree_with_reasons(watched);
    settle().await;
    tokio::time::advance(Duration::from_secs(24 * 3600)).await;
    reasons.send_replace(Some("has no leader"));
    settle().await;
    drop(reasons);
    settle().await;
    let status = tree.supervisor.snapshot().swap_remove(1);
    assert_eq!((status.state, status.failures), (RunnableState::Waiting, 1));
}

#[tokio::test(start_paused = true)]
async fn a_readiness_that_others_withhold_is_given_back_as_the_runnable_signals_it_then() {
    let (reasons, watched) = watch::channel(None);
    let tree = tree_with_reasons(watched);
    settle().await;
    let supervisor = &tree.supervisor;
    let withhold = |reason: Option<&str>| {
        supervisor.withhold_ready("root.child", reason.map(Arc::from)).expect("it is in the tree");
        let status = supervisor.snapshot().swap_remove(1);
        (status.state, status.waiting_for.to_string(), status.withheld.as_deref().map(str::to_owned))
    };
    let not_ready = |reason: &str, withheld: Option<&str>| {
        (RunnableState::New, reason.to_owned(), withheld.map(str::to_owned))
    };
    let ready = (RunnableState::Ready, "nothing".to_owned(), None);
    assert_eq!(withhold(Some("its API is gone")), not_ready("its API is gone", Some("its API is gone")));
    assert_eq!(withhold(Some("its disk is gone")), not_ready("its disk is gone", Some("its disk is gone")));
    assert_eq!(withhold(None), ready);
    // Its own reason comes first, and outlasts the other.
    withhold(Some("its API is gone"));
    reasons.send_replace(Some("has no leader"));
    settle().await;
    assert_eq!(withhold(Some("its API is gone")), not_ready("has no leader", None));
    assert_eq!(withhold(None), not_ready("has no leader", None));
    // A ready signal does not end what others withhold.
    withhold(Some("its API is gone"));
    reasons.send_replace(None);
    settle().await;
    assert_eq!(withhold(Some("its API is gone")), not_ready("its API is gone", Some("its API is gone")));
    // The next run starts without it.
    supervisor.restart_runnable("root.child").expect("it is in the tree");
    settle().await;
    assert_eq!(tree.latest_run("root.child"), (RunnableState::Ready, 2));
    supervisor.withhold_ready("root.absent", None).expect_err("it is not in the tree");
}

#[tokio::test(start_paused = true)]
async fn failures_count_from_the_first_of_them_however_many_exits_are_kept() {
    let tree = TestTree::with_children(|ctx| {
        ctx.run_child("child", |_: Context| async { Err::<(), _>(Failure::new("no")) })
    });
    settle().await;
    tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
    let status = tree.supervisor.snapshot().swap_remove(1);
    assert!(status.failures as usize > status.exits.len(), "{status:?}");
    let failing_since = status.failing_since.expect("it fails");
    let shown = status.since.duration_since(failing_since).expect("not before the first failure");
    assert!(shown > Duration::from_secs(2 * 3600 - 120), "{shown:?}");
}

#[tokio::test(start_paused = true)]
async fn code_beside_a_process_waits_for_the_readiness_of_its_own_runnable() {
    let tree = TestTree::with_children(|ctx| {
        ctx.run_child("child", |ctx: Context| async move {
            let signaled = async {
                settle().await;
                ctx.signal_ready()
            };
            let (waited, signaled) = tokio::join!(ctx.wait_ready(ctx.dn()), signaled);
            waited?;
            signaled?;
            ctx.until_canceled().await
        })
    });
    tree.recorder.wait_for_state("root.child", RunnableState::Ready).await;
}
