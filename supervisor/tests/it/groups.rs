//! Groups: what a failure cancels, and what restarts.

use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};
use nodekeel_supervisor::{
    CancelCause, ChildSpec, Context, ExitReason, Failure, RunnableChange, RunnableState,
};
use tokio::time::Instant;

use crate::tree::{SingleRun, TestTree, binary_tree, steady};

// reference case 1
#[tokio::test(start_paused = true)]
async fn children_of_a_done_root_keep_running() {
    let tree = TestTree::with_root(|ctx: Context| async move {
        ctx.run_group([ChildSpec::new("one", steady), ChildSpec::new("two", steady)])?;
        ctx.signal_ready()?;
        ctx.signal_done()?;
        Ok::<(), Failure>(())
    });
    settle().await;
    for (dn, state) in [
        ("root", RunnableState::Done),
        ("root.one", RunnableState::Ready),
        ("root.two", RunnableState::Ready),
    ] {
        assert_eq!(tree.state(dn), Some(state), "{dn}");
    }
}

// reference case 2, sequence a
#[tokio::test(start_paused = true)]
async fn a_failure_cancels_the_group_which_restarts_before_the_failed_member() {
    let (one, two) = (RemoteRunnable::default(), RemoteRunnable::default());
    let tree = TestTree::with_group(&[("one", &one), ("two", &two)]);
    one.signal_ready().await;
    two.signal_ready().await;
    two.fail("disk gone").await;
    let failed = Instant::now();
    assert_eq!(tree.recorder.wait_for_state("root.one", RunnableState::Canceled).await.generation, 1);
    tree.recorder.wait_for_state("root.one", RunnableState::New).await;
    assert!(failed.elapsed() < Duration::from_millis(1), "the canceled member does not wait for a backoff");
    tree.recorder.wait_for_state("root.two", RunnableState::New).await;
    let delay = failed.elapsed().as_millis();
    assert!((250..=760).contains(&delay), "the failed member starts after its backoff: {delay} ms");
    let changes: Vec<RunnableChange> = tree
        .recorder
        .events()
        .into_iter()
        .filter(|event| &*event.dn == "root.one")
        .map(|event| event.change)
        .collect();
    assert!(
        changes.contains(&RunnableChange::Canceling { cause: CancelCause::Sibling("root.two".into()) }),
        "{changes:?}"
    );
}

// reference case 3
#[tokio::test(start_paused = true)]
async fn a_failure_rebuilds_the_whole_subtree_of_its_sibling() {
    let two = RemoteRunnable::default();
    let child = two.clone();
    let tree = TestTree::with_root(move |ctx: Context| {
        let two = child.clone();
        async move {
            ctx.run_group([ChildSpec::new("one", binary_tree(5)), ChildSpec::new("two", two)])?;
            steady(ctx).await
        }
    });
    settle().await;
    let whole = tree.supervisor.snapshot().len();
    assert_eq!(whole, 2 + 63);
    two.fail("gone").await;
    settle().await;
    assert_eq!(tree.supervisor.snapshot().len(), whole);
    assert_eq!(tree.generation("root.one.a.b.a.b.a"), 2);
}

// reference case 4
#[tokio::test(start_paused = true)]
async fn a_panic_is_a_failure_of_its_runnable_alone() {
    let (one, two) = (RemoteRunnable::default(), RemoteRunnable::default());
    let tree = TestTree::with_group(&[("one", &one), ("two", &two)]);
    one.signal_ready().await;
    two.panic("boom").await;
    let dead = tree.recorder.wait_for_state("root.two", RunnableState::Dead).await;
    let exit = ExitReason::Panicked { message: "boom".into() };
    assert_eq!(dead.change, RunnableChange::Exited { state: RunnableState::Dead, exit });
    assert_eq!(tree.recorder.wait_for_state("root.one", RunnableState::New).await.generation, 2);
    assert_eq!(tree.generation("root"), 1);
}

// reference case 5
#[tokio::test(start_paused = true)]
async fn two_subtrees_of_one_group_that_fail_on_many_levels_recover() {
    fn failing(
        levels: u32,
        alone: SingleRun,
    ) -> Box<dyn Fn(Context) -> nodekeel_supervisor::RunFuture + Send + Sync> {
        let below: [SingleRun; 2] = Default::default();
        Box::new(move |ctx: Context| {
            let (below, alone) = (below.clone(), alone.clone());
            Box::pin(async move {
                let _inside = alone.enter();
                if levels > 0 {
                    ctx.run_child("a", failing(levels - 1, below[0].clone()))?;
                    ctx.run_child("b", failing(levels - 1, below[1].clone()))?;
                }
                ctx.signal_ready()?;
                let patience = Duration::from_millis(200 * u64::from(levels + 1) + ctx.generation() * 37);
                tokio::select! {
                    () = tokio::time::sleep(patience) => Err("out of patience".into()),
                    cancelled = ctx.canceled() => Err(cancelled.into()),
                }
            })
        })
    }
    let tree = TestTree::with_root(|ctx: Context| async move {
        let trees = ["one", "two"].map(|name| ChildSpec::new(name, failing(4, SingleRun::default())));
        ctx.run_group(trees)?;
        steady(ctx).await
    });
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(tree.generation("root.one") > 3 && tree.generation("root.two") > 3);
    assert!(tree.supervisor.shutdown().await.stragglers.is_empty());
}

// reference case 8
#[tokio::test(start_paused = true)]
async fn a_done_child_leaves_its_root_running() {
    let child = RemoteRunnable::default();
    let tree = TestTree::with_group(&[("child", &child)]);
    child.signal_ready().await;
    child.signal_done().await;
    child.return_ok().await;
    tree.recorder.wait_for_state("root.child", RunnableState::Done).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((tree.state("root"), tree.generation("root.child")), (Some(RunnableState::Ready), 1));
}

// reference case 10
#[tokio::test(start_paused = true)]
async fn done_counts_from_the_return_and_not_from_the_signal() {
    let alone = SingleRun::default();
    let outer = RemoteRunnable::default();
    let (child, inner_alone) = (outer.clone(), alone.clone());
    let tree = TestTree::with_root(move |ctx: Context| {
        let (outer, alone) = (child.clone(), inner_alone.clone());
        async move {
            let inner = move |ctx: Context| {
                let inside = alone.enter();
                async move {
                    ctx.signal_ready()?;
                    ctx.signal_done()?;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    drop(inside);
                    Ok::<(), Failure>(())
                }
            };
            ctx.run_group([ChildSpec::new("inner", inner), ChildSpec::new("outer", outer)])?;
            steady(ctx).await
        }
    });
    settle().await;
    outer.fail("in between").await;
    settle().await;
    assert_eq!(tree.state("root.inner"), Some(RunnableState::Ready), "it has not returned");
    // It returns successfully, but canceled, so it runs again after the first run has ended.
    assert_eq!(tree.recorder.wait_for_state("root.inner", RunnableState::Done).await.generation, 1);
    assert_eq!(tree.recorder.wait_for_state("root.inner", RunnableState::New).await.generation, 2);
}

// reference case 11, sequence e
#[tokio::test(start_paused = true)]
async fn a_done_sibling_of_a_failure_restarts_with_its_children() {
    let sibling = RemoteRunnable::default();
    let child = sibling.clone();
    let tree = TestTree::with_root(move |ctx: Context| {
        let sibling = child.clone();
        async move {
            let done = |ctx: Context| async move {
                ctx.run_child("inner", steady)?;
                ctx.signal_ready()?;
                ctx.signal_done()?;
                Ok::<(), Failure>(())
            };
            ctx.run_group([ChildSpec::new("done", done), ChildSpec::new("sibling", sibling)])?;
            steady(ctx).await
        }
    });
    settle().await;
    assert_eq!(
        (tree.state("root.done"), tree.state("root.done.inner")),
        (Some(RunnableState::Done), Some(RunnableState::Ready))
    );
    let before = Instant::now();
    sibling.fail("gone").await;
    assert_eq!(tree.recorder.wait_for_state("root.done", RunnableState::Done).await.generation, 1);
    assert_eq!(tree.recorder.wait_for_state("root.done.inner", RunnableState::New).await.generation, 2);
    assert!(before.elapsed() < Duration::from_millis(5), "a done runnable does not wait for a backoff");
}

// sequence b
#[tokio::test(start_paused = true)]
async fn a_failed_parent_waits_for_its_last_descendant() {
    let stubborn = |ctx: Context| async move {
        ctx.signal_ready()?;
        let cancelled = ctx.canceled().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        Err::<(), Failure>(cancelled.into())
    };
    let parent = RemoteRunnable::default();
    let remote = parent.clone();
    let tree = TestTree::with_root(move |ctx: Context| {
        let remote = remote.clone();
        async move {
            let parent = move |ctx: Context| {
                let remote = remote.clone();
                async move {
                    ctx.run_child("quick", steady)?;
                    ctx.run_child("slow", stubborn)?;
                    nodekeel_supervisor::Runnable::run(&remote, ctx).await
                }
            };
            ctx.run_child("parent", parent)?;
            steady(ctx).await
        }
    });
    settle().await;
    parent.fail("gone").await;
    settle().await;
    let snapshot = tree.supervisor.snapshot();
    let waits: Vec<String> =
        snapshot.iter().map(|node| format!("{} {}: {}", node.dn, node.state, node.waiting_for)).collect();
    assert_eq!(waits[1], "root.parent dead: descendants to exit: root.parent.slow");
    assert_eq!(waits[2], "root.parent.quick canceled: its parent to restart");
    assert_eq!(waits[3], "root.parent.slow ready: its runnable to return after the cancellation");
    tree.recorder.wait_for_state("root.parent.slow", RunnableState::Canceled).await;
    assert_eq!(tree.recorder.wait_for_state("root.parent", RunnableState::New).await.generation, 2);
    settle().await;
    assert_eq!(tree.generation("root.parent.slow"), 2);
}

// A group whose members fail one after the other must not skip its backoffs by canceling each other.
#[tokio::test(start_paused = true)]
async fn a_member_in_its_backoff_is_not_woken_by_a_siblings_failure() {
    let failing = |_: Context| async { Err::<(), _>(Failure::new("never works")) };
    let tree = TestTree::with_root(move |ctx: Context| async move {
        ctx.run_group([ChildSpec::new("one", failing), ChildSpec::new("two", failing)])?;
        steady(ctx).await
    });
    tokio::time::sleep(Duration::from_secs(60)).await;
    for dn in ["root.one", "root.two"] {
        let starts = tree.generation(dn);
        assert!((5..20).contains(&starts), "{dn} was started {starts} times in a minute");
    }
}
