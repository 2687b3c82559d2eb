//! Runnables that violate the rules, and the effect on others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};
use nodekeel_supervisor::{
    AddChildError, CanceledError, ChildSpec, Context, ControlError, DependencyError, ExitReason, Failure,
    LifecycleSignalError, NameError, RunnableState, StaleContextError, WaitReadyError, WaitReason,
};

use crate::harness::{SingleRun, TestTree, steady};

// reference case 7
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_keeps_working_despite_every_kind_of_misbehavior() {
    let stop = Arc::new(AtomicBool::new(false));
    let (pings, one_sibling) = (RemoteRunnable::default(), RemoteRunnable::default());
    let (one, sibling, spinning) = (pings.clone(), one_sibling.clone(), Arc::clone(&stop));
    let tree = TestTree::with_children(move |ctx| {
        let (root, stop) = (ctx.clone(), Arc::clone(&spinning));
        ctx.run_child("with-foreign-context", move |_: Context| {
            let root = root.clone();
            async move {
                // Signals for another runnable, which is already ready: that one must not fail.
                let foreign = LifecycleSignalError::ForeignContext { dn: "root".into() };
                assert_eq!((root.signal_ready(), root.signal_done()), (Err(foreign.clone()), Err(foreign)));
                Err::<(), _>(Failure::new("nothing else to do"))
            }
        })?;
        ctx.run_child("done-before-ready", |ctx: Context| async move {
            ctx.signal_done()?;
            Ok::<(), Failure>(())
        })?;
        ctx.run_child("spins", move |_: Context| {
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
        ctx.run_child("grows", |ctx: Context| async move {
            for child in 0.. {
                ctx.run_child(format!("child-{child}"), steady)?;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok::<(), Failure>(())
        })?;
        ctx.run_group([ChildSpec::new("one", one.clone()), ChildSpec::new("one-sibling", sibling.clone())])
    });
    for round in 1..=5 {
        let answers = async {
            pings.signal_ready().await;
            one_sibling.panic("again").await;
            tree.recorder.wait_for_state("root.one", RunnableState::Canceled).await;
        };
        tokio::time::timeout(Duration::from_secs(20), answers)
            .await
            .unwrap_or_else(|_| panic!("stuck in round {round}"));
    }
    tokio::time::timeout(Duration::from_secs(1), pings.signal_ready())
        .await
        .expect("the runnable still answers");
    assert_eq!(tree.generation("root"), 1);
    stop.store(true, Ordering::Relaxed);
}

#[tokio::test(start_paused = true)]
async fn an_invalid_signal_order_is_an_error_and_ends_the_run_as_dead() {
    type Misuse = fn(&Context) -> LifecycleSignalError;
    let cases: [(Misuse, &str); 4] = [
        (
            |ctx| ctx.signal_done().expect_err("done before ready"),
            "root.child signaled done before ready: signal ready first",
        ),
        (
            |ctx| {
                ctx.signal_ready().expect("the first time");
                ctx.signal_ready().expect_err("twice")
            },
            "root.child signaled ready twice: a runnable may signal it once in a run",
        ),
        (
            |ctx| {
                ctx.signal_ready().expect("in order");
                ctx.signal_done().expect("in order");
                ctx.signal_done().expect_err("twice")
            },
            "root.child signaled done twice: a runnable may signal it once in a run",
        ),
        (
            |ctx| {
                ctx.signal_ready().expect("in order");
                ctx.signal_done().expect("in order");
                ctx.signal_ready().expect_err("after done")
            },
            "root.child signaled ready twice: a runnable may signal it once in a run",
        ),
    ];
    for (misuse, message) in cases {
        let tree = TestTree::with_children(move |ctx| {
            let child = move |ctx: Context| async move {
                assert_eq!(misuse(&ctx).to_string(), message);
                assert!(ctx.is_canceled(), "the context is canceled");
                // It continues regardless, and still ends as failed.
                Ok::<(), Failure>(())
            };
            ctx.run_child("child", child)
        });
        tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
        let child = &tree.supervisor.snapshot()[1];
        assert_eq!(child.exits[0].exit, ExitReason::InvalidSignal { error: message.into() });
    }
}

#[tokio::test(start_paused = true)]
async fn a_leaked_context_never_acts_for_the_next_incarnation() {
    let leaked = Arc::new(std::sync::Mutex::new(None::<Context>));
    let leak = Arc::clone(&leaked);
    let tree = TestTree::with_children(move |ctx| {
        let leak = Arc::clone(&leak);
        let child = move |ctx: Context| {
            leak.lock().expect("no panic holds it").get_or_insert(ctx.clone());
            async move {
                if ctx.generation() == 1 {
                    Err(Failure::new("the first one dies"))
                } else {
                    Err(ctx.canceled().await.into())
                }
            }
        };
        ctx.run_child("child", child)
    });
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    tree.recorder.wait_for_state("root.child", RunnableState::New).await;
    let stale = leaked.lock().expect("no panic holds it").clone().expect("it was leaked");
    assert!(stale.is_canceled());
    assert_eq!(stale.signal_ready(), Err(LifecycleSignalError::StaleContext));
    assert_eq!(stale.signal_done(), Err(LifecycleSignalError::StaleContext));
    assert_eq!(stale.run_child("x", steady), Err(AddChildError::Name(NameError::StaleContext)));
    assert_eq!(stale.sub_span("x").err(), Some(NameError::StaleContext));
    assert_eq!(stale.spawn_joined(async {}), Err(StaleContextError));
    assert_eq!(stale.wait_ready("root").await, Ok(()), "a stale context can still wait");
    assert_eq!(tree.latest_run("root.child"), (RunnableState::New, 2));
}

#[tokio::test(start_paused = true)]
async fn a_group_with_one_invalid_member_is_rejected_whole() {
    let tree = TestTree::with_root(|ctx: Context| async move {
        ctx.run_child("taken", steady)?;
        let taken = |name: &str| {
            AddChildError::Name(NameError::AlreadyInUse { name: name.into(), parent: "root".into() })
        };
        assert_eq!(
            ctx.run_group([ChildSpec::new("new", steady), ChildSpec::new("taken", steady)]),
            Err(taken("taken"))
        );
        assert_eq!(
            ctx.run_group([ChildSpec::new("twin", steady), ChildSpec::new("twin", steady)]),
            Err(taken("twin"))
        );
        let invalid = AddChildError::Name(NameError::Invalid { name: "UPPER.with dots!x".into() });
        assert_eq!(ctx.run_child("UPPER.with dots!x", steady), Err(invalid));
        ctx.signal_ready()?;
        Err::<(), Failure>(ctx.canceled().await.into())
    });
    settle().await;
    let dns: Vec<String> = tree.supervisor.snapshot().iter().map(|node| node.dn.to_string()).collect();
    assert_eq!(dns, ["root", "root.taken"]);
    assert_eq!(tree.state("root"), Some(RunnableState::Ready));
}

#[tokio::test(start_paused = true)]
async fn a_canceled_runnable_cannot_add_children() {
    let tree = TestTree::with_children(move |ctx| {
        let late = |ctx: Context| async move {
            let canceled = ctx.canceled().await;
            assert_eq!(ctx.run_child("child", steady), Err(AddChildError::Canceled(canceled)));
            Err::<(), Failure>(canceled.into())
        };
        ctx.run_child("late", late)
    });
    settle().await;
    tree.supervisor.restart_runnable("root.late").expect("the DN exists");
    let canceled = tree.recorder.wait_for_state("root.late", RunnableState::Canceled).await;
    assert_eq!(canceled.generation, 1);
}

#[tokio::test(start_paused = true)]
async fn a_canceled_error_without_a_cancellation_is_a_failure() {
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("liar", |_: Context| async { Err::<(), _>(CanceledError) })
    });
    tree.recorder.wait_for_state("root.liar", RunnableState::Dead).await;
}

#[tokio::test(start_paused = true)]
async fn helpers_are_joined_and_their_panics_fail_the_runnable() {
    let ended = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&ended);
    let tree = TestTree::with_children(move |ctx| {
        let count = Arc::clone(&count);
        let with_helpers = move |ctx: Context| {
            let count = Arc::clone(&count);
            async move {
                let helper = ctx.clone();
                ctx.spawn_joined(async move {
                    let _canceled = helper.canceled().await;
                    tokio::time::sleep(Duration::from_secs(3)).await;
                    count.fetch_add(1, Ordering::SeqCst);
                })?;
                if ctx.generation() == 2 {
                    ctx.spawn_joined(async { panic!("in a helper") })?;
                    return Err(ctx.canceled().await.into());
                }
                Err(Failure::new("the runnable itself fails"))
            }
        };
        ctx.run_child("child", with_helpers)
    });
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    assert_eq!(ended.load(Ordering::SeqCst), 1, "the run ended before its helper");
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    assert_eq!(ended.load(Ordering::SeqCst), 2, "the run ended before its helper");
    let exits = &tree.supervisor.snapshot()[1].exits;
    assert_eq!(exits[1].exit, ExitReason::Panicked { message: "in a helper".into() });
}

#[tokio::test(start_paused = true)]
async fn a_dependent_resumes_when_its_dependency_is_ready_or_when_it_is_canceled() {
    let dependency = RemoteRunnable::default();
    let remote = dependency.clone();
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("dependency", remote.clone())?;
        ctx.run_child("dependent", |ctx: Context| async move {
            ctx.wait_ready("root.dependency").await?;
            steady(ctx).await
        })?;
        ctx.run_child("lost", |ctx: Context| async move {
            ctx.run_child("never", |ctx: Context| async move { ctx.until_canceled().await })?;
            ctx.wait_ready("never").await?;
            Ok::<(), Failure>(())
        })
    });
    settle().await;
    assert_eq!(tree.supervisor.snapshot()[2].waiting_for, WaitReason::Dependency("root.dependency".into()));
    dependency.fail("not yet").await;
    dependency.signal_ready().await;
    settle().await;
    assert_eq!(tree.latest_run("root.dependent"), (RunnableState::Ready, 1));
    tree.supervisor.stop_runnable("root.lost").expect("the DN exists");
    tree.recorder.wait_for_state("root.lost", RunnableState::Canceled).await;
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_a_runnable_that_can_not_come_is_rejected() {
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("lost", |ctx: Context| async move {
            ctx.run_child("below", steady)?;
            assert_eq!(ctx.wait_ready("below").await, Ok(()));
            for text in ["nowhere", "root.lost.nowhere"] {
                let unknown = WaitReadyError::UnknownDn { dn: "root.lost.nowhere".into() };
                assert_eq!(ctx.wait_ready(text).await, Err(unknown));
            }
            for invalid in ["", "root.", "lost.below", "root.UPPER"] {
                let error = WaitReadyError::InvalidDn { dn: invalid.into() };
                assert_eq!(ctx.wait_ready(invalid).await, Err(error));
            }
            steady(ctx).await
        })
    });
    assert_eq!(tree.supervisor.wait_ready("root.lost").await, Ok(()));
    let error = WaitReadyError::InvalidDn { dn: "lost".into() };
    assert_eq!(tree.supervisor.wait_ready("lost").await, Err(error));
}

#[tokio::test(start_paused = true)]
async fn a_dependency_that_can_not_come_is_rejected() {
    let on_itself = |dependency: &str| DependencyError::OnItself {
        child: "root.a".into(),
        dependency: dependency.into(),
    };
    let invalid =
        |dependency: &str| DependencyError::Invalid { child: "root.a".into(), dependency: dependency.into() };
    let cases = [
        ("a", on_itself("root.a")),
        ("root.a", on_itself("root.a")),
        ("root.a.below", on_itself("root.a.below")),
        ("", invalid("")),
        ("b.c", invalid("b.c")),
        ("root..b", invalid("root..b")),
    ];
    let rejected = cases.clone();
    let tree = TestTree::with_children(move |ctx| {
        for (dependency, error) in &rejected {
            let child = || ChildSpec::new("a", steady).depends_on([*dependency]);
            let error = Err(AddChildError::Dependency(error.clone()));
            assert_eq!(ctx.run_group([ChildSpec::new("b", steady), child()]), error, "{dependency}");
        }
        let typo = ChildSpec::new("a", steady).stop_before(["root/b"]);
        let error = DependencyError::Invalid { child: "root.a".into(), dependency: "root/b".into() };
        assert_eq!(ctx.run_child_with(typo), Err(AddChildError::Dependency(error)));
        // Others, which only begin like it, are none of these.
        ctx.run_child_with(ChildSpec::new("a", steady).depends_on(["ab", "root.ab.c"]))
    });
    settle().await;
    assert_eq!(tree.supervisor.snapshot().len(), 2, "a rejected group has left nothing behind");
    assert_eq!(tree.status("root.a").map(|a| a.waiting_for), Some(WaitReason::Dependency("root.ab".into())));
    for (dependency, error) in cases {
        let child = ChildSpec::new("a", steady).depends_on([dependency]);
        assert_eq!(tree.supervisor.add_child("root", child), Err(ControlError::Dependency(error)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aborted_run_ends_only_with_its_helpers() {
    let (alone, release) = (SingleRun::default(), Arc::new(AtomicBool::new(false)));
    let (child_alone, released) = (alone.clone(), Arc::clone(&release));
    let tree = TestTree::with_children(move |ctx| {
        let (alone, released) = (child_alone.clone(), Arc::clone(&released));
        let deaf = move |ctx: Context| {
            let (alone, released) = (alone.clone(), Arc::clone(&released));
            async move {
                ctx.spawn_joined(async move {
                    let _inside = alone.enter();
                    while !released.load(Ordering::Relaxed) {
                        std::thread::yield_now();
                    }
                })?;
                ctx.signal_ready()?;
                std::future::pending::<Result<(), Failure>>().await
            }
        };
        ctx.run_child_with(ChildSpec::new("deaf", deaf).stop_timeout(Duration::from_millis(20)))
    });
    tree.recorder.wait_for_state("root.deaf", RunnableState::Ready).await;
    tree.supervisor.restart_runnable("root.deaf").expect("the DN exists");
    let straggling = |event: &nodekeel_supervisor::Event| {
        matches!(event.change, nodekeel_supervisor::RunnableChange::Straggling { .. })
    };
    while !tree.recorder.events().iter().any(straggling) {
        tokio::task::yield_now().await;
    }
    assert_eq!(tree.latest_run("root.deaf"), (RunnableState::Ready, 1));
    release.store(true, Ordering::Relaxed);
    assert_eq!(tree.recorder.wait_for_state("root.deaf", RunnableState::Ready).await.generation, 2);
}
