//! `noded run`: starts the node, then waits for a signal.

use std::process::ExitCode;

use anyhow::Context as _;
use nodekeel_logtree::{Level, LogStore};
use nodekeel_node::node::{Deps, NodeHandle, new_log_store};
use nodekeel_node::notify::sd_notify;
use nodekeel_node::plan::NodePlan;
use nodekeel_supervisor::StopSignals;
use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::cli::ConsoleLevel;
use crate::console::{Console, FLUSH_TIMEOUT};

pub(crate) fn run_node(plan: NodePlan, ConsoleLevel(console): ConsoleLevel) -> anyhow::Result<ExitCode> {
    let log_store = new_log_store(&plan.config.log);
    tracing::subscriber::set_global_default(log_subscriber(&log_store, console))
        .context("can't install the log subscriber")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("can't start the async runtime")?;
    let code = runtime.block_on(async {
        let console = Console::start(&log_store, console)?;
        let code = run_until_signal(plan, log_store, &console).await;
        console.finish().await;
        code
    });
    runtime.shutdown_timeout(FLUSH_TIMEOUT);
    code
}

/// Sends tracing events to the log store: those of nodekeel down to the level that the console shows, those
/// of libraries from `info` on. Below `info`, libraries would trace the delivery of log entries to their
/// readers, in an endless loop.
fn log_subscriber(log_store: &LogStore, console: Option<Level>) -> impl Subscriber {
    let level = console.unwrap_or(Level::Info).min(Level::Info);
    let nodekeel_level = match level {
        Level::Trace => LevelFilter::TRACE,
        Level::Debug => LevelFilter::DEBUG,
        _ => LevelFilter::INFO,
    };
    let targets = Targets::new()
        .with_default(LevelFilter::INFO)
        .with_target("nodekeel", nodekeel_level)
        .with_target("noded", nodekeel_level)
        // Each failed call to the API server; its caller logs it with the reason.
        .with_target("kube_client::client::builder", LevelFilter::OFF);
    let layer = log_store.layer().min_level(level).with_filter(targets);
    tracing_subscriber::registry().with(layer)
}

async fn run_until_signal(
    plan: NodePlan,
    log_store: LogStore,
    console: &Console,
) -> anyhow::Result<ExitCode> {
    let mut signals = StopSignals::listen().context("can't listen for SIGTERM and SIGINT")?;
    let node = NodeHandle::start(plan, Deps::new(log_store))?;
    tokio::select! {
        () = node.wait_ready("root") => {
            console.print_line(&format!("control socket at {}", node.control_socket().display()));
            notify_manager("READY=1");
            signals.wait_for_stop().await;
        }
        () = signals.wait_for_stop() => {}
    }
    let shutdown = tokio::spawn(node.shutdown());
    notify_manager("STOPPING=1");
    console.print_line("stopping; a second signal forces the exit, from 1 s on");
    let report = tokio::select! {
        report = shutdown => report.context("can't stop the node cleanly")?,
        () = signals.wait_for_forced_stop() => {
            console.print_line("a second signal forced the exit");
            return Ok(ExitCode::from(7));
        }
    };
    for straggler in &report.stragglers {
        console.print_line(&format!(
            "{} did not stop within {:?} and was abandoned",
            straggler.dn, straggler.waited
        ));
    }
    Ok(if report.stragglers.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(6) })
}

/// Notifies the service manager, if `NOTIFY_SOCKET` is set.
fn notify_manager(message: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = sd_notify(&socket, message)
    {
        tracing::warn!(dn = "noded", "send {message} to NOTIFY_SOCKET: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_spans_of_libraries_are_neither_built_nor_stored() {
        for (console, hint, stored) in [
            (None, LevelFilter::INFO, &[][..]),
            (Some(Level::Error), LevelFilter::INFO, &[]),
            (Some(Level::Debug), LevelFilter::DEBUG, &["nodekeel debug"]),
            (Some(Level::Trace), LevelFilter::TRACE, &["nodekeel trace", "nodekeel debug"]),
        ] {
            let log_store = LogStore::default();
            let subscriber = log_subscriber(&log_store, console);
            assert_eq!(subscriber.max_level_hint(), Some(hint), "{console:?}");
            tracing::subscriber::with_default(subscriber, || {
                let library = tracing::trace_span!(target: "h2::proto", "poll");
                assert!(library.is_disabled());
                let span = tracing::info_span!(target: "nodekeel_supervisor", "run", dn = "a").entered();
                assert!(!span.is_disabled());
                tracing::trace!(target: "nodekeel_supervisor", "nodekeel trace");
                tracing::debug!(target: "noded", "nodekeel debug");
                tracing::debug!(target: "h2::codec", "sent");
            });
            let mut log = log_store
                .open_reader(nodekeel_logtree::LogQuery::of_dn("a".parse().expect("a name")))
                .expect("read");
            let texts: Vec<_> = log.read_backlog().iter().map(nodekeel_logtree::render::full_text).collect();
            assert_eq!(texts.len(), stored.len(), "{console:?}: {texts:?}");
            assert!(texts.iter().zip(stored).all(|(line, text)| line.ends_with(text)), "{texts:?}");
        }
    }
}
