//! What an operator may do: stop, start, restart, look, shut down.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_supervisor::testing::{Remote, settle};
use nodekeel_supervisor::{Change, Child, Context, ControlError, Failure, Policy, State, Supervisor};
use tokio::time::Instant;

use crate::tree::{Tree, steady};

#[tokio::test(start_paused = true)]
async fn a_stop_holds_until_a_start_also_across_the_parents_restart() {
    let (one, two) = (Remote::default(), Remote::default());
    let tree = Tree::of_group(&[("one", &one), ("two", &two)]);
    one.ready().await;
    two.ready().await;
    tree.supervisor.stop("root.one").expect("it is there");
    settle().await;
    assert_eq!((tree.state("root.one"), tree.state("root.two")), (Some(State::Stopped), Some(State::Ready)));
    two.fail("a failure does not wake it").await;
    settle().await;
    assert_eq!(tree.state("root.one"), Some(State::Stopped));
    tree.supervisor.restart("root").expect("it is there");
    settle().await;
    assert_eq!((tree.generation("root"), tree.state("root.one")), (2, Some(State::Stopped)));
    tree.supervisor.start("root.one").expect("it is there");
    settle().await;
    assert_eq!((tree.state("root.one"), tree.generation("root.one")), (Some(State::New), 2));
}

/// However a runnable takes it: with an error of its own, with `Ok`, or not at all.
#[tokio::test(start_paused = true)]
async fn what_an_operator_stops_or_restarts_takes_nobody_of_its_group_along() {
    let [rude, lazy, deaf] = [0, 1, 2].map(|kind| {
        move |ctx: Context| async move {
            ctx.ready()?;
            ctx.cancelled().await;
            match kind {
                0 => Err(Failure::new("no time to clean up")),
                1 => Ok(()),
                _ => std::future::pending().await,
            }
        }
    });
    let tree = Tree::of(move |ctx: Context| async move {
        let group = [
            Child::new("rude", rude),
            Child::new("lazy", lazy),
            Child::new("deaf", deaf),
            Child::new("other", steady),
        ];
        ctx.run_group(group)?;
        steady(ctx).await
    });
    settle().await;
    for dn in ["root.rude", "root.lazy", "root.deaf"] {
        tree.supervisor.restart(dn).expect("it is there");
        tree.recorder.until(dn, State::Dead).await;
        tree.recorder.until(dn, State::Ready).await;
        tree.supervisor.stop(dn).expect("it is there");
        tree.recorder.until(dn, State::Stopped).await;
    }
    assert_eq!((tree.state("root.other"), tree.generation("root.other")), (Some(State::Ready), 1));
}

#[tokio::test(start_paused = true)]
async fn a_restart_waits_for_no_backoff_and_a_start_ends_one() {
    let child = Remote::default();
    let tree = Tree::of_group(&[("child", &child)]);
    child.ready().await;
    tree.supervisor.restart("root.child").expect("it is there");
    settle().await;
    assert_eq!((tree.state("root.child"), tree.generation("root.child")), (Some(State::New), 2));
    child.fail("gone").await;
    tree.recorder.until("root.child", State::Dead).await;
    assert_eq!(tree.state("root.child"), Some(State::Waiting));
    tree.supervisor.start("root.child").expect("it is there");
    assert_eq!((tree.state("root.child"), tree.generation("root.child")), (Some(State::New), 3));
}

#[tokio::test(start_paused = true)]
async fn wishes_that_cannot_be_granted_are_errors_that_say_why() {
    let tree = Tree::of(|ctx: Context| async move {
        ctx.run("parent", |ctx: Context| async move {
            ctx.run("child", |ctx: Context| async move {
                let cancelled = ctx.cancelled().await;
                tokio::time::sleep(Duration::from_secs(5)).await;
                Err::<(), Failure>(cancelled.into())
            })?;
            Err::<(), _>(Failure::new("at once"))
        })?;
        steady(ctx).await
    });
    settle().await;
    for dn in ["", "root.", "root..parent", "other", "root.parent.nobody"] {
        assert_eq!(tree.supervisor.stop(dn), Err(ControlError::UnknownDn { dn: dn.into() }));
    }
    assert_eq!(tree.supervisor.stop("root"), Err(ControlError::Root));
    let ended = ControlError::ParentEnded { dn: "root.parent.child".into() };
    assert_eq!(tree.supervisor.restart("root.parent.child"), Err(ended));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_goes_backwards_children_first_and_names_the_stragglers() {
    let order = Arc::new(Mutex::new(Vec::new()));
    let note = Arc::clone(&order);
    let tree = Tree::of(move |ctx: Context| {
        let note = Arc::clone(&note);
        async move {
            let leaf = move |takes: u64| {
                let note = Arc::clone(&note);
                move |ctx: Context| {
                    let note = Arc::clone(&note);
                    async move {
                        ctx.ready()?;
                        let cancelled = ctx.cancelled().await;
                        tokio::time::sleep(Duration::from_secs(takes)).await;
                        note.lock().expect("no panic holds it").push(ctx.dn().to_owned());
                        Err::<(), Failure>(cancelled.into())
                    }
                }
            };
            let nested = leaf.clone();
            ctx.run("first", leaf(1))?;
            ctx.run("parent", move |ctx: Context| {
                let nested = nested.clone();
                async move {
                    ctx.run("a", nested(1))?;
                    ctx.run("b", nested(1))?;
                    nodekeel_supervisor::Runnable::run(&nested(0), ctx).await
                }
            })?;
            ctx.run_group([
                Child::new("late-slow", leaf(3)),
                Child::new("late-quick", leaf(1)),
                Child::new("stubborn", leaf(1_000_000)).stop_within(Duration::from_secs(5)),
            ])?;
            steady(ctx).await
        }
    });
    settle().await;
    let began = Instant::now();
    let Tree { supervisor, recorder } = tree;
    let report = supervisor.shutdown().await;
    let order = order.lock().expect("no panic holds it").clone();
    let expected =
        ["root.late-quick", "root.late-slow", "root.parent.b", "root.parent.a", "root.parent", "root.first"];
    assert_eq!(order, expected);
    let named: Vec<_> =
        report.stragglers.iter().map(|straggler| (&*straggler.dn, straggler.waited.as_secs())).collect();
    assert_eq!(named, [("root.stubborn", 5)]);
    assert_eq!(began.elapsed().as_secs(), 5 + 1 + 1 + 1, "the members of a group stop at the same time");
    assert!(recorder.events().iter().any(|event| matches!(event.change, Change::Straggling { .. })));
}

#[tokio::test(start_paused = true)]
async fn outside_of_a_shutdown_a_straggler_is_reported_and_aborted_so_that_it_comes_back() {
    let tree = Tree::of(|ctx: Context| async move {
        ctx.run("deaf", |ctx: Context| async move {
            ctx.ready()?;
            std::future::pending::<Result<(), Failure>>().await
        })?;
        steady(ctx).await
    });
    settle().await;
    tree.supervisor.restart("root.deaf").expect("it is there");
    let began = Instant::now();
    tree.recorder.until("root.deaf", State::Dead).await;
    assert_eq!(began.elapsed().as_secs(), 30);
    settle().await;
    assert_eq!((tree.state("root.deaf"), tree.generation("root.deaf")), (Some(State::Ready), 2));
}

// A thread that never comes back can't be aborted; the shutdown ends all the same, and says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_does_not_wait_for_a_runnable_that_never_awaits() {
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let spinning = Arc::clone(&stop);
    let supervisor =
        Supervisor::builder().stop_within(Duration::from_millis(50)).start(move |ctx: Context| {
            let stop = Arc::clone(&spinning);
            async move {
                ctx.ready()?;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                Ok::<(), Failure>(())
            }
        });
    let report = tokio::time::timeout(Duration::from_secs(10), supervisor.shutdown()).await.expect("it ends");
    assert_eq!(&*report.stragglers[0].dn, "root");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
}

#[tokio::test(start_paused = true)]
async fn nothing_of_a_tree_is_left_after_its_shutdown() {
    let held = Arc::new(());
    let kept = Arc::downgrade(&held);
    let tree = Tree::of(move |ctx: Context| {
        let held = Arc::clone(&held);
        async move {
            let child = move |ctx: Context| {
                let held = Arc::clone(&held);
                async move {
                    let _held = held;
                    steady(ctx).await
                }
            };
            ctx.run("child", child)?;
            steady(ctx).await
        }
    });
    settle().await;
    let Tree { supervisor, recorder } = tree;
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
async fn every_change_wakes_a_watcher_and_quiet_wakes_none() {
    let child = Remote::default();
    let tree = Tree::of_group(&[("child", &child)]);
    settle().await;
    let mut watch = tree.supervisor.watch();
    watch.mark_unchanged();
    let quiet = tokio::time::timeout(Duration::from_secs(3600), watch.changed()).await;
    assert!(quiet.is_err(), "nothing has happened");
    child.ready().await;
    watch.changed().await.expect("the tree lives");
}

// reference case 13: what a metrics sink hears.
#[tokio::test(start_paused = true)]
async fn events_tell_the_states_of_every_node_in_order() {
    let tree = Tree::of(|ctx: Context| async move {
        ctx.run("one", |ctx: Context| async move {
            ctx.run("two", steady)?;
            if ctx.generation() == 1 {
                return Err(Failure::new("the first attempt"));
            }
            ctx.ready()?;
            ctx.done()?;
            Ok(())
        })?;
        Err::<(), Failure>(ctx.cancelled().await.into())
    });
    tokio::time::sleep(Duration::from_secs(2)).await;
    use State::{Canceled, Dead, Done, New, Ready, Waiting};
    assert_eq!(tree.recorder.states("root"), [New]);
    assert_eq!(tree.recorder.states("root.one"), [New, Dead, Waiting, New, Ready, Done]);
    let two = tree.recorder.states("root.one.two");
    assert!(two == [New, Ready, Canceled, New, Ready] || two == [New, Canceled, New, Ready], "{two:?}");
}

#[tokio::test]
async fn a_default_policy_can_be_replaced_for_all() {
    let none = Policy { backoff: nodekeel_supervisor::Backoff::NONE, ..Policy::default() };
    let child = Remote::default();
    let told = child.clone();
    let recorder = nodekeel_supervisor::testing::Recorder::default();
    let supervisor = Supervisor::builder().policy(none).hook(recorder.clone()).start(move |ctx: Context| {
        let told = told.clone();
        async move {
            ctx.run("child", told)?;
            steady(ctx).await
        }
    });
    for round in 1..=100 {
        assert_eq!(recorder.until("root.child", State::New).await.generation, round);
        child.fail("at once again").await;
    }
    supervisor.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_time_without_end_is_waited_for_without_end() {
    let child = Remote::default();
    let told = child.clone();
    let supervisor = Supervisor::builder().stop_within(Duration::MAX).start(move |ctx: Context| {
        let told = told.clone();
        async move {
            let backoff = nodekeel_supervisor::Backoff {
                initial: Duration::MAX,
                max: Duration::MAX,
                ..nodekeel_supervisor::Backoff::default()
            };
            ctx.run_group([Child::new("child", told).policy(Policy { backoff, ..Policy::default() })])?;
            steady(ctx).await
        }
    });
    child.fail("gone").await;
    settle().await;
    assert_eq!(supervisor.snapshot()[1].state, State::Waiting);
    tokio::time::sleep(Duration::from_secs(365 * 24 * 3600)).await;
    assert_eq!(supervisor.snapshot()[1].state, State::Waiting);
    assert!(supervisor.shutdown().await.stragglers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn everybody_who_waits_for_a_shutdown_waits_for_its_last_event() {
    let tree = Tree::of(steady);
    settle().await;
    let (first, second) = tokio::join!(tree.supervisor.shutdown(), tree.supervisor.shutdown());
    assert_eq!(first, second);
    assert_eq!(tree.recorder.states("root").last(), Some(&State::Canceled));
    assert_eq!(tree.supervisor.stop("root"), Err(ControlError::ShuttingDown));
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_panics_misses_one_event_and_hears_of_the_rest() {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&heard);
    let hook = move |event: &nodekeel_supervisor::Event| {
        assert_ne!(event.seq, 2, "the second event is too much for it");
        hears.lock().expect("it panics without the lock").push(event.seq);
    };
    let supervisor = Supervisor::builder().hook(hook).start(steady);
    settle().await;
    supervisor.shutdown().await;
    assert_eq!(*heard.lock().expect("it panics without the lock"), [1, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_watcher_hears_for_whom_a_runnable_waits() {
    let (go, child) = (Arc::new(tokio::sync::Notify::new()), Remote::default());
    let (gone, told) = (Arc::clone(&go), child.clone());
    let tree = Tree::of(move |ctx: Context| {
        let (go, told) = (Arc::clone(&gone), told.clone());
        async move {
            ctx.run("child", told)?;
            ctx.run("dependent", move |ctx: Context| {
                let go = Arc::clone(&go);
                async move {
                    go.notified().await;
                    ctx.wait_ready("root.child").await?;
                    steady(ctx).await
                }
            })?;
            steady(ctx).await
        }
    });
    settle().await;
    let mut watch = tree.supervisor.watch();
    watch.mark_unchanged();
    go.notify_one();
    watch.changed().await.expect("the tree lives");
    assert_eq!(tree.supervisor.snapshot()[2].waiting_for.to_string(), "root.child to become ready");
}
