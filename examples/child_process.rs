//! A supervised child process: its readiness, its output, and its exit with all processes that it left
//! behind.
//!
//! `cargo run -p examples --example child_process`

use std::io;
use std::time::Duration;

use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{
    ChildSpec, Context, Event, Failure, OutputOrigin, RestartPolicy, RunnableState, Supervisor,
};
use tokio::sync::mpsc::{self, UnboundedSender};

/// A shell that starts a daemon with a new session that ignores TERM, prints two lines and works.
const SCRIPT: &str = r#"
setsid sh -c 'trap "" TERM; exec sleep 1000' &
echo "ready to work"
echo "with a warning" >&2
exec sleep 1000
"#;

/// Number of lines that the worker prints.
const LINES: usize = 2;

/// Prints each line of output with its origin. A real program writes it to a log store.
struct PrefixedOutput {
    prefix: String,
    /// Notified of each line.
    printed: Option<UnboundedSender<()>>,
}

impl io::Write for PrefixedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = io::stdout().lock();
        for line in String::from_utf8_lossy(bytes).lines() {
            writeln!(out, "{}  {line}", self.prefix)?;
            // The receiver is gone after the first lines.
            _ = self.printed.as_ref().map(|printed| printed.send(()));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::main]
async fn main() {
    let (sender, mut printed) = mpsc::unbounded_channel();
    let supervisor = Supervisor::builder()
        .output_sink(move |origin: OutputOrigin<'_>| PrefixedOutput {
            prefix: format!("{} {} run {}", origin.dn, origin.stream, origin.generation),
            printed: (origin.dn == "root.worker").then(|| sender.clone()),
        })
        .event_hook(|event: &Event| println!("event {:>2}  {}  {}", event.seq, event.dn, event.change))
        .start(|ctx: Context| async move {
            let worker = Process::new("/bin/sh")
                .args(["-c", SCRIPT])
                .env("PATH", "/usr/bin:/bin")
                .ready_when(Readiness::on_start())
                .grace_period(Duration::from_millis(300));
            let once = Process::new("/bin/sh").args(["-c", "echo cannot continue; exit 3"]);
            let never =
                nodekeel_supervisor::ChildPolicy { restart: RestartPolicy::Never, ..Default::default() };
            ctx.run_child("worker", worker)?;
            ctx.run_child_with(ChildSpec::new("once", once).policy(never))?;
            ctx.signal_ready()?;
            Err::<(), Failure>(ctx.canceled().await.into())
        });

    // Output arrives asynchronously, as from any process.
    for _ in 0..LINES {
        printed.recv().await.expect("the sink exists as long as the supervisor");
    }
    let mut changes = supervisor.watch_changes();
    while supervisor.snapshot().iter().all(|node| node.state != RunnableState::Dead) {
        changes.changed().await.expect("the supervisor exists as long as this function");
    }
    for exit in supervisor.snapshot().into_iter().flat_map(|node| node.exits) {
        println!("run {} exited {}: {}", exit.generation, exit.state, exit.exit);
    }
    let report = supervisor.shutdown().await;
    println!("stopped, {} stragglers", report.stragglers.len());
}
