//! Backoff, and who waits for what before a new start.

use std::time::Duration;

use nodekeel_supervisor::testing::{Remote, settle};
use nodekeel_supervisor::{Child, Context, Exit, Failure, Policy, Restart, State, WaitingFor};
use tokio::time::Instant;

use crate::tree::{Alone, Tree, steady};

// reference case 6
#[tokio::test(start_paused = true)]
async fn backoff_grows_with_each_failure_and_is_fast_again_after_the_stable_time() {
    let child = Remote::default();
    let tree = Tree::of_group(&[("child", &child)]);
    child.ready().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    for _ in 0..4 {
        child.fail("gone").await;
        tree.recorder.until("root.child", State::Dead).await;
    }
    let fifth = Instant::now();
    child.fail("gone").await;
    child.ready().await;
    assert!(fifth.elapsed() >= Duration::from_secs(1), "the fifth restart came after {:?}", fifth.elapsed());

    // Being ready alone clears nothing: what flaps backs off further.
    child.fail("flapping").await;
    let flapped = Instant::now();
    child.ready().await;
    assert!(
        flapped.elapsed() >= Duration::from_secs(1),
        "the flapping one came back after {:?}",
        flapped.elapsed()
    );

    tokio::time::sleep(Duration::from_secs(10)).await;
    child.fail("once").await;
    let once = Instant::now();
    child.ready().await;
    let restart = once.elapsed();
    assert!(restart > Duration::from_millis(100) && restart < Duration::from_secs(1), "{restart:?}");
}

// reference case 9, sequence c
#[tokio::test(start_paused = true)]
async fn only_the_parents_backoff_counts_when_both_have_failed() {
    let (inner, outer) = (Remote::default(), Remote::default());
    let (told_inner, told_outer) = (inner.clone(), outer.clone());
    let tree = Tree::of(move |ctx: Context| {
        let (inner, outer) = (told_inner.clone(), told_outer.clone());
        async move {
            let outer = move |ctx: Context| {
                let (inner, outer) = (inner.clone(), outer.clone());
                async move {
                    ctx.run("inner", inner)?;
                    nodekeel_supervisor::Runnable::run(&outer, ctx).await
                }
            };
            ctx.run("outer", outer)?;
            steady(ctx).await
        }
    });
    settle().await;
    inner.fail("gone").await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    outer.fail("gone").await;
    let failed = Instant::now();
    assert_eq!(
        tree.recorder.until("root.outer.inner", State::Canceled).await.generation,
        1,
        "it is never started"
    );
    tree.recorder.until("root.outer", State::New).await;
    assert!(failed.elapsed() < Duration::from_secs(1), "{:?}", failed.elapsed());
}

// sequence d
#[tokio::test(start_paused = true)]
async fn a_child_of_a_done_parent_restarts_alone() {
    let child = Remote::default();
    let told = child.clone();
    let tree = Tree::of(move |ctx: Context| {
        let told = told.clone();
        async move {
            ctx.run("child", told)?;
            ctx.ready()?;
            ctx.done()?;
            Ok::<(), Failure>(())
        }
    });
    child.ready().await;
    child.fail("gone").await;
    child.ready().await;
    assert_eq!(
        (tree.state("root"), tree.generation("root"), tree.generation("root.child")),
        (Some(State::Done), 1, 2)
    );
}

// sequence f
#[tokio::test(start_paused = true)]
async fn a_root_that_returns_without_done_takes_the_whole_tree_down_and_up() {
    let root = Remote::default();
    let told = root.clone();
    let alone = Alone::default();
    let tree = Tree::of(move |ctx: Context| {
        let (told, alone) = (told.clone(), alone.clone());
        async move {
            let _inside = alone.enter();
            ctx.run("child", steady)?;
            nodekeel_supervisor::Runnable::run(&told, ctx).await
        }
    });
    root.ready().await;
    root.finish().await;
    assert_eq!(tree.recorder.until("root.child", State::Canceled).await.generation, 1);
    assert_eq!(tree.recorder.until("root", State::New).await.generation, 2);
    assert_eq!(tree.recorder.until("root.child", State::Ready).await.generation, 2);
    let exits = &tree.supervisor.snapshot()[0].exits;
    assert_eq!(exits[0].exit, Exit::Returned);
}

// sequence g
#[tokio::test(start_paused = true)]
async fn what_waits_for_its_backoff_in_a_shutdown_is_never_started() {
    let child = Remote::default();
    let tree = Tree::of_group(&[("child", &child)]);
    child.fail("gone").await;
    tree.recorder.until("root.child", State::Dead).await;
    let began = Instant::now();
    assert!(tree.supervisor.shutdown().await.stragglers.is_empty());
    assert!(began.elapsed() < Duration::from_millis(5), "nobody waits for a backoff");
    tokio::time::sleep(Duration::from_secs(120)).await;
    use State::{Canceled, Dead, New, Waiting};
    assert_eq!(tree.recorder.states("root.child"), [New, Dead, Waiting, Canceled]);
}

// sequence h: here a child starts within the call that adds it, so there is none that has not been started; and a
// context that is cancelled takes no children.
#[tokio::test(start_paused = true)]
async fn a_child_of_a_runnable_that_fails_at_once_is_cancelled_before_its_parent_restarts() {
    let tree = Tree::of(|ctx: Context| async move {
        let hasty = |ctx: Context| async move {
            ctx.run("child", steady)?;
            Err::<(), _>(Failure::new("at once"))
        };
        ctx.run("hasty", hasty)?;
        steady(ctx).await
    });
    tree.recorder.until("root.hasty", State::Dead).await;
    assert_eq!(tree.recorder.until("root.hasty.child", State::Canceled).await.generation, 1);
    assert_eq!(tree.recorder.until("root.hasty", State::New).await.generation, 2);
}

#[tokio::test(start_paused = true)]
async fn the_record_of_failures_outlives_the_parents_restart() {
    let (child, parent) = (Remote::default(), Remote::default());
    let (told_child, told_parent) = (child.clone(), parent.clone());
    let tree = Tree::of(move |ctx: Context| {
        let (child, parent) = (told_child.clone(), told_parent.clone());
        async move {
            let parent = move |ctx: Context| {
                let (child, parent) = (child.clone(), parent.clone());
                async move {
                    ctx.run("child", child)?;
                    nodekeel_supervisor::Runnable::run(&parent, ctx).await
                }
            };
            ctx.run("parent", parent)?;
            steady(ctx).await
        }
    });
    for _ in 0..3 {
        child.fail("gone").await;
        tree.recorder.until("root.parent.child", State::Dead).await;
    }
    parent.fail("gone").await;
    tree.recorder.until("root.parent", State::New).await;
    settle().await;
    let status = tree
        .supervisor
        .snapshot()
        .into_iter()
        .find(|node| &*node.dn == "root.parent.child")
        .expect("it is back");
    assert_eq!((status.generation, status.failures, status.exits.len()), (4, 3, 3));
}

#[tokio::test(start_paused = true)]
async fn a_policy_says_which_ends_are_followed_by_a_start() {
    let cases = [
        (Restart::OnFailure, Ok(()), State::Done),
        (Restart::OnFailure, Err("failed"), State::Waiting),
        (Restart::Never, Ok(()), State::Done),
        (Restart::Never, Err("failed"), State::Dead),
        (Restart::Always, Ok(()), State::Waiting),
    ];
    for (restart, result, state) in cases {
        let tree = Tree::of(move |ctx: Context| async move {
            let policy = Policy { restart, ..Policy::default() };
            let once = move |_: Context| async move { result.map_err(Failure::new) };
            ctx.run_group([Child::new("once", once).policy(policy)])?;
            steady(ctx).await
        });
        settle().await;
        assert_eq!(tree.state("root.once"), Some(state), "{restart:?} after {result:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_status_says_when_the_backoff_ends() {
    let child = Remote::default();
    let tree = Tree::of_group(&[("child", &child)]);
    child.fail("gone").await;
    tree.recorder.until("root.child", State::Dead).await;
    let status = &tree.supervisor.snapshot()[1];
    let WaitingFor::Backoff(until) = status.waiting_for else { panic!("{status:?}") };
    let left = until.duration_since(status.since).expect("it lies ahead").as_millis();
    assert!((250..=750).contains(&left), "{left} ms");
}
