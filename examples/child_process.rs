//! A child process under supervision: its readiness, its output, its end with everything it has left behind.
//!
//! `cargo run -p examples --example child_process`

use std::io;
use std::time::Duration;

use nodekeel_supervisor::process::{Process, Readiness};
use nodekeel_supervisor::{Child, Context, Event, Failure, Origin, Restart, State, Supervisor};
use tokio::sync::mpsc::{self, UnboundedSender};

/// A shell that starts a daemon which leaves its session, ignores TERM, says something and works.
const SCRIPT: &str = r#"
setsid sh -c 'trap "" TERM; exec sleep 1000' &
echo "ready to work"
echo "with a warning" >&2
exec sleep 1000
"#;

/// How many lines the worker says.
const WORDS: usize = 2;

/// Prints each piece of output with its origin. A real program hands it to a journal.
struct Prefixed {
    prefix: String,
    /// Where each line is told of.
    said: Option<UnboundedSender<()>>,
}

impl io::Write for Prefixed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = io::stdout().lock();
        for line in String::from_utf8_lossy(bytes).lines() {
            writeln!(out, "{}  {line}", self.prefix)?;
            // Nobody waits for it any more once it has been heard.
            _ = self.said.as_ref().map(|said| said.send(()));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::main]
async fn main() {
    let (say, mut said) = mpsc::unbounded_channel();
    let supervisor = Supervisor::builder()
        .output(move |origin: Origin<'_>| Prefixed {
            prefix: format!("{} {} run {}", origin.dn, origin.stream, origin.generation),
            said: (origin.dn == "root.worker").then(|| say.clone()),
        })
        .hook(|event: &Event| println!("event {:>2}  {}  {}", event.seq, event.dn, event.change))
        .start(|ctx: Context| async move {
            let worker = Process::new("/bin/sh")
                .args(["-c", SCRIPT])
                .env("PATH", "/usr/bin:/bin")
                .ready(Readiness::started())
                .grace(Duration::from_millis(300));
            let once = Process::new("/bin/sh").args(["-c", "echo cannot go on; exit 3"]);
            let never = nodekeel_supervisor::Policy { restart: Restart::Never, ..Default::default() };
            ctx.run("worker", worker)?;
            ctx.run_group([Child::new("once", once).policy(never)])?;
            ctx.ready()?;
            Err::<(), Failure>(ctx.cancelled().await.into())
        });

    // What it says comes when the kernel lets it, like anybody's output.
    for _ in 0..WORDS {
        said.recv().await.expect("the output lives as long as the supervisor");
    }
    let mut changes = supervisor.watch();
    while supervisor.snapshot().iter().all(|node| node.state != State::Dead) {
        changes.changed().await.expect("the supervisor lives as long as this function");
    }
    for exit in supervisor.snapshot().into_iter().flat_map(|node| node.exits) {
        println!("run {} ended {}: {}", exit.generation, exit.state, exit.exit);
    }
    let report = supervisor.shutdown().await;
    println!("stopped, {} stragglers", report.stragglers.len());
}
