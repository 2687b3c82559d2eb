//! Groups: what a failure cancels, and what restarts.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};
use nodekeel_supervisor::{
    Backoff, CancelCause, ChildPolicy, ChildSpec, Context, ExitReason, Failure, GroupPolicy, Removal,
    RestartLimit, RestartLimitAction, RunnableChange, RunnableState, Supervisor,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::harness::{SingleRun, TestTree, binary_tree, done, slow_to_stop, steady};

// reference case 1
#[tokio::test(start_paused = true)]
async fn children_of_a_done_root_keep_running() {
    let tree = TestTree::with_root(|ctx: Context| async move {
        ctx.run_group([ChildSpec::new("one", steady), ChildSpec::new("two", steady)])?;
        done(ctx).await
    });
    settle().await;
    let states = ["root", "root.one", "root.two"].map(|dn| tree.latest_run(dn).0);
    assert_eq!(states, [RunnableState::Done, RunnableState::Ready, RunnableState::Ready]);
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
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_group([ChildSpec::new("one", binary_tree(5)), ChildSpec::new("two", child.clone())])
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
                    canceled = ctx.canceled() => Err(canceled.into()),
                }
            })
        })
    }
    let tree = TestTree::with_children(move |ctx| {
        let trees = ["one", "two"].map(|name| ChildSpec::new(name, failing(4, SingleRun::default())));
        ctx.run_group(trees)
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
    let tree = TestTree::with_children(move |ctx| {
        let (outer, alone) = (child.clone(), inner_alone.clone());
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
        ctx.run_group([ChildSpec::new("inner", inner), ChildSpec::new("outer", outer)])
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
    let tree = TestTree::with_children(move |ctx| {
        let done = |ctx: Context| async move {
            ctx.run_child("inner", steady)?;
            done(ctx).await
        };
        ctx.run_group([ChildSpec::new("done", done), ChildSpec::new("sibling", child.clone())])
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
    let parent = RemoteRunnable::default();
    let tree = TestTree::with_parent(&parent, move |ctx| {
        ctx.run_child("quick", steady)?;
        ctx.run_child("slow", slow_to_stop(Duration::from_secs(5)))
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
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_group([ChildSpec::new("one", failing), ChildSpec::new("two", failing)])
    });
    tokio::time::sleep(Duration::from_secs(60)).await;
    for dn in ["root.one", "root.two"] {
        let starts = tree.generation(dn);
        assert!((5..20).contains(&starts), "{dn} was started {starts} times in a minute");
    }
}

/// A group of which every member fails once, at one instant. Returns how often its members were started.
async fn starts_of_a_group_that_fails_at_one_instant(policy: GroupPolicy, members: usize) -> usize {
    let (starts, fail) = (Arc::new(AtomicUsize::new(0)), watch::Sender::new(false));
    let (counted, failing) = (Arc::clone(&starts), fail.clone());
    let no_delay = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
    let supervisor = Supervisor::builder().default_policy(no_delay).start(move |ctx: Context| {
        let member = {
            let (starts, fail) = (Arc::clone(&counted), failing.clone());
            move |ctx: Context| {
                starts.fetch_add(1, Ordering::Relaxed);
                let mut fail = fail.subscribe();
                async move {
                    ctx.signal_ready()?;
                    if ctx.generation() == 1 {
                        fail.wait_for(|fail| *fail).await?;
                        return Err(Failure::new("failed"));
                    }
                    ctx.until_canceled().await
                }
            }
        };
        async move {
            let members = (0..members).map(|number| ChildSpec::new(format!("m{number}"), member.clone()));
            ctx.run_group_with(policy, members)?;
            steady(ctx).await
        }
    });
    settle().await;
    fail.send_replace(true);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let snapshot = supervisor.snapshot();
    assert!(snapshot.iter().skip(1).all(|node| node.state == RunnableState::Ready && node.generation == 2));
    starts.load(Ordering::Relaxed)
}

#[tokio::test(start_paused = true)]
async fn members_that_fail_at_one_instant_are_restarted_once() {
    for policy in [GroupPolicy::OneForOne, GroupPolicy::OneForAll, GroupPolicy::RestForOne] {
        assert_eq!(starts_of_a_group_that_fails_at_one_instant(policy, 1000).await, 2000, "{policy:?}");
    }
    assert_eq!(starts_of_a_group_that_fails_at_one_instant(GroupPolicy::OneForAll, 4000).await, 8000);
}

#[tokio::test(start_paused = true)]
async fn a_policy_decides_which_members_end_with_a_failed_one() {
    for (policy, expected) in [
        (GroupPolicy::OneForOne, [1, 2, 1]),
        (GroupPolicy::OneForAll, [2, 2, 2]),
        (GroupPolicy::RestForOne, [1, 2, 2]),
    ] {
        let failing = RemoteRunnable::default();
        let child = failing.clone();
        let tree = TestTree::with_children(move |ctx| {
            let members = [
                ChildSpec::new("before", steady),
                ChildSpec::new("failing", child.clone()),
                ChildSpec::new("after", steady),
            ];
            ctx.run_group_with(policy, members)
        });
        failing.signal_ready().await;
        failing.fail("gone").await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        failing.signal_ready().await;
        let generations = ["root.before", "root.failing", "root.after"].map(|dn| tree.generation(dn));
        assert_eq!(generations, expected, "{policy:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn no_member_starts_before_all_that_end_with_it_have_ended() {
    let failing = RemoteRunnable::default();
    let child = failing.clone();
    let tree = TestTree::with_children(move |ctx| {
        let no_delay = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
        ctx.run_group([
            ChildSpec::new("quick", steady),
            ChildSpec::new("slow", slow_to_stop(Duration::from_secs(20))),
            ChildSpec::new("failing", child.clone()).policy(no_delay),
        ])
    });
    settle().await;
    failing.fail("gone").await;
    settle().await;
    for index in [1, 3] {
        let status = &tree.supervisor.snapshot()[index];
        let waiting_for = status.waiting_for.to_string();
        assert_eq!(waiting_for, "members of its group to exit: root.slow", "{}", status.dn);
    }
    // An operator's start waits as well.
    tree.supervisor.start_runnable("root.quick").expect("the DN exists");
    let generations = || ["root.quick", "root.slow", "root.failing"].map(|dn| tree.generation(dn));
    tokio::time::sleep(Duration::from_secs(19)).await;
    assert_eq!(generations(), [1, 1, 1]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(generations(), [2, 2, 2]);
}

fn rest_for_one(members: [(&'static str, RemoteRunnable); 3]) -> TestTree {
    TestTree::with_children(move |ctx| {
        let limit = RestartLimit {
            restarts: 1,
            period: Duration::from_secs(60),
            action: RestartLimitAction::StayDead,
        };
        let policy = ChildPolicy { restart_limit: Some(limit), ..ChildPolicy::default() };
        let member = |(name, remote): &(&'static str, RemoteRunnable)| {
            ChildSpec::new(*name, remote.clone()).policy(policy)
        };
        ctx.run_group_with(GroupPolicy::RestForOne, members.iter().map(member))
    })
}

#[tokio::test(start_paused = true)]
async fn members_of_a_rest_for_one_group_start_in_order_each_when_those_before_it_are_ready() {
    let [db, web, edge] = [(); 3].map(|()| RemoteRunnable::default());
    let tree = rest_for_one([("db", db.clone()), ("web", web.clone()), ("edge", edge.clone())]);
    let states = |tree: &TestTree| ["root.db", "root.web", "root.edge"].map(|dn| tree.state(dn).unwrap());
    let waiting_for =
        |tree: &TestTree, index: usize| tree.supervisor.snapshot()[index].waiting_for.to_string();
    settle().await;
    assert_eq!(states(&tree), [RunnableState::New, RunnableState::Waiting, RunnableState::Waiting]);
    assert_eq!(waiting_for(&tree, 3), "root.web to become ready");
    db.signal_ready().await;
    web.signal_ready().await;
    edge.signal_ready().await;
    assert_eq!(states(&tree), [RunnableState::Ready; 3]);
    // An operator's restart of one member ends no other.
    tree.supervisor.restart_runnable("root.db").expect("it is known");
    settle().await;
    assert_eq!(states(&tree), [RunnableState::New, RunnableState::Ready, RunnableState::Ready]);
    db.signal_ready().await;

    db.fail("disk gone").await;
    settle().await;
    assert_eq!(states(&tree), [RunnableState::Waiting; 3], "those after it wait for more than its backoff");
    tree.supervisor.start_runnable("root.edge").expect("it is known");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(states(&tree), [RunnableState::New, RunnableState::Waiting, RunnableState::Waiting]);
    db.signal_ready().await;
    settle().await;
    assert_eq!(states(&tree), [RunnableState::Ready, RunnableState::New, RunnableState::Waiting]);

    // The second failure exceeds the limit: it stays dead, and keeps those after it waiting.
    db.fail("disk gone").await;
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(states(&tree), [RunnableState::Dead, RunnableState::Waiting, RunnableState::Waiting]);
    tree.supervisor.start_runnable("root.db").expect("it is known");
    for remote in [&db, &web, &edge] {
        remote.signal_ready().await;
    }
    assert_eq!(states(&tree), [RunnableState::Ready; 3]);

    // Those after a member that leaves wait for it no longer.
    tree.supervisor.stop_runnable("root.db").expect("it is known");
    web.fail("gone").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(states(&tree), [RunnableState::Stopped, RunnableState::Waiting, RunnableState::Waiting]);
    tree.supervisor.remove_runnable("root.db", Removal::ForGood).await.expect("it is known");
    web.signal_ready().await;
    edge.signal_ready().await;
    assert_eq!(["root.web", "root.edge"].map(|dn| tree.state(dn).unwrap()), [RunnableState::Ready; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_ready_runnable_adds_children_which_end_with_its_run() {
    let (parent, remote) = (RemoteRunnable::default(), RemoteRunnable::default());
    let running = parent.clone();
    let (contexts, seen) = watch::channel(None);
    let tree = TestTree::with_children(move |ctx| {
        let (running, contexts) = (running.clone(), contexts.clone());
        ctx.run_child("pods", move |ctx: Context| {
            contexts.send_replace(Some(ctx.clone()));
            let running = running.clone();
            async move { nodekeel_supervisor::Runnable::run(&running, ctx).await }
        })
    });
    parent.signal_ready().await;
    let ctx: Context = seen.borrow().clone().expect("it runs");
    assert_eq!(ctx.run_child("a", remote.clone()), Ok(()));
    remote.signal_ready().await;
    assert_eq!(tree.state("root.pods.a"), Some(RunnableState::Ready));
    // They may also be added while it can't do its work.
    ctx.signal_not_ready("waits for a disk").expect("it runs");
    assert_eq!(ctx.run_child("b", steady), Ok(()));
    parent.fail("gone").await;
    settle().await;
    assert_eq!(tree.state("root.pods.a"), None);
    assert!(ctx.run_child("c", steady).is_err(), "its run has ended");
}

#[tokio::test(start_paused = true)]
async fn a_run_that_returns_ok_after_its_cancellation_has_not_failed() {
    let failing = RemoteRunnable::default();
    let member = failing.clone();
    let tree = TestTree::with_children(move |ctx| {
        let polite = |ctx: Context| async move {
            ctx.signal_ready()?;
            ctx.canceled().await;
            Ok::<(), Failure>(())
        };
        ctx.run_group([ChildSpec::new("a", polite), ChildSpec::new("b", member.clone())])
    });
    failing.signal_ready().await;
    failing.fail("gone").await;
    settle().await;
    let polite = &tree.supervisor.snapshot()[1];
    assert_eq!((polite.state, polite.generation, polite.failures), (RunnableState::Ready, 2, 0));
    assert_eq!(polite.exits[0].state, RunnableState::Canceled);
}
