//! Restart limits, and the end of a tree.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};
use nodekeel_supervisor::{
    Backoff, ChildPolicy, ChildSpec, Context, ExitReason, Failure, RestartLimit, RestartLimitAction,
    RestartPolicy, RunnableState, Supervisor,
};
use rustix::process::{Signal, getpid, kill_process};
use tokio::time::timeout;

use crate::harness::{TestTree, done, parent_of, steady};

const LIMIT: RestartLimit =
    RestartLimit { restarts: 2, period: Duration::from_secs(10), action: RestartLimitAction::FailParent };

fn limited() -> ChildPolicy {
    ChildPolicy { backoff: Backoff::NONE, restart_limit: Some(LIMIT), ..ChildPolicy::default() }
}

/// A parent with a child of limited restarts. The parent is done if `is_done`.
fn tree_with_limited_child(child: RemoteRunnable, is_done: bool) -> TestTree {
    TestTree::with_children(move |ctx| {
        let child = child.clone();
        let parent = move |ctx: Context| {
            let child = child.clone();
            async move {
                ctx.run_child_with(ChildSpec::new("child", child).policy(limited()))?;
                if is_done { done(ctx).await } else { steady(ctx).await }
            }
        };
        ctx.run_child("parent", parent)
    })
}

#[tokio::test(start_paused = true)]
async fn a_child_that_exceeds_its_restart_limit_fails_its_parent_running_or_done() {
    for is_done in [false, true] {
        let child = RemoteRunnable::default();
        let tree = tree_with_limited_child(child.clone(), is_done);
        for _ in 0..=LIMIT.restarts {
            child.fail("gone").await;
        }
        let failed = tree.recorder.wait_for_state("root.parent", RunnableState::Dead).await;
        assert!(
            failed
                .change
                .to_string()
                .ends_with("child root.parent.child failed more than 2 times within 10s"),
            "{}",
            failed.change
        );
        let child_states = tree.recorder.states_of("root.parent.child");
        assert_eq!(child_states.iter().filter(|state| **state == RunnableState::New).count(), 3);
        tree.recorder.wait_for_state("root.parent", RunnableState::New).await;
        settle().await;
        let generations = ["root", "root.parent", "root.parent.child"].map(|dn| tree.generation(dn));
        assert_eq!(generations, [1, 2, 4]);
        child.fail("gone").await;
        settle().await;
        assert_eq!(tree.generation("root.parent"), 2, "a restarted parent's children have new counts");
    }
}

#[tokio::test(start_paused = true)]
async fn restarts_beyond_the_period_do_not_count() {
    let child = RemoteRunnable::default();
    let tree = tree_with_limited_child(child.clone(), false);
    for _ in 0..10 {
        child.fail("gone").await;
        tokio::time::sleep(LIMIT.period / 2).await;
    }
    assert_eq!((tree.generation("root.parent"), tree.generation("root.parent.child")), (1, 11));
}

#[tokio::test(start_paused = true)]
async fn a_tree_has_ended_when_its_root_is_dead_for_good() {
    let root = RemoteRunnable::default();
    let policy = ChildPolicy { restart: RestartPolicy::Never, ..ChildPolicy::default() };
    let supervisor = Supervisor::builder().default_policy(policy).start(root.clone());
    settle().await;
    assert!(timeout(Duration::from_secs(60), supervisor.ended()).await.is_err(), "it is running");
    root.fail("disk gone").await;
    let exit = supervisor.ended().await;
    assert_eq!(exit, ExitReason::Failed { error: "disk gone".into(), process: None });
    assert!(supervisor.shutdown().await.stragglers.is_empty());
    assert_eq!(supervisor.ended().await, exit);
}

#[tokio::test(start_paused = true)]
async fn a_tree_has_not_ended_while_a_child_of_a_done_root_runs_or_backs_off() {
    let child = RemoteRunnable::default();
    let remote = child.clone();
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let child = remote.clone();
        async move {
            ctx.run_child("child", child)?;
            done(ctx).await
        }
    });
    settle().await;
    child.fail("gone").await;
    assert!(timeout(Duration::from_millis(100), supervisor.ended()).await.is_err(), "it backs off");
    assert!(timeout(Duration::from_secs(60), supervisor.ended()).await.is_err(), "it runs");
    child.signal_ready().await;
    child.signal_done().await;
    child.return_ok().await;
    assert_eq!(supervisor.ended().await, ExitReason::Done);
}

#[tokio::test(start_paused = true)]
async fn a_root_that_exceeds_its_restart_limit_ends_the_tree() {
    let root = RemoteRunnable::default();
    let supervisor = Supervisor::builder().default_policy(limited()).start(root.clone());
    for _ in 0..=LIMIT.restarts {
        root.fail("gone").await;
    }
    supervisor.ended().await;
    assert_eq!(supervisor.snapshot()[0].generation, 3);
}

#[tokio::test(start_paused = true)]
async fn a_child_that_exceeds_its_limit_can_stay_dead_until_it_is_started_with_a_new_count() {
    let child = RemoteRunnable::default();
    let failing = child.clone();
    let tree = TestTree::with_children(move |ctx| {
        let limit = RestartLimit { action: RestartLimitAction::StayDead, ..LIMIT };
        let policy = ChildPolicy { restart_limit: Some(limit), ..limited() };
        ctx.run_child_with(ChildSpec::new("child", failing.clone()).policy(policy))?;
        ctx.run_child("other", steady)
    });
    for round in 1..=2_u64 {
        for _ in 0..=LIMIT.restarts {
            child.fail("again").await;
            settle().await;
        }
        assert_eq!(tree.state("root.child"), Some(RunnableState::Dead));
        assert_eq!(tree.generation("root.child"), round * 3);
        assert_eq!((tree.generation("root.other"), tree.generation("root")), (1, 1));
        tree.supervisor.start_runnable("root.child").expect("the DN exists");
        settle().await;
        assert_eq!(tree.state("root.child"), Some(RunnableState::New));
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_stops_a_parent_when_what_its_children_held_is_released() {
    let held = Arc::new(());
    let (left, found) = (Arc::downgrade(&held), Arc::new(Mutex::new(None)));
    let (held, result) = (Mutex::new(Some(held)), Arc::clone(&found));
    let supervisor = Supervisor::builder().start(move |ctx: Context| {
        let held = held.lock().expect("no panic holds it").take().expect("one run");
        let (left, result) = (left.clone(), Arc::clone(&result));
        async move {
            ctx.run_child("child", move |ctx: Context| {
                let _ = &held;
                steady(ctx)
            })?;
            ctx.signal_ready()?;
            let canceled = ctx.canceled().await;
            *result.lock().expect("no panic holds it") = Some(left.strong_count());
            Err::<(), Failure>(canceled.into())
        }
    });
    settle().await;
    assert!(supervisor.shutdown().await.stragglers.is_empty());
    assert_eq!(*found.lock().expect("no panic holds it"), Some(0));
}

/// Without a delay, each restart is dropped at once, and asks for the next.
#[test]
fn a_runtime_that_stops_ends_the_tree_also_where_restarts_have_no_delay() {
    let (ended, has_ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let supervisor = runtime.block_on(async {
            let policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
            let supervisor = Supervisor::builder()
                .default_policy(policy)
                .start(parent_of(move |ctx| ctx.run_child("child", steady)));
            supervisor.wait_ready("root.child").await.expect("it runs");
            supervisor
        });
        drop(runtime);
        let running = supervisor.snapshot().into_iter().filter(|status| status.state.is_running());
        ended.send(running.count()).expect("the test waits");
    });
    assert_eq!(has_ended.recv_timeout(Duration::from_secs(60)), Ok(0), "it restarts without an end");
}

#[tokio::test]
async fn one_call_runs_a_tree_until_a_signal_or_its_end() {
    let raise = |signal| kill_process(getpid(), signal).expect("a process may signal itself");
    let signaled = move |ctx: Context| async move {
        ctx.signal_ready()?;
        raise(Signal::TERM);
        ctx.until_canceled().await
    };
    let report = Supervisor::builder().run_until_signal(signaled).await.expect("the handlers are installed");
    assert!(report.is_clean(), "{report:?}");
    let report = Supervisor::builder().run_until_signal(done).await.expect("the handlers are installed");
    assert!(report.is_clean(), "{report:?}");
    let deaf = move |ctx: Context| async move {
        raise(Signal::TERM);
        ctx.canceled().await;
        // A signal before that is a duplicate of the first.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        raise(Signal::INT);
        std::future::pending::<Result<(), Failure>>().await
    };
    let report = Supervisor::builder().run_until_signal(deaf).await.expect("the handlers are installed");
    assert!(report.is_forced && !report.is_clean(), "{report:?}");
    assert_eq!(report.problems().collect::<Vec<_>>(), ["a second signal forced the exit"]);
}
