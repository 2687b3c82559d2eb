//! Runnables that break the rules, and what it costs the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nodekeel_supervisor::testing::{Remote, settle};
use nodekeel_supervisor::{
    Cancelled, Child, Context, Exit, Failure, NameError, SignalError, SpawnError, Stale, State, WaitError,
    WaitingFor,
};

use crate::tree::{Alone, Tree, steady};

// reference case 7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_works_on_beside_every_kind_of_misbehaviour() {
    let stop = Arc::new(AtomicBool::new(false));
    let (pings, foreign) = (Remote::default(), Arc::new(std::sync::Mutex::new(None::<Context>)));
    let one_sibling = Remote::default();
    let (told_one, told_sibling, spinning, leaked) =
        (pings.clone(), one_sibling.clone(), Arc::clone(&stop), Arc::clone(&foreign));
    let tree = Tree::of(move |ctx: Context| {
        let (one, sibling, stop, leaked) =
            (told_one.clone(), told_sibling.clone(), Arc::clone(&spinning), Arc::clone(&leaked));
        async move {
            leaked.lock().expect("no panic holds it").get_or_insert(ctx.clone());
            ctx.run("with-foreign-context", move |_: Context| {
                let root = leaked.lock().expect("no panic holds it").clone().expect("root has left it");
                async move {
                    // Signals for another runnable, which is ready already: not that one is to blame.
                    let foreign = SignalError::Foreign { dn: "root".into() };
                    assert_eq!((root.ready(), root.done()), (Err(foreign.clone()), Err(foreign)));
                    Err::<(), _>(Failure::new("nothing else to do"))
                }
            })?;
            ctx.run("done-before-ready", |ctx: Context| async move {
                ctx.done()?;
                Ok::<(), Failure>(())
            })?;
            ctx.run("spins", move |_: Context| {
                let stop = Arc::clone(&stop);
                async move {
                    let spin = move || {
                        while !stop.load(Ordering::Relaxed) {
                            std::hint::spin_loop();
                        }
                    };
                    tokio::task::spawn_blocking(spin).await.map_err(Failure::new)
                }
            })?;
            ctx.run("grows", |ctx: Context| async move {
                for child in 0.. {
                    ctx.run(format!("child-{child}"), steady)?;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Ok::<(), Failure>(())
            })?;
            ctx.run_group([Child::new("one", one), Child::new("one-sibling", sibling)])?;
            steady(ctx).await
        }
    });
    for round in 1..=5 {
        let answers = async {
            pings.ready().await;
            one_sibling.panic("again").await;
            tree.recorder.until("root.one", State::Canceled).await;
        };
        tokio::time::timeout(Duration::from_secs(20), answers)
            .await
            .unwrap_or_else(|_| panic!("stuck in round {round}"));
    }
    tokio::time::timeout(Duration::from_secs(1), pings.ready()).await.expect("it answers at the end");
    assert_eq!(tree.generation("root"), 1);
    stop.store(true, Ordering::Relaxed);
}

#[tokio::test(start_paused = true)]
async fn a_wrong_order_of_signals_is_an_error_and_ends_the_run_as_dead() {
    type Misuse = fn(&Context) -> SignalError;
    let cases: [(Misuse, &str); 4] = [
        (|ctx| ctx.done().expect_err("done before ready"), "root.child signalled done before ready"),
        (
            |ctx| {
                ctx.ready().expect("the first time");
                ctx.ready().expect_err("twice")
            },
            "root.child signalled ready twice",
        ),
        (
            |ctx| {
                ctx.ready().expect("in order");
                ctx.done().expect("in order");
                ctx.done().expect_err("twice")
            },
            "root.child signalled done twice",
        ),
        (
            |ctx| {
                ctx.ready().expect("in order");
                ctx.done().expect("in order");
                ctx.ready().expect_err("after done")
            },
            "root.child signalled ready twice",
        ),
    ];
    for (misuse, message) in cases {
        let tree = Tree::of(move |ctx: Context| async move {
            let child = move |ctx: Context| async move {
                assert_eq!(misuse(&ctx).to_string(), message);
                assert!(ctx.is_cancelled(), "it is told to stop");
                // It carries on as if nothing were, and does not get away with it.
                Ok::<(), Failure>(())
            };
            ctx.run("child", child)?;
            steady(ctx).await
        });
        tree.recorder.until("root.child", State::Dead).await;
        let child = &tree.supervisor.snapshot()[1];
        assert_eq!(child.exits[0].exit, Exit::Misused { error: message.into() });
    }
}

#[tokio::test(start_paused = true)]
async fn a_leaked_context_never_acts_for_the_next_incarnation() {
    let leaked = Arc::new(std::sync::Mutex::new(None::<Context>));
    let leak = Arc::clone(&leaked);
    let tree = Tree::of(move |ctx: Context| {
        let leak = Arc::clone(&leak);
        async move {
            let child = move |ctx: Context| {
                leak.lock().expect("no panic holds it").get_or_insert(ctx.clone());
                async move {
                    if ctx.generation() == 1 {
                        Err(Failure::new("the first one dies"))
                    } else {
                        Err(ctx.cancelled().await.into())
                    }
                }
            };
            ctx.run("child", child)?;
            steady(ctx).await
        }
    });
    tree.recorder.until("root.child", State::Dead).await;
    tree.recorder.until("root.child", State::New).await;
    let stale = leaked.lock().expect("no panic holds it").clone().expect("it was leaked");
    assert!(stale.is_cancelled());
    assert_eq!(stale.ready(), Err(SignalError::Stale));
    assert_eq!(stale.done(), Err(SignalError::Stale));
    assert_eq!(stale.run("x", steady), Err(SpawnError::Name(NameError::Stale)));
    assert_eq!(stale.sub_span("x").err(), Some(NameError::Stale));
    assert_eq!(stale.spawn(async {}), Err(Stale));
    assert_eq!(stale.wait_ready("root").await, Ok(()), "it may still look");
    assert_eq!((tree.state("root.child"), tree.generation("root.child")), (Some(State::New), 2));
}

#[tokio::test(start_paused = true)]
async fn a_group_with_one_bad_member_adds_none() {
    let tree = Tree::of(|ctx: Context| async move {
        ctx.run("taken", steady)?;
        let taken =
            |name: &str| SpawnError::Name(NameError::Taken { name: name.into(), parent: "root".into() });
        assert_eq!(
            ctx.run_group([Child::new("new", steady), Child::new("taken", steady)]),
            Err(taken("taken"))
        );
        assert_eq!(
            ctx.run_group([Child::new("twin", steady), Child::new("twin", steady)]),
            Err(taken("twin"))
        );
        let invalid = SpawnError::Name(NameError::Invalid { name: "UPPER.with dots!x".into() });
        assert_eq!(ctx.run("UPPER.with dots!x", steady), Err(invalid));
        ctx.ready()?;
        assert_eq!(ctx.run("late", steady), Err(SpawnError::AlreadyReady { dn: "root".into() }));
        Err::<(), Failure>(ctx.cancelled().await.into())
    });
    settle().await;
    let dns: Vec<String> = tree.supervisor.snapshot().iter().map(|node| node.dn.to_string()).collect();
    assert_eq!(dns, ["root", "root.taken"]);
    assert_eq!(tree.state("root"), Some(State::Ready));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_runnable_gets_no_children() {
    let tree = Tree::of(|ctx: Context| async move {
        let late = |ctx: Context| async move {
            let cancelled = ctx.cancelled().await;
            assert_eq!(ctx.run("child", steady), Err(SpawnError::Cancelled(cancelled)));
            Err::<(), Failure>(cancelled.into())
        };
        ctx.run("late", late)?;
        steady(ctx).await
    });
    settle().await;
    tree.supervisor.restart("root.late").expect("it is there");
    let canceled = tree.recorder.until("root.late", State::Canceled).await;
    assert_eq!(canceled.generation, 1);
}

#[tokio::test(start_paused = true)]
async fn a_cancellation_that_nobody_asked_for_is_a_failure() {
    let tree = Tree::of(|ctx: Context| async move {
        ctx.run("liar", |_: Context| async { Err::<(), _>(Cancelled) })?;
        steady(ctx).await
    });
    tree.recorder.until("root.liar", State::Dead).await;
}

#[tokio::test(start_paused = true)]
async fn helpers_are_joined_and_their_panics_are_the_runnables() {
    let ended = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&ended);
    let tree = Tree::of(move |ctx: Context| {
        let count = Arc::clone(&count);
        async move {
            let with_helpers = move |ctx: Context| {
                let count = Arc::clone(&count);
                async move {
                    let helper = ctx.clone();
                    ctx.spawn(async move {
                        let _cancelled = helper.cancelled().await;
                        tokio::time::sleep(Duration::from_secs(3)).await;
                        count.fetch_add(1, Ordering::SeqCst);
                    })?;
                    if ctx.generation() == 2 {
                        ctx.spawn(async { panic!("in a helper") })?;
                        return Err(ctx.cancelled().await.into());
                    }
                    Err(Failure::new("the runnable itself fails"))
                }
            };
            ctx.run("child", with_helpers)?;
            steady(ctx).await
        }
    });
    tree.recorder.until("root.child", State::Dead).await;
    assert_eq!(ended.load(Ordering::SeqCst), 1, "the run ended before its helper");
    tree.recorder.until("root.child", State::Dead).await;
    assert_eq!(ended.load(Ordering::SeqCst), 2, "the run ended before its helper");
    let exits = &tree.supervisor.snapshot()[1].exits;
    assert_eq!(exits[1].exit, Exit::Panicked { message: "in a helper".into() });
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_another_is_told_when_it_is_ready_and_when_it_is_to_stop() {
    let dependency = Remote::default();
    let told = dependency.clone();
    let tree = Tree::of(move |ctx: Context| {
        let told = told.clone();
        async move {
            ctx.run("dependency", told)?;
            ctx.run("dependent", |ctx: Context| async move {
                ctx.wait_ready("root.dependency").await?;
                steady(ctx).await
            })?;
            ctx.run("lost", |ctx: Context| async move {
                let error = ctx.wait_ready("root.nowhere").await;
                assert_eq!(error, Err(WaitError::UnknownDn { dn: "root.nowhere".into() }));
                ctx.wait_ready("root.lost").await?;
                Ok::<(), Failure>(())
            })?;
            steady(ctx).await
        }
    });
    settle().await;
    assert_eq!(tree.supervisor.snapshot()[2].waiting_for, WaitingFor::Dependency("root.dependency".into()));
    dependency.fail("not yet").await;
    dependency.ready().await;
    settle().await;
    assert_eq!((tree.state("root.dependent"), tree.generation("root.dependent")), (Some(State::Ready), 1));
    tree.supervisor.stop("root.lost").expect("it is there");
    tree.recorder.until("root.lost", State::Canceled).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aborted_run_is_over_only_when_its_helpers_are() {
    let (alone, release) = (Alone::default(), Arc::new(AtomicBool::new(false)));
    let (child_alone, released) = (alone.clone(), Arc::clone(&release));
    let tree = Tree::of(move |ctx: Context| {
        let (alone, released) = (child_alone.clone(), Arc::clone(&released));
        async move {
            let deaf = move |ctx: Context| {
                let (alone, released) = (alone.clone(), Arc::clone(&released));
                async move {
                    ctx.spawn(async move {
                        let _inside = alone.enter();
                        while !released.load(Ordering::Relaxed) {
                            std::thread::yield_now();
                        }
                    })?;
                    ctx.ready()?;
                    std::future::pending::<Result<(), Failure>>().await
                }
            };
            ctx.run_group([Child::new("deaf", deaf).stop_within(Duration::from_millis(20))])?;
            steady(ctx).await
        }
    });
    tree.recorder.until("root.deaf", State::Ready).await;
    tree.supervisor.restart("root.deaf").expect("it is there");
    let straggling = |event: &nodekeel_supervisor::Event| {
        matches!(event.change, nodekeel_supervisor::Change::Straggling { .. })
    };
    while !tree.recorder.events().iter().any(straggling) {
        tokio::task::yield_now().await;
    }
    assert_eq!((tree.state("root.deaf"), tree.generation("root.deaf")), (Some(State::Ready), 1));
    release.store(true, Ordering::Relaxed);
    assert_eq!(tree.recorder.until("root.deaf", State::Ready).await.generation, 2);
}
