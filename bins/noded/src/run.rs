//! `noded run`: starts the node, then waits for a signal.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use nodekeel_logtree::{Dn, Journal, Query, Reader, render};
use nodekeel_node::node::{Deps, Node, journal};
use nodekeel_node::notify::notify;
use nodekeel_node::plan::Plan;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::cli::ConsoleLevel;

/// How long the last lines for a reader of stderr that has stopped reading are waited for.
const CONSOLE_ALLOWANCE: Duration = Duration::from_secs(1);

pub(crate) fn run(plan: Plan, console: ConsoleLevel) -> anyhow::Result<ExitCode> {
    let journal = journal(&plan.config.log);
    let subscriber = tracing_subscriber::registry().with(journal.layer());
    tracing::subscriber::set_global_default(subscriber).context("collect the log")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let code = runtime.block_on(async {
        let stopped = CancellationToken::new();
        let console = show_log(&journal, console, stopped.clone())?;
        let code = until_signalled(plan, journal).await;
        stopped.cancel();
        if let Some(console) = console {
            // Whoever does not read stderr must not keep the node from ending.
            let _ = tokio::time::timeout(CONSOLE_ALLOWANCE, console).await;
        }
        code
    });
    runtime.shutdown_timeout(CONSOLE_ALLOWANCE);
    code
}

async fn until_signalled(plan: Plan, journal: Journal) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::new()?;
    let node = Node::start(plan, Deps::new(journal))?;
    tokio::select! {
        () = node.ready("root") => {
            say(&format!("control socket at {}", node.socket().display()));
            tell_manager("READY=1");
            signals.next().await;
        }
        () = signals.next() => {}
    }
    say("stopping; a second signal forces");
    tell_manager("STOPPING=1");
    let report = tokio::select! {
        report = node.shutdown() => report,
        () = signals.next() => {
            say("forced by a second signal");
            return Ok(ExitCode::from(7));
        }
    };
    for straggler in &report.stragglers {
        say(&format!("{} did not stop within {:?} and was given up on", straggler.dn, straggler.waited));
    }
    Ok(if report.stragglers.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(6) })
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listen for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// A line for whoever started noded; one who does not listen does not matter.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "noded: {line}");
}

/// Tells a service manager that started noded and wants to know.
fn tell_manager(message: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = notify(&socket, message)
    {
        tracing::warn!(dn = "noded", "NOTIFY_SOCKET does not take {message}: {error}");
    }
}

/// Prints the log to stderr from a thread of its own: a write may block.
fn show_log(
    journal: &Journal,
    console: ConsoleLevel,
    stopped: CancellationToken,
) -> anyhow::Result<Option<JoinHandle<()>>> {
    let Some(level) = console.0 else { return Ok(None) };
    let everything = Query::new(Dn::root()).children().follow().min_level(level);
    let reader = journal.read(everything).context("read the log")?;
    let runtime = tokio::runtime::Handle::current();
    Ok(Some(tokio::task::spawn_blocking(move || runtime.block_on(print(reader, stopped)))))
}

async fn print(mut reader: Reader, stopped: CancellationToken) {
    let show = |entry| writeln!(std::io::stderr(), "{}", render::full(&entry));
    while let Some(Some(entry)) = stopped.run_until_cancelled(reader.next()).await {
        if show(entry).is_err() {
            return;
        }
    }
    while let Some(entry) = reader.try_next() {
        if show(entry).is_err() {
            return;
        }
    }
}
