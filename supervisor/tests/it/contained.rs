//! Code of others that panics in unexpected places, and hooks that are too slow.

use std::fmt;
use std::future::Future;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};
use std::task::Poll;
use std::time::Duration;

use nodekeel_supervisor::process::Process;
use nodekeel_supervisor::testing::{EventRecorder, RemoteRunnable, settle};
use nodekeel_supervisor::{
    Backoff, ChildPolicy, ChildSpec, Context, Event, ExitReason, Failure, MAX_ERROR_BYTES, OutputOrigin,
    OutputSink, RunFuture, Runnable, RunnableState, Supervisor,
};

use crate::harness::{TestTree, done, parent_of, steady};

/// Panics when it is dropped.
#[derive(Debug)]
struct PanicsInDrop(&'static str);

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        panic!("{} is dropped", self.0);
    }
}

impl Runnable for PanicsInDrop {
    fn run(&self, ctx: Context) -> RunFuture {
        Box::pin(steady(ctx))
    }
}

fn two_that_panic_in_drop() -> [ChildSpec; 2] {
    [ChildSpec::new("one", PanicsInDrop("one")), ChildSpec::new("two", PanicsInDrop("two"))]
}

#[tokio::test(start_paused = true)]
async fn runnables_that_panic_in_their_drop_do_not_abort_the_program() {
    let parent = RemoteRunnable::default();
    let tree = TestTree::with_parent(&parent, |ctx| ctx.run_group(two_that_panic_in_drop()));
    settle().await;
    assert_eq!(tree.state("root.parent.two"), Some(RunnableState::Ready));
    parent.fail("gone").await;
    tree.recorder.wait_for_state("root.parent", RunnableState::Dead).await;
    // The restart forgets both, and adds two new ones.
    tree.recorder.wait_for_state("root.parent.two", RunnableState::Ready).await;
    assert_eq!(tree.generation("root.parent.two"), 2);
    assert_eq!(tree.generation("root"), 1);
    assert!(tree.supervisor.shutdown().await.stragglers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_rejected_group_that_panics_in_its_drops_fails_only_as_rejected() {
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("late", |ctx: Context| async move {
            ctx.run_child("two", steady)?;
            ctx.run_group(two_that_panic_in_drop())?;
            Ok::<(), Failure>(())
        })
    });
    let dead = tree.recorder.wait_for_state("root.late", RunnableState::Dead).await;
    assert!(dead.change.to_string().contains("two"), "{}", dead.change);
}

/// A future that panics, and again when it is dropped.
struct PanicsTwice;

impl Future for PanicsTwice {
    type Output = Result<(), Failure>;

    fn poll(self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> Poll<Self::Output> {
        panic!("in its poll");
    }
}

impl Drop for PanicsTwice {
    fn drop(&mut self) {
        panic!("in its drop");
    }
}

#[tokio::test(start_paused = true)]
async fn a_future_that_panics_in_its_poll_and_its_drop_fails_its_runnable() {
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("child", |_: Context| PanicsTwice)?;
        ctx.run_child("boxed", Boxed)
    });
    for child in ["root.child", "root.boxed"] {
        let dead = tree.recorder.wait_for_state(child, RunnableState::Dead).await;
        assert!(dead.change.to_string().contains("panicked: in its "), "{}", dead.change);
    }
}

#[tokio::test(start_paused = true)]
async fn a_helper_that_panics_in_its_poll_and_its_drop_fails_its_runnable() {
    /// Has the output of a helper.
    struct Helper(PanicsTwice);

    impl Future for Helper {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, task: &mut std::task::Context<'_>) -> Poll<()> {
            Pin::new(&mut self.0).poll(task).map(drop)
        }
    }

    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("child", |ctx: Context| async move {
            ctx.spawn_joined(Helper(PanicsTwice))?;
            steady(ctx).await
        })
    });
    let dead = tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    assert!(dead.change.to_string().contains("panicked: in its "), "{}", dead.change);
}

/// A runnable that returns its future as it is.
struct Boxed;

impl Runnable for Boxed {
    fn run(&self, _: Context) -> RunFuture {
        Box::pin(PanicsTwice)
    }
}

/// A writer, and a sink, that panic in their drop; the writer in each write, too.
struct HostileOutput(#[expect(dead_code, reason = "dropped")] PanicsInDrop);

impl Write for HostileOutput {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        panic!("in a write");
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl OutputSink for HostileOutput {
    fn open_writer(&self, _: OutputOrigin<'_>) -> Box<dyn Write + Send> {
        Box::new(Self(PanicsInDrop("writer")))
    }
}

/// Runs a process that writes more than a pipe holds, and returns its exit.
async fn exit_of_writer(sink: impl OutputSink) -> String {
    let recorder = EventRecorder::default();
    let builder = Supervisor::builder().event_hook(recorder.clone());
    let supervisor = builder.output_sink(sink).start(parent_of(move |ctx| {
        let script = "echo line; head -c 300000 /dev/zero; exit 3";
        ctx.run_child("writer", Process::new("/bin/sh").args(["-c", script]).env("PATH", "/usr/bin:/bin"))
    }));
    let dead = recorder.wait_for_state("root.writer", RunnableState::Dead).await;
    assert!(supervisor.shutdown().await.is_clean());
    dead.change.to_string()
}

#[tokio::test]
async fn an_output_sink_that_panics_everywhere_loses_only_output_and_is_named_in_the_exit() {
    let exit = exit_of_writer(HostileOutput(PanicsInDrop("sink"))).await;
    assert_eq!(exit, "dead: exited with code 3; the output sink panicked: in a write");
    let opens_nothing = |_: OutputOrigin<'_>| -> io::Sink { panic!("no room") };
    let exit = exit_of_writer(opens_nothing).await;
    assert_eq!(exit, "dead: exited with code 3; the output sink panicked: no room");
}

/// An error of others. Its `Display` panics, and so does its drop.
#[derive(Debug)]
struct HostileError {
    #[expect(dead_code, reason = "printed by Debug")]
    disk: &'static str,
}

impl fmt::Display for HostileError {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        panic!("no words");
    }
}

impl std::error::Error for HostileError {}

impl Drop for HostileError {
    fn drop(&mut self) {
        panic!("an error is dropped");
    }
}

async fn exit_of(error: fn() -> Failure) -> ExitReason {
    let tree = TestTree::with_children(move |ctx| {
        ctx.run_child("child", move |_: Context| async move { Err::<(), _>(error()) })
    });
    tree.recorder.wait_for_state("root.child", RunnableState::Dead).await;
    let child = tree.supervisor.snapshot().into_iter().find(|node| &*node.dn == "root.child");
    child.expect("it is in the tree").exits[0].exit.clone()
}

#[tokio::test(start_paused = true)]
async fn an_error_whose_display_panics_is_recorded_as_itself_with_a_note() {
    let exit = exit_of(|| Failure::new(HostileError { disk: "sda" })).await;
    let text = r#"HostileError { disk: "sda" } (its Display panicked: no words)"#;
    assert_eq!(exit.to_string(), text);
    // As a cause, too.
    let exit = exit_of(|| Failure::new(std::io::Error::other(HostileError { disk: "sdb" }))).await;
    assert!(exit.to_string().contains("sdb") && exit.to_string().contains("no words"), "{exit}");
}

#[tokio::test(start_paused = true)]
async fn the_text_of_an_error_is_bounded_and_says_so() {
    let exit = exit_of(|| Failure::new("ü".repeat(1 << 20))).await.to_string();
    assert!(exit.len() < MAX_ERROR_BYTES + 64, "{}", exit.len());
    assert!(exit.ends_with("ü... (cut from 2097152 bytes)"), "{}", &exit[exit.len() - 64..]);
}

/// A hook that waits until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn pass(&self) {
        let open = self.0.0.lock().expect("no panic holds it");
        drop(self.0.1.wait_while(open, |open| !*open).expect("no panic holds it"));
    }

    fn open(&self) {
        *self.0.0.lock().expect("no panic holds it") = true;
        self.0.1.notify_all();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_that_hangs_beside_a_crash_loop_holds_a_bounded_number_of_events() {
    const PENDING: usize = 100;
    let (gate, received) = (Gate::default(), Arc::new(Mutex::new(Vec::<Event>::new())));
    let (closed, writer) = (gate.clone(), Arc::clone(&received));
    let hook = move |event: &Event| {
        closed.pass();
        writer.lock().expect("no panic holds it").push(event.clone());
    };
    let policy = ChildPolicy { backoff: Backoff::NONE, ..ChildPolicy::default() };
    let supervisor = Supervisor::builder()
        .event_hook(hook)
        .max_pending_events(NonZeroUsize::new(PENDING).expect("not zero"))
        .start(parent_of(move |ctx| {
            ctx.run_child("quiet", steady)?;
            let fails = |_: Context| async { Err::<(), Failure>(Failure::new("again")) };
            ctx.run_child_with(ChildSpec::new("loop", fails).policy(policy))
        }));
    let runs = || supervisor.snapshot().iter().map(|node| node.generation).max();
    while runs() < Some(2000) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    supervisor.stop_runnable("root.loop").expect("the DN exists");
    while supervisor.snapshot()[2].state != RunnableState::Stopped {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    gate.open();
    supervisor.shutdown().await;
    let received = received.lock().expect("no panic holds it");
    assert!(received.is_sorted_by(|one, next| one.seq < next.seq));
    // Those that waited, the one in the hook, and those of the shutdown.
    assert!(received.len() <= PENDING + 10, "{}", received.len());
    let quiet = received.iter().filter(|event| &*event.dn == "root.quiet");
    let quiet: Vec<String> = quiet.map(|event| event.change.to_string()).collect();
    assert_eq!(quiet, ["started", "ready", "canceling: shutdown", "canceled"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_hook_that_hangs_holds_up_no_runnable_and_is_named_by_the_shutdown() {
    let (gate, received) = (Gate::default(), Arc::new(Mutex::new(0)));
    let (closed, counted) = (gate.clone(), Arc::clone(&received));
    let hook = move |_: &Event| {
        closed.pass();
        *counted.lock().expect("no panic holds it") += 1;
    };
    let timeout = Duration::from_millis(100);
    let supervisor = Supervisor::builder()
        .event_hook(hook)
        .stop_timeout(timeout)
        .start(parent_of(|ctx| (0..100).try_for_each(|child| ctx.run_child(format!("n{child}"), steady))));
    for child in 0..100 {
        supervisor.wait_ready(&format!("root.n{child}")).await.expect("it runs");
    }
    let report = supervisor.shutdown().await;
    assert!(!report.is_clean() && report.stragglers.is_empty(), "{report:?}");
    let slow = report.slow_hook.expect("it hangs");
    assert!(slow.name.contains("a_hook_that_hangs_holds_up_no_runnable"), "{slow:?}");
    // Each runnable has started, was ready, was canceled and has ended. The hook has the first event.
    assert_eq!((slow.undelivered, slow.waited), (4 * 101 - 1, timeout));
    gate.open();
    assert!(supervisor.shutdown().await.is_clean(), "it gets no more events");
    assert_eq!(*received.lock().expect("no panic holds it"), 1);
}

#[tokio::test]
async fn a_runnable_whose_drop_hangs_is_named_by_the_shutdown_and_holds_up_no_other() {
    /// Is done at once.
    struct HangsInDrop(Gate);

    impl Drop for HangsInDrop {
        fn drop(&mut self) {
            self.0.pass();
        }
    }

    impl Runnable for HangsInDrop {
        fn run(&self, ctx: Context) -> RunFuture {
            Box::pin(done(ctx))
        }
    }

    let (gate, timeout) = (Gate::default(), Duration::from_millis(100));
    let (closed, recorder) = (gate.clone(), EventRecorder::default());
    let builder = Supervisor::builder().event_hook(recorder.clone()).stop_timeout(timeout);
    let supervisor = builder.start(parent_of(move |ctx| {
        ctx.run_child("steady", steady)?;
        ctx.run_child("hangs", HangsInDrop(closed.clone()))
    }));
    recorder.wait_for_state("root.hangs", RunnableState::Done).await;
    let report = supervisor.shutdown().await;
    let problems: Vec<String> = report.problems().collect();
    assert_eq!(problems, ["root.hangs did not stop within 100ms and was abandoned"]);
    assert_eq!(recorder.states_of("root.steady").last(), Some(&RunnableState::Canceled));
    gate.open();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_delivers_the_last_event_to_a_hook_with_room_for_one() {
    let last = Arc::new(Mutex::new(None));
    let writer = Arc::clone(&last);
    let hook = move |event: &Event| *writer.lock().expect("no panic holds it") = event.change.new_state();
    let builder = Supervisor::builder().event_hook(hook).max_pending_events(NonZeroUsize::MIN);
    let supervisor = builder.start(steady);
    settle().await;
    supervisor.shutdown().await;
    assert_eq!(*last.lock().expect("no panic holds it"), Some(RunnableState::Canceled));
}
