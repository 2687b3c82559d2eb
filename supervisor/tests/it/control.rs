//! The control requests: stop, start, restart, inspect, shut down.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};
use nodekeel_supervisor::{
    ChildPolicy, ChildSpec, Context, ControlError, Event, Failure, Removal, RestartLimit, RestartLimitAction,
    RestartPolicy, RunnableChange, RunnableState, Supervisor,
};
use tokio::time::Instant;

use crate::harness::{TestTree, deaf, done, parent_of, slow_to_stop, steady};

#[tokio::test(start_paused = true)]
async fn a_stop_holds_until_a_start_also_across_the_parents_restart() {
    let (one, two) = (RemoteRunnable::default(), RemoteRunnable::default());
    let tree = TestTree::with_group(&[("one", &one), ("two", &two)]);
    one.signal_ready().await;
    two.signal_ready().await;
    tree.supervisor.stop_runnable("root.one").expect("the DN exists");
    settle().await;
    assert_eq!(
        (tree.state("root.one"), tree.state("root.two")),
        (Some(RunnableState::Stopped), Some(RunnableState::Ready))
    );
    two.fail("a failure does not wake it").await;
    settle().await;
    assert_eq!(tree.state("root.one"), Some(RunnableState::Stopped));
    tree.supervisor.restart_runnable("root").expect("the DN exists");
    settle().await;
    assert_eq!((tree.generation("root"), tree.state("root.one")), (2, Some(RunnableState::Stopped)));
    tree.supervisor.start_runnable("root.one").expect("the DN exists");
    settle().await;
    assert_eq!(tree.latest_run("root.one"), (RunnableState::New, 2));
}

/// Also if the runnable exits with an error, with `Ok`, or not at all.
#[tokio::test(start_paused = true)]
async fn an_operators_stop_or_restart_cancels_no_group_sibling() {
    let [rude, lazy] = [Err("no time to clean up"), Ok(())].map(|result| {
        move |ctx: Context| async move {
            ctx.signal_ready()?;
            ctx.canceled().await;
            result.map_err(Failure::new)
        }
    });
    let tree = TestTree::with_children(move |ctx| {
        let group = [
            ChildSpec::new("rude", rude),
            ChildSpec::new("lazy", lazy),
            ChildSpec::new("deaf", deaf),
            ChildSpec::new("other", steady),
        ];
        ctx.run_group(group)
    });
    settle().await;
    for (dn, end) in [
        ("root.rude", RunnableState::Dead),
        ("root.lazy", RunnableState::Canceled),
        ("root.deaf", RunnableState::Dead),
    ] {
        tree.supervisor.restart_runnable(dn).expect("the DN exists");
        tree.recorder.wait_for_state(dn, end).await;
        tree.recorder.wait_for_state(dn, RunnableState::Ready).await;
        tree.supervisor.stop_runnable(dn).expect("the DN exists");
        tree.recorder.wait_for_state(dn, RunnableState::Stopped).await;
    }
    assert_eq!(tree.latest_run("root.other"), (RunnableState::Ready, 1));
}

#[tokio::test(start_paused = true)]
async fn a_restart_waits_for_no_backoff_and_a_start_ends_one() {
    let child = RemoteRunnable::default();
    let tree = TestTree::with_group(&[("child", &child)]);
    child.signal_ready().await;
    tree.supervisor.restart_runnable("root.child").expect("the DN exists");
    settle().await;
    assert_eq!(tree.latest_run("root.child"), (RunnableState::New, 2));
    child.fail("gone").await;
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    assert_eq!(tree.state("root.child"), Some(RunnableState::Waiting));
    tree.supervisor.start_runnable("root.child").expect("the DN exists");
    assert_eq!(tree.latest_run("root.child"), (RunnableState::New, 3));
}

#[tokio::test(start_paused = true)]
async fn invalid_control_requests_are_errors_with_the_reason() {
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("parent", |ctx: Context| async move {
            ctx.run_child("child", slow_to_stop(Duration::from_secs(5)))?;
            Err::<(), _>(Failure::new("at once"))
        })
    });
    settle().await;
    for dn in ["", "root.", "root..parent", "other", "root.parent.nobody"] {
        assert_eq!(tree.supervisor.stop_runnable(dn), Err(ControlError::UnknownDn { dn: dn.into() }));
    }
    assert_eq!(tree.supervisor.stop_runnable("root"), Err(ControlError::RootNotControllable));
    let ended = ControlError::ParentNotRunning { dn: "root.parent.child".into() };
    assert_eq!(tree.supervisor.restart_runnable("root.parent.child"), Err(ended));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_stops_children_first_and_everything_else_at_once_and_reports_stragglers() {
    let leaf = |seconds| slow_to_stop(Duration::from_secs(seconds));
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("first", leaf(1))?;
        ctx.run_child(
            "parent",
            parent_of(move |ctx| {
                ctx.run_child("a", leaf(1))?;
                ctx.run_child("b", leaf(1))
            }),
        )?;
        ctx.run_group([
            ChildSpec::new("late-slow", leaf(3)),
            ChildSpec::new("late-quick", leaf(1)),
            ChildSpec::new("stubborn", leaf(1_000_000)).stop_timeout(Duration::from_secs(5)),
        ])
    });
    settle().await;
    let started = Instant::now();
    let report = tree.supervisor.shutdown().await;
    let order = tree.stopped();
    let place = |dn: &str| order.iter().position(|stopped| stopped == dn).expect("it has stopped");
    assert!(place("root.parent.a").max(place("root.parent.b")) < place("root.parent"), "{order:?}");
    assert_eq!(order[5..], ["root.late-slow", "root"], "{order:?}");
    let named: Vec<_> =
        report.stragglers.iter().map(|straggler| (&*straggler.dn, straggler.waited.as_secs())).collect();
    assert_eq!(named, [("root.stubborn", 5)]);
    assert_eq!(started.elapsed().as_secs(), 5, "everything waits for the straggler alone");
    let is_straggling = |event: &Event| matches!(event.change, RunnableChange::Straggling { .. });
    assert!(tree.recorder.events().iter().any(is_straggling));
}

#[tokio::test(start_paused = true)]
async fn a_straggler_outside_of_a_shutdown_is_reported_aborted_and_restarted() {
    let tree = TestTree::with_children(|ctx| ctx.run_child("deaf", deaf));
    settle().await;
    tree.supervisor.restart_runnable("root.deaf").expect("the DN exists");
    let started = Instant::now();
    tree.recorder.wait_for_state("root.deaf", RunnableState::Dead).await;
    assert_eq!(started.elapsed().as_secs(), 30);
    settle().await;
    assert_eq!(tree.latest_run("root.deaf"), (RunnableState::Ready, 2));
}

// A thread that never yields can't be aborted; the shutdown ends nevertheless, and reports it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_does_not_wait_for_a_runnable_that_never_awaits() {
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let spinning = Arc::clone(&stop);
    let supervisor =
        Supervisor::builder().stop_timeout(Duration::from_millis(50)).start(move |ctx: Context| {
            let stop = Arc::clone(&spinning);
            async move {
                ctx.signal_ready()?;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                Ok::<(), Failure>(())
            }
        });
    let report = tokio::time::timeout(Duration::from_secs(10), supervisor.shutdown())
        .await
        .expect("the shutdown ends");
    assert_eq!(&*report.stragglers[0].dn, "root");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_frees_the_whole_tree() {
    let held = Arc::new(());
    let kept = Arc::downgrade(&held);
    let tree = TestTree::with_children(move |ctx| {
        let held = Arc::clone(&held);
        let child = move |ctx: Context| {
            let held = Arc::clone(&held);
            async move {
                let _held = held;
                steady(ctx).await
            }
        };
        ctx.run_child("child", child)
    });
    settle().await;
    let TestTree { supervisor, recorder } = tree;
    supervisor.shutdown().await;
    settle().await;
    assert_eq!(kept.strong_count(), 0, "a runnable is still there");
    let mut seqs = recorder.events().into_iter().map(|event| event.seq);
    assert!(seqs.all({
        let mut next = 0;
        move |seq| {
            next += 1;
            seq == next
        }
    }));
}

#[tokio::test(start_paused = true)]
async fn every_change_wakes_a_watcher_and_an_idle_tree_wakes_none() {
    let child = RemoteRunnable::default();
    let tree = TestTree::with_group(&[("child", &child)]);
    settle().await;
    let mut watch = tree.supervisor.watch_changes();
    watch.mark_unchanged();
    let quiet = tokio::time::timeout(Duration::from_secs(3600), watch.changed()).await;
    assert!(quiet.is_err(), "nothing has happened");
    child.signal_ready().await;
    watch.changed().await.expect("the tree is running");
}

// reference case 13: the events that a metrics sink gets.
#[tokio::test(start_paused = true)]
async fn events_report_the_states_of_every_runnable_in_order() {
    let tree = TestTree::with_root(|ctx: Context| async move {
        ctx.run_child("one", |ctx: Context| async move {
            ctx.run_child("two", steady)?;
            if ctx.generation() == 1 {
                return Err(Failure::new("the first attempt"));
            }
            ctx.signal_ready()?;
            ctx.signal_done()?;
            Ok(())
        })?;
        Err::<(), Failure>(ctx.canceled().await.into())
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    use RunnableState::{Canceled, Dead, Done, New, Ready, Waiting};
    assert_eq!(tree.recorder.states_of("root"), [New]);
    assert_eq!(tree.recorder.states_of("root.one"), [New, Dead, Waiting, New, Ready, Done]);
    let two = tree.recorder.states_of("root.one.two");
    assert!(two == [New, Ready, Canceled, New, Ready] || two == [New, Canceled, New, Ready], "{two:?}");
}

#[tokio::test]
async fn a_default_policy_can_be_replaced_for_all() {
    let none = ChildPolicy { backoff: nodekeel_supervisor::Backoff::NONE, ..ChildPolicy::default() };
    let child = RemoteRunnable::default();
    let remote = child.clone();
    let recorder = nodekeel_supervisor::testing::EventRecorder::default();
    let supervisor = Supervisor::builder()
        .default_policy(none)
        .event_hook(recorder.clone())
        .start(parent_of(move |ctx| ctx.run_child("child", remote.clone())));
    for round in 1..=100 {
        assert_eq!(recorder.wait_for_state("root.child", RunnableState::New).await.generation, round);
        child.fail("at once again").await;
    }
    supervisor.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn an_infinite_timeout_never_expires() {
    let child = RemoteRunnable::default();
    let remote = child.clone();
    let supervisor = Supervisor::builder().stop_timeout(Duration::MAX).start(parent_of(move |ctx| {
        let backoff = nodekeel_supervisor::Backoff {
            initial: Duration::MAX,
            max: Duration::MAX,
            ..nodekeel_supervisor::Backoff::default()
        };
        ctx.run_group([
            ChildSpec::new("child", remote.clone()).policy(ChildPolicy { backoff, ..ChildPolicy::default() })
        ])
    }));
    child.fail("gone").await;
    settle().await;
    assert_eq!(supervisor.snapshot()[1].state, RunnableState::Waiting);
    tokio::time::sleep(Duration::from_secs(365 * 24 * 3600)).await;
    assert_eq!(supervisor.snapshot()[1].state, RunnableState::Waiting);
    assert!(supervisor.shutdown().await.stragglers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn concurrent_shutdown_calls_all_wait_for_the_last_event() {
    let tree = TestTree::with_root(steady);
    settle().await;
    let (first, second) = tokio::join!(tree.supervisor.shutdown(), tree.supervisor.shutdown());
    assert_eq!(first, second);
    assert_eq!(tree.recorder.states_of("root").last(), Some(&RunnableState::Canceled));
    assert_eq!(tree.supervisor.stop_runnable("root"), Err(ControlError::ShuttingDown));
}

#[tokio::test(start_paused = true)]
async fn a_panicking_hook_misses_one_event_and_gets_the_rest() {
    let received = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&received);
    let hook = move |event: &Event| {
        assert_ne!(event.seq, 2, "the hook panics at the second event");
        writer.lock().expect("the hook panics without holding the lock").push(event.seq);
    };
    let supervisor = Supervisor::builder().event_hook(hook).start(steady);
    settle().await;
    supervisor.shutdown().await;
    assert_eq!(*received.lock().expect("the hook panics without holding the lock"), [1, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_watcher_is_notified_when_a_runnable_waits_for_a_dependency() {
    let (go, child) = (Arc::new(tokio::sync::Notify::new()), RemoteRunnable::default());
    let (gone, remote) = (Arc::clone(&go), child.clone());
    let tree = TestTree::with_children(move |ctx| {
        let (go, remote) = (Arc::clone(&gone), remote.clone());
        ctx.run_child("child", remote)?;
        ctx.run_child("dependent", move |ctx: Context| {
            let go = Arc::clone(&go);
            async move {
                go.notified().await;
                ctx.wait_ready("root.child").await?;
                steady(ctx).await
            }
        })
    });
    settle().await;
    let mut watch = tree.supervisor.watch_changes();
    watch.mark_unchanged();
    go.notify_one();
    watch.changed().await.expect("the tree is running");
    assert_eq!(tree.supervisor.snapshot()[2].waiting_for.to_string(), "root.child to become ready");
}

#[tokio::test(start_paused = true)]
async fn children_are_added_to_and_removed_from_a_ready_parent() {
    let tree = TestTree::with_root(steady);
    settle().await;
    let supervisor = &tree.supervisor;
    supervisor.add_child("root", ChildSpec::new("a", steady)).expect("root runs");
    settle().await;
    assert_eq!(tree.state("root.a"), Some(RunnableState::Ready));
    let twice = supervisor.add_child("root", ChildSpec::new("a", steady)).expect_err("a exists");
    assert!(matches!(twice, ControlError::Name(_)), "{twice}");
    let absent = supervisor.add_child("root.b", ChildSpec::new("a", steady)).expect_err("b does not exist");
    assert_eq!(absent, ControlError::UnknownDn { dn: "root.b".into() });
    supervisor.stop_runnable("root.a").expect("the DN exists");
    settle().await;
    assert_eq!(supervisor.snapshot()[1].exits.len(), 1);
    supervisor.remove_runnable("root.a", Removal::ForReplacement).await.expect("the DN exists");
    assert_eq!(tree.state("root.a"), None);
    supervisor.add_child("root", ChildSpec::new("a", steady)).expect("its name is free");
    assert_eq!(tree.latest_run("root.a"), (RunnableState::Stopped, 1));
    assert_eq!(supervisor.snapshot()[1].exits, [], "those of another definition");
    supervisor.remove_runnable("root.a", Removal::ForGood).await.expect("the DN exists");
    supervisor.add_child("root", ChildSpec::new("a", steady)).expect("its name is free");
    settle().await;
    assert_eq!(tree.latest_run("root.a"), (RunnableState::Ready, 2));
}

#[tokio::test(start_paused = true)]
async fn a_replaced_child_runs_on_and_its_next_run_and_the_shutdown_follow_the_new_dependencies() {
    let tree = TestTree::with_children(|ctx| {
        ctx.run_child("a", steady)?;
        ctx.run_child("b", steady)
    });
    settle().await;
    let supervisor = &tree.supervisor;
    supervisor.replace_child("root", ChildSpec::new("a", steady).depends_on(["root.b"])).expect("a exists");
    settle().await;
    assert_eq!(tree.latest_run("root.a"), (RunnableState::Ready, 1), "nothing stops");
    supervisor.stop_runnable("root.b").expect("b exists");
    supervisor.restart_runnable("root.a").expect("a exists");
    settle().await;
    assert_eq!(tree.latest_run("root.a"), (RunnableState::New, 2), "it waits for b");
    supervisor.start_runnable("root.b").expect("b exists");
    settle().await;
    assert_eq!(tree.latest_run("root.a"), (RunnableState::Ready, 2));
    let absent = supervisor.replace_child("root", ChildSpec::new("c", steady)).expect_err("c does not exist");
    assert_eq!(absent, ControlError::UnknownDn { dn: "root.c".into() });
    supervisor.shutdown().await;
    assert!(tree.stopped().ends_with(&["root.a".to_owned(), "root.b".to_owned(), "root".to_owned()]));
}

#[tokio::test(start_paused = true)]
async fn a_child_of_a_parent_that_stays_dead_can_be_removed() {
    let parent = |ctx: Context| async move {
        ctx.run_child("child", steady)?;
        Err::<(), Failure>(Failure::new("for good"))
    };
    let tree = TestTree::with_children(move |ctx| {
        let policy = ChildPolicy { restart: RestartPolicy::Never, ..ChildPolicy::default() };
        ctx.run_child_with(ChildSpec::new("parent", parent).policy(policy))
    });
    settle().await;
    assert_eq!(tree.state("root.parent"), Some(RunnableState::Dead));
    assert!(tree.state("root.parent.child").is_some());
    let removed = tree.supervisor.remove_runnable("root.parent.child", Removal::ForGood);
    let in_time = tokio::time::timeout(Duration::from_secs(1), removed).await;
    assert_eq!((in_time, tree.state("root.parent.child")), (Ok(Ok(())), None));
}

#[tokio::test(start_paused = true)]
async fn a_removal_for_which_a_sibling_waits_can_end_their_parent() {
    let fails = RemoteRunnable::default();
    let failing = fails.clone();
    let limit =
        RestartLimit { restarts: 0, period: Duration::from_secs(60), action: RestartLimitAction::FailParent };
    let policy = ChildPolicy { restart_limit: Some(limit), ..ChildPolicy::default() };
    let tree = TestTree::with_children(move |ctx| {
        let failing = failing.clone();
        ctx.run_child("parent", move |ctx: Context| {
            let failing = ChildSpec::new("fails", failing.clone()).policy(policy);
            async move {
                ctx.run_group([ChildSpec::new("leaves", slow_to_stop(Duration::from_secs(5))), failing])?;
                done(ctx).await
            }
        })
    });
    settle().await;
    let removed = tree.supervisor.remove_runnable("root.parent.leaves", Removal::ForGood);
    // While the other one is leaving: both have to end before either can restart.
    let (removed, ()) = tokio::join!(removed, fails.fail("too often"));
    assert_eq!((removed, tree.state("root.parent.leaves")), (Ok(()), None));
    tree.recorder.wait_for_state("root.parent", RunnableState::Dead).await;
    tree.recorder.wait_for_state("root.parent", RunnableState::Done).await;
    assert_eq!(tree.generation("root.parent"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_removal_waits_for_the_exit_and_a_shutdown_ends_the_wait() {
    const CLEANUP: Duration = Duration::from_secs(5);
    let tree = TestTree::with_children(|ctx| {
        ctx.run_child("a", slow_to_stop(CLEANUP))?;
        ctx.run_child("b", slow_to_stop(CLEANUP))
    });
    settle().await;
    let started = Instant::now();
    tree.supervisor.remove_runnable("root.a", Removal::ForGood).await.expect("the DN exists");
    assert!(started.elapsed() >= CLEANUP && tree.state("root.a").is_none());
    let (removed, _) =
        tokio::join!(tree.supervisor.remove_runnable("root.b", Removal::ForGood), tree.supervisor.shutdown());
    assert_eq!(removed, Err(ControlError::ShuttingDown));
}
