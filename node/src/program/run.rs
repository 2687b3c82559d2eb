//! `run`: starts the node, then waits for a signal.

use std::process::ExitCode;

use anyhow::Context as _;
use nodekeel_supervisor::StopSignals;
use nodekeel_supervisor::process::Rlimit;
use tokio::signal::unix::{SignalKind, signal};

use super::cli::ConsoleLevel;
use super::console::{Console, FLUSH_TIMEOUT};
use super::log_filter::log_subscriber;
use crate::node::{Deps, NodeHandle, new_log_store};
use crate::notify::{reloading_message, sd_notify};
use crate::plan::NodePlan;
use crate::program_name::program_name;

pub(crate) fn run_node(
    plan: NodePlan,
    ConsoleLevel(console): ConsoleLevel,
    child_limits: Vec<Rlimit>,
) -> anyhow::Result<ExitCode> {
    let log_store = new_log_store(&plan.config.log);
    let mut deps = Deps::new(log_store.clone());
    deps.child_limits = child_limits;
    tracing::subscriber::set_global_default(log_subscriber(&log_store, console))
        .context("can't install the log subscriber")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("can't start the async runtime")?;
    let code = runtime.block_on(async {
        let console = Console::start(&log_store, console)?;
        let code = run_until_signal(plan, deps, &console).await;
        // The last lines are printed before the runtime ends, and with it the thread that prints them.
        console.finish().await;
        code
    });
    // A call that hangs in the kernel must not keep the program from exiting.
    runtime.shutdown_timeout(FLUSH_TIMEOUT);
    code
}

async fn run_until_signal(plan: NodePlan, deps: Deps, console: &Console) -> anyhow::Result<ExitCode> {
    // Registered before the start, so that no signal is lost during it.
    let mut signals = StopSignals::listen_without_hangup().context("can't listen for SIGTERM and SIGINT")?;
    let mut hangups = signal(SignalKind::hangup()).context("can't listen for SIGHUP")?;
    let node = NodeHandle::start(plan, deps)?;
    let run = async {
        // The root is ready when the control API serves.
        node.wait_ready("root").await;
        console.print_line(&format!("control socket at {}", node.control_socket().display()));
        notify_manager("READY=1");
        while hangups.recv().await.is_some() {
            reload(&node).await;
        }
    };
    tokio::select! {
        () = run => {}
        () = signals.wait_for_stop() => {}
    }
    // In a task: the shutdown starts even if the service manager does not read its message.
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
    report.problems().for_each(|problem| console.print_line(&problem));
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(6) })
}

/// Reloads the configuration. The log has the result, and so has the service manager.
async fn reload(node: &NodeHandle) {
    notify_manager(&reloading_message());
    let status = match node.reload().await {
        Ok(_) => String::new(),
        Err(error) => error.describe(),
    };
    // READY=1 ends the reload for the service manager. The status has the error, or clears the one before.
    notify_manager(&format!("READY=1\nSTATUS={status}"));
}

/// Notifies the service manager, if `NOTIFY_SOCKET` is set.
fn notify_manager(message: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = sd_notify(&socket, message)
    {
        tracing::warn!(dn = program_name(), "send {message} to NOTIFY_SOCKET: {error}");
    }
}
