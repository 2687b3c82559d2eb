//! Names in the log: spans, sub-spans, raw output, and what the supervisor itself says.

use std::io::Write as _;
use std::sync::{Arc, Mutex};

use nodekeel_supervisor::testing::{Recorder, settle};
use nodekeel_supervisor::{Context, Failure, NameError, Origin, SpawnError, State, Supervisor};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Record};
use tracing::{Event, Id, Metadata};

use crate::tree::steady;

/// A subscriber that keeps (dn, message), found as a log that knows this crate only by the field `dn` would.
#[derive(Clone, Default)]
struct Lines {
    lines: Arc<Mutex<Vec<(String, String)>>>,
    spans: Arc<Mutex<Vec<String>>>,
    entered: Arc<Mutex<Vec<u64>>>,
}

#[derive(Default)]
struct Fields {
    dn: Option<String>,
    message: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            "dn" => self.dn = Some(format!("{value:?}").trim_matches('"').to_owned()),
            "message" => self.message = format!("{value:?}"),
            _ => {}
        }
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("nodekeel") || metadata.target().starts_with("it::")
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let mut spans = self.spans.lock().expect("no panic holds it");
        spans.push(fields.dn.unwrap_or_default());
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
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

impl Lines {
    /// Collects what this thread logs, until the guard is dropped.
    fn collect() -> (Self, tracing::subscriber::DefaultGuard) {
        // Whether anybody wants a line is kept per line for all threads: without a collector that lives as long as the
        // program, a test that collects nothing can race with this one for the answer.
        static FOR_ALL: std::sync::Once = std::sync::Once::new();
        FOR_ALL.call_once(|| {
            tracing::subscriber::set_global_default(Self::default()).expect("it is the only one")
        });
        let lines = Self::default();
        (lines.clone(), tracing::subscriber::set_default(lines))
    }

    fn of(&self, dn: &str) -> Vec<String> {
        let lines = self.lines.lock().expect("no panic holds it");
        lines.iter().filter(|(of, _)| of == dn).map(|(_, line)| line.clone()).collect()
    }
}

// reference case 12
#[tokio::test(start_paused = true)]
async fn what_a_runnable_logs_is_found_by_its_name_and_a_name_has_one_owner() {
    let (lines, _guard) = Lines::collect();
    let supervisor = Supervisor::builder().start(|ctx: Context| async move {
        ctx.run("foo", |ctx: Context| async move {
            tracing::info!("in foo itself");
            let dut = ctx.sub_span("dut")?;
            dut.in_scope(|| tracing::info!("in a part of foo"));
            ctx.sub_span("dut")?;
            ctx.spawn(async { tracing::info!("in a helper of foo") })?;
            let taken = NameError::Taken { name: "dut".into(), parent: "root.foo".into() };
            assert_eq!(ctx.run("dut", steady), Err(SpawnError::Name(taken)));
            steady(ctx).await
        })?;
        let taken = NameError::Taken { name: "foo".into(), parent: "root".into() };
        assert_eq!(ctx.sub_span("foo").err(), Some(taken));
        steady(ctx).await
    });
    settle().await;
    assert_eq!(lines.of("root.foo"), ["in foo itself", "in a helper of foo"]);
    assert_eq!(lines.of("root.foo.dut"), ["in a part of foo"]);
    supervisor.restart("root.foo").expect("it is there");
    settle().await;
    let foo = supervisor.snapshot().into_iter().find(|node| &*node.dn == "root.foo").expect("it is there");
    assert_eq!((foo.state, foo.generation), (State::Ready, 2), "a restart frees the name");
}

#[tokio::test(start_paused = true)]
async fn a_death_is_logged_at_the_name_of_who_died_and_the_restart_at_the_supervisors() {
    let (lines, _guard) = Lines::collect();
    let _supervisor = Supervisor::builder().start(|ctx: Context| async move {
        ctx.run("child", |_: Context| async { Err::<(), _>(Failure::new("disk gone")) })?;
        steady(ctx).await
    });
    settle().await;
    assert_eq!(lines.of("root.child"), ["runnable died: disk gone"]);
    let said = lines.of("supervisor").into_iter().find(|line| line.starts_with("rescheduling"));
    let said = said.expect("the restart is announced");
    assert!(said.starts_with("rescheduling supervised node root.child with backoff "), "{said}");
}

#[tokio::test(start_paused = true)]
async fn raw_output_is_told_apart_by_name_stream_and_generation() {
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
    let (writers, recorder) = (sink.clone(), Recorder::default());
    let open = move |origin: Origin<'_>| {
        Writer(writers.clone(), format!("{} {} {}", origin.dn, origin.stream, origin.generation))
    };
    let supervisor =
        Supervisor::builder().output(open).hook(recorder.clone()).start(|ctx: Context| async move {
            write!(ctx.raw(), "hello").map_err(Failure::new)?;
            if ctx.generation() == 1 { Err(Failure::new("once")) } else { steady(ctx).await }
        });
    recorder.until("root", State::Ready).await;
    assert_eq!(*sink.0.lock().expect("no panic holds it"), ["root raw 1: hello", "root raw 2: hello"]);
    supervisor.shutdown().await;
}
