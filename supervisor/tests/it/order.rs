//! Order: what starts after what is ready, and what stops before what.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use nodekeel_supervisor::testing::{RemoteRunnable, settle};
use nodekeel_supervisor::{
    ChildSpec, Context, Failure, Removal, Runnable, RunnableChange, RunnableState, Supervisor,
    WaitReadyError, WaitReason,
};
use tokio::time::Instant;

use crate::harness::{TestTree, done, parent_of, slow_to_stop, steady};

/// A runnable that needs a second to stop.
fn slow() -> impl Runnable {
    slow_to_stop(Duration::from_secs(1))
}

/// A tree with these children below the root.
fn tree_of(children: impl Fn() -> Vec<ChildSpec> + Send + Sync + 'static) -> TestTree {
    TestTree::with_children(move |ctx| children().into_iter().try_for_each(|child| ctx.run_group([child])))
}

async fn seconds_to_shut_down(supervisor: &Supervisor) -> u64 {
    let started = Instant::now();
    assert!(supervisor.shutdown().await.stragglers.is_empty());
    started.elapsed().as_secs()
}

#[tokio::test(start_paused = true)]
async fn independent_runnables_stop_at_once() {
    let tree = tree_of(|| (0..100).map(|n| ChildSpec::new(format!("n{n}"), slow())).collect());
    settle().await;
    assert_eq!(seconds_to_shut_down(&tree.supervisor).await, 1);
}

#[tokio::test(start_paused = true)]
async fn a_chain_stops_one_by_one_from_its_end() {
    let tree = tree_of(|| {
        let chain = (0..10).map(|n| {
            let before = (n > 0).then(|| format!("n{}", n - 1));
            ChildSpec::new(format!("n{n}"), slow()).depends_on(before)
        });
        chain.collect()
    });
    settle().await;
    assert_eq!(seconds_to_shut_down(&tree.supervisor).await, 10);
    let expected: Vec<String> = (0..10).rev().map(|n| format!("root.n{n}")).collect();
    assert_eq!(tree.stopped()[..10], expected);
}

// A dependency includes the subtree below it.
#[tokio::test(start_paused = true)]
async fn a_dependent_stops_before_the_whole_subtree_that_it_depends_on() {
    let tree = tree_of(|| {
        let parent = parent_of(|ctx| ctx.run_child("child", slow()));
        let dependent = ChildSpec::new("dependent", slow()).stop_before(["root.parent"]);
        vec![dependent, ChildSpec::new("parent", parent)]
    });
    settle().await;
    assert_eq!(seconds_to_shut_down(&tree.supervisor).await, 2);
    assert_eq!(tree.stopped()[..2], ["root.dependent", "root.parent.child"]);
}

/// Opens a file, which runnables below it keep: one that runs, one that waits for its next start, and one that is done.
async fn open_file(ctx: Context, opened: Arc<Mutex<Weak<()>>>) -> Result<(), Failure> {
    let file = Arc::new(());
    *opened.lock().expect("no panic holds it") = Arc::downgrade(&file);
    let (running, waiting) = (Arc::clone(&file), Arc::clone(&file));
    ctx.run_child("running", move |ctx: Context| {
        let _kept = &running;
        steady(ctx)
    })?;
    ctx.run_child("waiting", move |_: Context| {
        let _kept = &waiting;
        std::future::ready(Err::<(), Failure>(Failure::new("the disk is full")))
    })?;
    ctx.run_child("done", move |ctx: Context| {
        let _kept = &file;
        done(ctx)
    })?;
    steady(ctx).await
}

// Otherwise, an unmount would find the file in use.
#[tokio::test(start_paused = true)]
async fn what_runnables_keep_is_dropped_before_what_stops_after_them_is_canceled() {
    let (opened, users) = (Arc::<Mutex<Weak<()>>>::default(), Arc::<Mutex<Vec<usize>>>::default());
    let (file, counted) = (Arc::clone(&opened), Arc::clone(&users));
    let tree = tree_of(move || {
        let opened = Arc::clone(&opened);
        let dependent = move |ctx: Context| open_file(ctx, Arc::clone(&opened));
        let (file, counted) = (Arc::clone(&file), Arc::clone(&counted));
        let volume = move |ctx: Context| {
            let (file, counted) = (Arc::clone(&file), Arc::clone(&counted));
            async move {
                ctx.signal_ready()?;
                let canceled = ctx.canceled().await;
                let users = file.lock().expect("no panic holds it").strong_count();
                counted.lock().expect("no panic holds it").push(users);
                Err::<(), Failure>(canceled.into())
            }
        };
        let dependent = ChildSpec::new("dependent", dependent).depends_on(["root.volume"]);
        vec![dependent, ChildSpec::new("volume", volume)]
    });
    tree.recorder.wait_for_state("root.dependent.waiting", RunnableState::Waiting).await;
    assert!(tree.supervisor.shutdown().await.stragglers.is_empty());
    assert_eq!(*users.lock().expect("no panic holds it"), [0]);
}

#[tokio::test(start_paused = true)]
async fn a_cycle_stops_nevertheless() {
    let tree = tree_of(|| {
        let child = |name, before| ChildSpec::new(name, slow()).stop_before([before]);
        vec![child("a", "b"), child("b", "a"), child("c", "root.a")]
    });
    settle().await;
    assert_eq!(seconds_to_shut_down(&tree.supervisor).await, 1 + 1, "c, then the cycle");
}

#[tokio::test(start_paused = true)]
async fn a_runnable_starts_when_what_it_depends_on_is_ready_also_if_that_is_added_later() {
    let (needed, below) = (RemoteRunnable::default(), RemoteRunnable::default());
    let remotes = (needed.clone(), below.clone());
    let tree = tree_of(move || {
        let (needed, below) = remotes.clone();
        let parent = parent_of(move |ctx| ctx.run_child("below", below.clone()));
        vec![
            ChildSpec::new("dependent", steady).depends_on(["needed", "root.parent.below"]),
            ChildSpec::new("needed", needed),
            ChildSpec::new("parent", parent),
        ]
    });
    settle().await;
    let dependent = |tree: &TestTree| tree.supervisor.snapshot()[1].clone();
    assert_eq!(dependent(&tree).waiting_for, WaitReason::Dependency("root.needed".into()));
    needed.signal_ready().await;
    settle().await;
    assert_eq!(dependent(&tree).waiting_for, WaitReason::Dependency("root.parent.below".into()));
    below.signal_ready().await;
    tree.recorder.wait_for_state("root.dependent", RunnableState::Ready).await;
    assert_eq!(dependent(&tree).generation, 1, "it has not failed in between");
    needed.fail("gone").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(dependent(&tree).generation, 1, "readiness counts at the start only");
}

// Otherwise, after a restart of both, the dependent's new run would use what is about to go away.
#[tokio::test(start_paused = true)]
async fn a_dependent_does_not_start_on_a_dependency_that_is_stopping() {
    let late = RemoteRunnable::default();
    let remote = late.clone();
    let tree = tree_of(move || {
        let remote = remote.clone();
        let ready_when_canceled = move |ctx: Context| {
            let remote = remote.clone();
            async move {
                if ctx.generation() > 1 {
                    return remote.run(ctx).await;
                }
                let canceled = ctx.canceled().await;
                ctx.signal_ready()?;
                tokio::time::sleep(Duration::from_secs(1)).await;
                Err::<(), Failure>(canceled.into())
            }
        };
        vec![
            ChildSpec::new("slow", slow()),
            ChildSpec::new("late", ready_when_canceled),
            ChildSpec::new("of-slow", steady).depends_on(["root.slow"]),
            ChildSpec::new("of-late", steady).depends_on(["root.late"]),
        ]
    });
    settle().await;
    assert_eq!(tree.state("root.of-slow"), Some(RunnableState::Ready));
    for dn in ["root.slow", "root.late", "root.of-slow"] {
        tree.supervisor.restart_runnable(dn).expect("the DN exists");
    }
    settle().await;
    let waits = || {
        let snapshot = tree.supervisor.snapshot();
        [3, 4].map(|index| snapshot[index].waiting_for.to_string())
    };
    assert_eq!(tree.state("root.slow"), Some(RunnableState::Ready), "it is cleaning up");
    assert_eq!(waits(), ["root.slow to become ready", "root.late to become ready"]);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(waits(), ["nothing", "root.late to become ready"], "the next run of slow is ready");
    late.signal_ready().await;
    settle().await;
    assert_eq!(waits(), ["nothing", "nothing"]);
}

#[tokio::test(start_paused = true)]
async fn the_supervisor_waits_for_a_runnable_that_is_not_in_the_tree_yet_and_not_beyond_its_shutdown() {
    let late = RemoteRunnable::default();
    let child = late.clone();
    let tree = tree_of(move || vec![ChildSpec::new("late", child.clone())]);
    let (ready, ()) = tokio::join!(tree.supervisor.wait_ready("root.late"), late.signal_ready());
    assert_eq!(ready, Ok(()));
    assert_eq!(tree.supervisor.wait_ready("root.late").await, Ok(()));
    let (never, _) = tokio::join!(tree.supervisor.wait_ready("root.never"), tree.supervisor.shutdown());
    assert!(matches!(never, Err(WaitReadyError::Canceled(_))));
    assert!(matches!(tree.supervisor.wait_ready("root.never").await, Err(WaitReadyError::Canceled(_))));
}

/// In each way in which readiness is lost: a report, an exit, a stop, and a removal.
#[tokio::test(start_paused = true)]
async fn a_dependent_restarts_with_its_dependencies_if_it_says_so() {
    let needed = RemoteRunnable::default();
    let tree = TestTree::with_root(parent_of({
        let needed = needed.clone();
        move |ctx| {
            let dependent = |name| ChildSpec::new(name, steady).depends_on(["needed", "other"]);
            ctx.run_child("other", steady)?;
            ctx.run_child("needed", needed.clone())?;
            ctx.run_child_with(dependent("bound").restart_with_dependencies())?;
            ctx.run_child_with(dependent("free"))
        }
    }));
    needed.signal_ready().await;
    settle().await;
    let status = |name: &str| tree.status(&format!("root.{name}")).expect("it is in the tree");
    let waits = || match status("bound").waiting_for {
        WaitReason::Dependency(dn) => dn.to_string(),
        other => panic!("{other}"),
    };
    let mut runs = 1;
    for how in ["report", "exit", "operator", "withheld"] {
        assert_eq!(
            (status("bound").state, status("bound").generation),
            (RunnableState::Ready, runs),
            "{how}"
        );
        match how {
            "report" => tree.supervisor.restart_runnable("root.needed").expect("it runs"),
            "exit" => needed.fail("gone").await,
            "operator" => tree.supervisor.stop_runnable("root.needed").expect("it runs"),
            _ => tree.supervisor.withhold_ready("root.needed", Some("frozen".into())).expect("it runs"),
        }
        settle().await;
        runs += 1;
        assert_eq!((waits(), status("bound").generation), ("root.needed".to_owned(), runs), "{how}");
        match how {
            "operator" => tree.supervisor.start_runnable("root.needed").expect("it is stopped"),
            "withheld" => tree.supervisor.withhold_ready("root.needed", None).expect("it runs"),
            _ => {}
        }
        if how != "withheld" {
            needed.signal_ready().await;
        }
        settle().await;
    }
    let bound = status("bound");
    assert_eq!((bound.state, bound.generation, bound.failures), (RunnableState::Ready, runs, 0));
    let (removal, _) =
        tokio::join!(tree.supervisor.remove_runnable("root.other", Removal::ForGood), settle());
    removal.expect("it is in the tree");
    assert_eq!(waits(), "root.other");
    assert_eq!(status("free").generation, 1, "readiness counts at its start only");
    let causes = tree.recorder.events().into_iter().filter(|event| &*event.dn == "root.bound");
    let causes: Vec<_> = causes
        .filter_map(|event| match event.change {
            RunnableChange::Canceling { cause } => Some(cause.to_string()),
            _ => None,
        })
        .collect();
    assert_eq!(causes.len(), 5);
    assert_eq!(causes[0], "its dependency root.needed is no longer ready");
}

#[tokio::test(start_paused = true)]
async fn a_dependent_starts_only_while_all_that_it_depends_on_are_ready() {
    let (first, second) = (RemoteRunnable::default(), RemoteRunnable::default());
    let tree = TestTree::with_children({
        let (first, second) = (first.clone(), second.clone());
        move |ctx| {
            ctx.run_child("first", first.clone())?;
            ctx.run_child("second", second.clone())?;
            ctx.run_child_with(ChildSpec::new("dependent", steady).depends_on(["first", "second"]))
        }
    });
    first.signal_ready().await;
    settle().await;
    tree.supervisor.restart_runnable("root.first").expect("it runs");
    settle().await;
    second.signal_ready().await;
    settle().await;
    let status = tree.status("root.dependent").expect("it is in the tree");
    assert_eq!(status.waiting_for, WaitReason::Dependency("root.first".into()));
    first.signal_ready().await;
    settle().await;
    assert_eq!(tree.state("root.dependent"), Some(RunnableState::Ready));
}
