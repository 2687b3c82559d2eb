//! Shared fate: what a failure takes along, and what comes back.

use std::time::Duration;

use nodekeel_supervisor::testing::{Remote, settle};
use nodekeel_supervisor::{Cause, Change, Child, Context, Exit, Failure, State};
use tokio::time::Instant;

use crate::tree::{Alone, Tree, binary_tree, steady};

// reference case 1
#[tokio::test(start_paused = true)]
async fn children_of_a_root_that_is_done_run_on() {
    let tree = Tree::of(|ctx: Context| async move {
        ctx.run_group([Child::new("one", steady), Child::new("two", steady)])?;
        ctx.ready()?;
        ctx.done()?;
        Ok::<(), Failure>(())
    });
    settle().await;
    for (dn, state) in [("root", State::Done), ("root.one", State::Ready), ("root.two", State::Ready)] {
        assert_eq!(tree.state(dn), Some(state), "{dn}");
    }
}

// reference case 2, sequence a
#[tokio::test(start_paused = true)]
async fn a_failure_cancels_the_group_which_comes_back_before_the_one_that_failed() {
    let (one, two) = (Remote::default(), Remote::default());
    let tree = Tree::of_group(&[("one", &one), ("two", &two)]);
    one.ready().await;
    two.ready().await;
    two.fail("disk gone").await;
    let failed = Instant::now();
    assert_eq!(tree.recorder.until("root.one", State::Canceled).await.generation, 1);
    tree.recorder.until("root.one", State::New).await;
    assert!(failed.elapsed() < Duration::from_millis(1), "the cancelled one waits for no backoff");
    tree.recorder.until("root.two", State::New).await;
    let delay = failed.elapsed().as_millis();
    assert!((250..=760).contains(&delay), "the one that failed starts after its backoff: {delay} ms");
    let changes: Vec<Change> = tree
        .recorder
        .events()
        .into_iter()
        .filter(|event| &*event.dn == "root.one")
        .map(|event| event.change)
        .collect();
    assert!(
        changes.contains(&Change::Cancelling { cause: Cause::Sibling("root.two".into()) }),
        "{changes:?}"
    );
}

// reference case 3
#[tokio::test(start_paused = true)]
async fn a_failure_rebuilds_the_whole_subtree_of_its_sibling() {
    let two = Remote::default();
    let child = two.clone();
    let tree = Tree::of(move |ctx: Context| {
        let two = child.clone();
        async move {
            ctx.run_group([Child::new("one", binary_tree(5)), Child::new("two", two)])?;
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
    let (one, two) = (Remote::default(), Remote::default());
    let tree = Tree::of_group(&[("one", &one), ("two", &two)]);
    one.ready().await;
    two.panic("boom").await;
    let dead = tree.recorder.until("root.two", State::Dead).await;
    let exit = Exit::Panicked { message: "boom".into() };
    assert_eq!(dead.change, Change::Exited { state: State::Dead, exit });
    assert_eq!(tree.recorder.until("root.one", State::New).await.generation, 2);
    assert_eq!(tree.generation("root"), 1);
}

// reference case 5
#[tokio::test(start_paused = true)]
async fn two_trees_of_one_group_that_fail_on_many_levels_come_back() {
    fn failing(
        levels: u32,
        alone: Alone,
    ) -> Box<dyn Fn(Context) -> nodekeel_supervisor::RunFuture + Send + Sync> {
        let below: [Alone; 2] = Default::default();
        Box::new(move |ctx: Context| {
            let (below, alone) = (below.clone(), alone.clone());
            Box::pin(async move {
                let _inside = alone.enter();
                if levels > 0 {
                    ctx.run("a", failing(levels - 1, below[0].clone()))?;
                    ctx.run("b", failing(levels - 1, below[1].clone()))?;
                }
                ctx.ready()?;
                let patience = Duration::from_millis(200 * u64::from(levels + 1) + ctx.generation() * 37);
                tokio::select! {
                    () = tokio::time::sleep(patience) => Err("out of patience".into()),
                    cancelled = ctx.cancelled() => Err(cancelled.into()),
                }
            })
        })
    }
    let tree = Tree::of(|ctx: Context| async move {
        let trees = ["one", "two"].map(|name| Child::new(name, failing(4, Alone::default())));
        ctx.run_group(trees)?;
        steady(ctx).await
    });
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(tree.generation("root.one") > 3 && tree.generation("root.two") > 3);
    assert!(tree.supervisor.shutdown().await.stragglers.is_empty());
}

// reference case 8
#[tokio::test(start_paused = true)]
async fn a_child_that_is_done_leaves_its_root_at_work() {
    let child = Remote::default();
    let tree = Tree::of_group(&[("child", &child)]);
    child.ready().await;
    child.done().await;
    child.finish().await;
    tree.recorder.until("root.child", State::Done).await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!((tree.state("root"), tree.generation("root.child")), (Some(State::Ready), 1));
}

// reference case 10
#[tokio::test(start_paused = true)]
async fn done_counts_from_the_return_and_not_from_the_signal() {
    let alone = Alone::default();
    let outer = Remote::default();
    let (child, inner_alone) = (outer.clone(), alone.clone());
    let tree = Tree::of(move |ctx: Context| {
        let (outer, alone) = (child.clone(), inner_alone.clone());
        async move {
            let inner = move |ctx: Context| {
                let inside = alone.enter();
                async move {
                    ctx.ready()?;
                    ctx.done()?;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    drop(inside);
                    Ok::<(), Failure>(())
                }
            };
            ctx.run_group([Child::new("inner", inner), Child::new("outer", outer)])?;
            steady(ctx).await
        }
    });
    settle().await;
    outer.fail("in between").await;
    settle().await;
    assert_eq!(tree.state("root.inner"), Some(State::Ready), "it has not returned");
    // It returns cleanly, but cancelled: so it runs again, after the first run is over.
    assert_eq!(tree.recorder.until("root.inner", State::Done).await.generation, 1);
    assert_eq!(tree.recorder.until("root.inner", State::New).await.generation, 2);
}

// reference case 11, sequence e
#[tokio::test(start_paused = true)]
async fn a_done_sibling_of_a_failure_runs_again_with_its_children() {
    let sibling = Remote::default();
    let child = sibling.clone();
    let tree = Tree::of(move |ctx: Context| {
        let sibling = child.clone();
        async move {
            let done = |ctx: Context| async move {
                ctx.run("inner", steady)?;
                ctx.ready()?;
                ctx.done()?;
                Ok::<(), Failure>(())
            };
            ctx.run_group([Child::new("done", done), Child::new("sibling", sibling)])?;
            steady(ctx).await
        }
    });
    settle().await;
    assert_eq!(
        (tree.state("root.done"), tree.state("root.done.inner")),
        (Some(State::Done), Some(State::Ready))
    );
    let before = Instant::now();
    sibling.fail("gone").await;
    assert_eq!(tree.recorder.until("root.done", State::Done).await.generation, 1);
    assert_eq!(tree.recorder.until("root.done.inner", State::New).await.generation, 2);
    assert!(before.elapsed() < Duration::from_millis(5), "a done runnable waits for no backoff");
}

// sequence b
#[tokio::test(start_paused = true)]
async fn a_parent_that_failed_waits_for_its_last_descendant() {
    let stubborn = |ctx: Context| async move {
        ctx.ready()?;
        let cancelled = ctx.cancelled().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        Err::<(), Failure>(cancelled.into())
    };
    let parent = Remote::default();
    let told = parent.clone();
    let tree = Tree::of(move |ctx: Context| {
        let told = told.clone();
        async move {
            let parent = move |ctx: Context| {
                let told = told.clone();
                async move {
                    ctx.run("quick", steady)?;
                    ctx.run("slow", stubborn)?;
                    nodekeel_supervisor::Runnable::run(&told, ctx).await
                }
            };
            ctx.run("parent", parent)?;
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
    assert_eq!(waits[2], "root.parent.quick canceled: its parent to start again");
    assert_eq!(waits[3], "root.parent.slow ready: its runnable to return after the cancellation");
    tree.recorder.until("root.parent.slow", State::Canceled).await;
    assert_eq!(tree.recorder.until("root.parent", State::New).await.generation, 2);
    settle().await;
    assert_eq!(tree.generation("root.parent.slow"), 2);
}

// A group whose members fail one after the other must not skip their backoffs by cancelling each other.
#[tokio::test(start_paused = true)]
async fn a_member_in_its_backoff_is_not_woken_by_a_siblings_failure() {
    let failing = |_: Context| async { Err::<(), _>(Failure::new("never works")) };
    let tree = Tree::of(move |ctx: Context| async move {
        ctx.run_group([Child::new("one", failing), Child::new("two", failing)])?;
        steady(ctx).await
    });
    tokio::time::sleep(Duration::from_secs(60)).await;
    for dn in ["root.one", "root.two"] {
        let starts = tree.generation(dn);
        assert!((5..20).contains(&starts), "{dn} was started {starts} times in a minute");
    }
}
