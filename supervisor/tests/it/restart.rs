//! Backoff, and what a restart waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};
use nodekeel_supervisor::{
    ChildPolicy, ChildSpec, Context, ExitReason, Failure, RestartPolicy, RunnableState, WaitReason,
};
use tokio::time::Instant;

use crate::harness::{SingleRun, TestTree, done, steady};

// reference case 6
#[tokio::test(start_paused = true)]
async fn backoff_grows_with_each_failure_and_resets_after_the_stable_time() {
    let child = RemoteRunnable::default();
    let tree = TestTree::with_group(&[("child", &child)]);
    child.signal_ready().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    for _ in 0..4 {
        child.fail("gone").await;
        tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    }
    let fifth = Instant::now();
    child.fail("gone").await;
    child.signal_ready().await;
    assert!(fifth.elapsed() >= Duration::from_secs(1), "the fifth restart came after {:?}", fifth.elapsed());

    // Readiness alone clears nothing: a flapping runnable backs off further.
    child.fail("flapping").await;
    let flapped = Instant::now();
    child.signal_ready().await;
    assert!(
        flapped.elapsed() >= Duration::from_secs(1),
        "the flapping one came back after {:?}",
        flapped.elapsed()
    );

    tokio::time::sleep(Duration::from_secs(10)).await;
    child.fail("once").await;
    let once = Instant::now();
    child.signal_ready().await;
    let restart = once.elapsed();
    assert!(restart > Duration::from_millis(100) && restart < Duration::from_secs(1), "{restart:?}");
}

#[tokio::test(start_paused = true)]
async fn failures_are_reported_until_the_runnable_has_been_ready_for_the_stable_time() {
    let child = RemoteRunnable::default();
    let tree = TestTree::with_group(&[("child", &child)]);
    let reported = || {
        let status = tree.supervisor.snapshot().remove(1);
        (status.failures, status.failures_clear_in)
    };
    child.signal_ready().await;
    assert_eq!(reported(), (0, None));
    child.fail("gone").await;
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    assert_eq!(reported(), (1, None));
    child.signal_ready().await;
    assert_eq!(reported(), (1, Some(Duration::from_secs(10))));
    tokio::time::sleep(Duration::from_millis(9_999)).await;
    assert_eq!(reported(), (1, Some(Duration::from_millis(1))));
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(reported(), (0, None));
}

/// It returns before its thread comes to them.
#[tokio::test(start_paused = true)]
async fn a_parent_that_fails_before_its_children_run_restarts_with_them() {
    let has_failed = Arc::new(AtomicBool::new(false));
    let tree = TestTree::with_root(move |ctx: Context| {
        let has_failed = Arc::clone(&has_failed);
        async move {
            ctx.run_child("a", steady)?;
            ctx.run_child("b", steady)?;
            if has_failed.swap(true, Ordering::SeqCst) {
                return steady(ctx).await;
            }
            Err(Failure::new("fails"))
        }
    });
    tokio::time::sleep(Duration::from_secs(10)).await;
    for child in ["root.a", "root.b"] {
        assert_eq!(tree.latest_run(child), (RunnableState::Ready, 2), "{child}");
    }
}

// reference case 9, sequence c
#[tokio::test(start_paused = true)]
async fn only_the_parents_backoff_counts_when_both_have_failed() {
    let (inner, outer) = (RemoteRunnable::default(), RemoteRunnable::default());
    let remote = inner.clone();
    let tree = TestTree::with_parent(&outer, move |ctx| ctx.run_child("inner", remote.clone()));
    settle().await;
    inner.fail("gone").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    outer.fail("gone").await;
    let failed = Instant::now();
    assert_eq!(
        tree.recorder.wait_for_state("root.parent.inner", RunnableState::Canceled).await.generation,
        1,
        "it is never started"
    );
    tree.recorder.wait_for_state("root.parent", RunnableState::New).await;
    assert!(failed.elapsed() < Duration::from_secs(1), "{:?}", failed.elapsed());
}

// sequence d
#[tokio::test(start_paused = true)]
async fn a_child_of_a_done_parent_restarts_alone() {
    let child = RemoteRunnable::default();
    let remote = child.clone();
    let tree = TestTree::with_root(move |ctx: Context| {
        let remote = remote.clone();
        async move {
            ctx.run_child("child", remote)?;
            done(ctx).await
        }
    });
    child.signal_ready().await;
    child.fail("gone").await;
    child.signal_ready().await;
    assert_eq!(
        (tree.state("root"), tree.generation("root"), tree.generation("root.child")),
        (Some(RunnableState::Done), 1, 2)
    );
}

// sequence f
#[tokio::test(start_paused = true)]
async fn a_root_that_returns_without_done_restarts_the_whole_tree() {
    let root = RemoteRunnable::default();
    let remote = root.clone();
    let alone = SingleRun::default();
    let tree = TestTree::with_root(move |ctx: Context| {
        let (remote, alone) = (remote.clone(), alone.clone());
        async move {
            let _inside = alone.enter();
            ctx.run_child("child", steady)?;
            nodekeel_supervisor::Runnable::run(&remote, ctx).await
        }
    });
    root.signal_ready().await;
    root.return_ok().await;
    assert_eq!(tree.recorder.wait_for_state("root.child", RunnableState::Canceled).await.generation, 1);
    assert_eq!(tree.recorder.wait_for_state("root", RunnableState::New).await.generation, 2);
    assert_eq!(tree.recorder.wait_for_state("root.child", RunnableState::Ready).await.generation, 2);
    let exits = &tree.supervisor.snapshot()[0].exits;
    assert_eq!(exits[0].exit, ExitReason::ReturnedWithoutDone);
}

// sequence g
#[tokio::test(start_paused = true)]
async fn a_runnable_in_backoff_is_not_started_during_a_shutdown() {
    let child = RemoteRunnable::default();
    let tree = TestTree::with_group(&[("child", &child)]);
    child.fail("gone").await;
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    let started = Instant::now();
    assert!(tree.supervisor.shutdown().await.stragglers.is_empty());
    assert!(started.elapsed() < Duration::from_millis(5), "a shutdown does not wait for a backoff");
    tokio::time::sleep(Duration::from_secs(120)).await;
    use RunnableState::{Canceled, Dead, New, Waiting};
    assert_eq!(tree.recorder.states_of("root.child"), [New, Dead, Waiting, Canceled]);
}

// sequence h: a child starts within the call that adds it, so every child has been started, and a canceled
// context accepts no children.
#[tokio::test(start_paused = true)]
async fn a_child_of_a_runnable_that_fails_at_once_is_canceled_before_its_parent_restarts() {
    let tree = TestTree::with_children(move |ctx| {
        let hasty = |ctx: Context| async move {
            ctx.run_child("child", steady)?;
            Err::<(), _>(Failure::new("at once"))
        };
        ctx.run_child("hasty", hasty)
    });
    tree.recorder.wait_for_state("root.hasty", RunnableState::Dead).await;
    assert_eq!(tree.recorder.wait_for_state("root.hasty.child", RunnableState::Canceled).await.generation, 1);
    assert_eq!(tree.recorder.wait_for_state("root.hasty", RunnableState::New).await.generation, 2);
}

#[tokio::test(start_paused = true)]
async fn the_failure_count_survives_the_parents_restart() {
    let (child, parent) = (RemoteRunnable::default(), RemoteRunnable::default());
    let remote = child.clone();
    let tree = TestTree::with_parent(&parent, move |ctx| ctx.run_child("child", remote.clone()));
    for _ in 0..3 {
        child.fail("gone").await;
        tree.recorder.wait_for_state("root.parent.child", RunnableState::Dead).await;
    }
    parent.fail("gone").await;
    tree.recorder.wait_for_state("root.parent", RunnableState::New).await;
    settle().await;
    let status = tree.status("root.parent.child").expect("the child was added again");
    assert_eq!((status.generation, status.failures, status.exits.len()), (4, 3, 3));
}

#[tokio::test(start_paused = true)]
async fn a_policy_decides_which_exits_are_followed_by_a_restart() {
    let cases = [
        (RestartPolicy::OnFailure, Ok(()), RunnableState::Done),
        (RestartPolicy::OnFailure, Err("failed"), RunnableState::Waiting),
        (RestartPolicy::Never, Ok(()), RunnableState::Done),
        (RestartPolicy::Never, Err("failed"), RunnableState::Dead),
        (RestartPolicy::Always, Ok(()), RunnableState::Waiting),
    ];
    for (restart, result, state) in cases {
        let tree = TestTree::with_children(move |ctx| {
            let policy = ChildPolicy { restart, ..ChildPolicy::default() };
            let once = move |_: Context| async move { result.map_err(Failure::new) };
            ctx.run_child_with(ChildSpec::new("once", once).policy(policy))
        });
        settle().await;
        assert_eq!(tree.state("root.once"), Some(state), "{restart:?} after {result:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_status_shows_when_the_backoff_ends() {
    let child = RemoteRunnable::default();
    let tree = TestTree::with_group(&[("child", &child)]);
    child.fail("gone").await;
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    let status = &tree.supervisor.snapshot()[1];
    let WaitReason::Backoff(until) = status.waiting_for else { panic!("{status:?}") };
    let left = until.duration_since(status.since).expect("the time is in the future").as_millis();
    assert!((250..=750).contains(&left), "{left} ms");
}
