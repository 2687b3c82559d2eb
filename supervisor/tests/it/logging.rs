//! Names in the log: spans, sub-spans, raw output, and the supervisor's messages.

use std::io::Write as _;
use std::sync::{Arc, Mutex};

use nodekeel_supervisor::process::Process;
use nodekeel_supervisor::testing::{EventRecorder, settle};
use nodekeel_supervisor::{
    AddChildError, Context, Failure, NameError, OutputOrigin, RunnableState, Supervisor,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Record};
use tracing::{Event, Id, Metadata};

use crate::harness::{parent_of, steady};

/// A subscriber that keeps (dn, message), as a log store does that knows only the field `dn` of this crate.
#[derive(Clone, Default)]
pub(crate) struct LineCollector {
    lines: Arc<Mutex<Vec<(String, String)>>>,
    spans: Arc<Mutex<Vec<String>>>,
    entered: Arc<Mutex<Vec<u64>>>,
}

#[derive(Default)]
struct LineFields {
    dn: Option<String>,
    message: String,
}

impl Visit for LineFields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            "dn" => self.dn = Some(format!("{value:?}").trim_matches('"').to_owned()),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }
}

impl tracing::Subscriber for LineCollector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("nodekeel") || metadata.target().starts_with("it::")
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = LineFields::default();
        attributes.record(&mut fields);
        let mut spans = self.spans.lock().expect("no panic holds it");
        spans.push(fields.dn.unwrap_or_default());
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = LineFields::default();
        event.record(&mut fields);
        let entered = self.entered.lock().expect("no panic holds it");
        let dn = fields.dn.or_else(|| {
            let span = *entered.last()?;
            self.spans.lock().expect("no panic holds it").get(span as usize - 1).cloned()
        });
        self.lines.lock().expect("no panic holds it").push((dn.unwrap_or_default(), fields.message));
    }

    fn enter(&self, span: &Id) {
        self.entered.lock().expect("no panic holds it").push(span.into_u64());
    }

    fn exit(&self, _: &Id) {
        self.entered.lock().expect("no panic holds it").pop();
    }
}

impl LineCollector {
    /// Collects the log lines of this thread, until the guard is dropped.
    pub(crate) fn collect() -> (Self, tracing::subscriber::DefaultGuard) {
        // Tracing caches for all threads whether a line is enabled: without a collector that exists as long
        // as the program, a test without a collector can race with this one for the cached value.
        static FOR_ALL: std::sync::Once = std::sync::Once::new();
        FOR_ALL.call_once(|| {
            tracing::subscriber::set_global_default(Self::default()).expect("it is the only one")
        });
        let lines = Self::default();
        (lines.clone(), tracing::subscriber::set_default(lines))
    }

    pub(crate) fn lines_of(&self, dn: &str) -> Vec<String> {
        let lines = self.lines.lock().expect("no panic holds it");
        lines.iter().filter(|(of, _)| of == dn).map(|(_, line)| line.clone()).collect()
    }
}

// reference case 12
#[tokio::test(start_paused = true)]
async fn a_runnables_log_carries_its_dn_and_a_name_has_one_owner() {
    let (lines, _guard) = LineCollector::collect();
    let supervisor = Supervisor::builder().start(|ctx: Context| async move {
        ctx.run_child("foo", |ctx: Context| async move {
            tracing::info!("in foo itself");
            let dut = ctx.sub_span("dut")?;
            dut.in_scope(|| tracing::info!("in a part of foo"));
            ctx.sub_span("dut")?;
            ctx.spawn_joined(async { tracing::info!("in a helper of foo") })?;
            let taken = NameError::AlreadyInUse { name: "dut".into(), parent: "root.foo".into() };
            assert_eq!(ctx.run_child("dut", steady), Err(AddChildError::Name(taken)));
            steady(ctx).await
        })?;
        let taken = NameError::AlreadyInUse { name: "foo".into(), parent: "root".into() };
        assert_eq!(ctx.sub_span("foo").err(), Some(taken));
        steady(ctx).await
    });
    settle().await;
    assert_eq!(lines.lines_of("root.foo"), ["in foo itself", "in a helper of foo"]);
    assert_eq!(lines.lines_of("root.foo.dut"), ["in a part of foo"]);
    supervisor.restart_runnable("root.foo").expect("the DN exists");
    settle().await;
    let foo = supervisor.snapshot().into_iter().find(|node| &*node.dn == "root.foo").expect("it is there");
    assert_eq!((foo.state, foo.generation), (RunnableState::Ready, 2), "a restart frees the name");
}

#[tokio::test(start_paused = true)]
async fn a_failure_is_logged_under_its_runnable_and_the_restart_under_the_supervisor() {
    let (lines, _guard) = LineCollector::collect();
    let _supervisor = Supervisor::builder().start(parent_of(move |ctx| {
        ctx.run_child("child", |_: Context| async { Err::<(), _>(Failure::new("disk gone")) })
    }));
    settle().await;
    assert_eq!(lines.lines_of("root.child"), ["runnable failed: disk gone"]);
    let line = lines.lines_of("supervisor").into_iter().find(|line| line.starts_with("restarting"));
    let line = line.expect("the restart is announced");
    assert!(line.starts_with("restarting runnable root.child with backoff "), "{line}");
}

#[tokio::test(start_paused = true)]
async fn raw_output_is_separated_by_dn_stream_and_generation() {
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<String>>>);
    struct Writer(Sink, String);
    impl std::io::Write for Writer {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let text = format!("{}: {}", self.1, String::from_utf8_lossy(bytes));
            self.0.0.lock().expect("no panic holds it").push(text);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let sink = Sink::default();
    let (writers, recorder) = (sink.clone(), EventRecorder::default());
    let open = move |origin: OutputOrigin<'_>| {
        Writer(writers.clone(), format!("{} {} {}", origin.dn, origin.stream, origin.generation))
    };
    let supervisor = Supervisor::builder().output_sink(open).event_hook(recorder.clone()).start(
        |ctx: Context| async move {
            write!(ctx.open_raw_output(), "hello").map_err(Failure::new)?;
            if ctx.generation() == 1 { Err(Failure::new("once")) } else { steady(ctx).await }
        },
    );
    recorder.wait_for_state("root", RunnableState::Ready).await;
    assert_eq!(*sink.0.lock().expect("no panic holds it"), ["root raw 1: hello", "root raw 2: hello"]);
    supervisor.shutdown().await;
}

#[tokio::test]
async fn output_is_logged_by_default_line_by_line() {
    let (lines, _guard) = LineCollector::collect();
    let recorder = EventRecorder::default();
    let supervisor = Supervisor::builder().event_hook(recorder.clone()).start(parent_of(|ctx| {
        let script = "printf 'one\\ntwo \\033[2J\\r\\nthree'; exec 1>&-; echo four >&2";
        ctx.run_child("echo", Process::new("/bin/sh").args(["-c", script]))?;
        ctx.run_child("long", |ctx: Context| async move {
            let mut output = ctx.open_raw_output();
            output.write_all(&[b'x'; 40_000]).map_err(Failure::new)?;
            output.write_all(b"\n\nend").map_err(Failure::new)?;
            drop(output);
            steady(ctx).await
        })
    }));
    recorder.wait_for_state("root.echo", RunnableState::Dead).await;
    let mut echoed = lines.lines_of("root.echo");
    // The two streams are in no order.
    echoed.sort_unstable();
    let failed = "runnable failed: exited with code 0 by itself";
    assert_eq!(echoed, ["four", "one", failed, "three", "two \u{fffd}[2J"]);
    let long: Vec<usize> = lines.lines_of("root.long").iter().map(String::len).collect();
    assert_eq!(long, [16_384, 16_384, 40_000 - 2 * 16_384, 0, 3]);
    supervisor.shutdown().await;
}
