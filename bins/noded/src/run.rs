//! `noded run`: starts the node, then waits for a signal.

use std::process::ExitCode;

use anyhow::Context as _;
use nodekeel_logtree::{Journal, Level};
use nodekeel_node::node::{Deps, Node, journal};
use nodekeel_node::notify::notify;
use nodekeel_node::plan::Plan;
use nodekeel_supervisor::StopSignals;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::cli::ConsoleLevel;
use crate::console::{ALLOWANCE, Console};

pub(crate) fn run(plan: Plan, ConsoleLevel(console): ConsoleLevel) -> anyhow::Result<ExitCode> {
    let journal = journal(&plan.config.log);
    tracing::subscriber::set_global_default(collector(&journal, console)).context("collect the log")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let code = runtime.block_on(async {
        let console = Console::start(&journal, console)?;
        let code = until_signalled(plan, journal, &console).await;
        console.end().await;
        code
    });
    runtime.shutdown_timeout(ALLOWANCE);
    code
}

/// Sends what is traced into the journal: nodekeel's own as far down as the console shows it, that of the libraries
/// below it from `info` on. Below that they would trace how the log is sent to its readers, and that would never end.
fn collector(journal: &Journal, console: Option<Level>) -> impl Subscriber {
    let level = console.unwrap_or(Level::Info).min(Level::Info);
    let own = match level {
        Level::Trace => LevelFilter::TRACE,
        Level::Debug => LevelFilter::DEBUG,
        _ => LevelFilter::INFO,
    };
    let targets = Targets::new()
        .with_default(LevelFilter::INFO)
        .with_target("nodekeel", own)
        .with_target("noded", own)
        // Every call to the API server that fails, which is told with its reason by whoever has made it.
        .with_target("kube_client::client::builder", LevelFilter::OFF);
    let layer = journal.layer().min_level(level).with_filter(targets);
    tracing_subscriber::registry().with(layer)
}

async fn until_signalled(plan: Plan, journal: Journal, console: &Console) -> anyhow::Result<ExitCode> {
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let node = Node::start(plan, Deps::new(journal))?;
    tokio::select! {
        () = node.ready("root") => {
            console.say(&format!("control socket at {}", node.socket().display()));
            tell_manager("READY=1");
            signals.asked().await;
        }
        () = signals.asked() => {}
    }
    let shutdown = tokio::spawn(node.shutdown());
    tell_manager("STOPPING=1");
    console.say("stopping; a second signal forces, once a second has passed");
    let report = tokio::select! {
        report = shutdown => report.context("stop the node")?,
        () = signals.insisted() => {
            console.say("forced by a second signal");
            return Ok(ExitCode::from(7));
        }
    };
    for straggler in &report.stragglers {
        console
            .say(&format!("{} did not stop within {:?} and was given up on", straggler.dn, straggler.waited));
    }
    Ok(if report.stragglers.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(6) })
}

/// Tells a service manager that started noded and wants to know.
fn tell_manager(message: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = notify(&socket, message)
    {
        tracing::warn!(dn = "noded", "NOTIFY_SOCKET does not take {message}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libraries_trace_is_neither_built_nor_stored() {
        for (console, hint, stored) in [
            (None, LevelFilter::INFO, &[][..]),
            (Some(Level::Error), LevelFilter::INFO, &[]),
            (Some(Level::Debug), LevelFilter::DEBUG, &["own debug"]),
            (Some(Level::Trace), LevelFilter::TRACE, &["own trace", "own debug"]),
        ] {
            let journal = Journal::default();
            let collector = collector(&journal, console);
            assert_eq!(collector.max_level_hint(), Some(hint), "{console:?}");
            tracing::subscriber::with_default(collector, || {
                let library = tracing::trace_span!(target: "h2::proto", "poll");
                assert!(library.is_disabled());
                let own = tracing::info_span!(target: "nodekeel_supervisor", "run", dn = "a").entered();
                assert!(!own.is_disabled());
                tracing::trace!(target: "nodekeel_supervisor", "own trace");
                tracing::debug!(target: "noded", "own debug");
                tracing::debug!(target: "h2::codec", "sent");
            });
            let mut log =
                journal.read(nodekeel_logtree::Query::new("a".parse().expect("a name"))).expect("read");
            let texts: Vec<_> = log.backlog().iter().map(nodekeel_logtree::render::full).collect();
            assert_eq!(texts.len(), stored.len(), "{console:?}: {texts:?}");
            assert!(texts.iter().zip(stored).all(|(line, text)| line.ends_with(text)), "{texts:?}");
        }
    }
}
