//! `provisionerd agent`.

use std::hash::{BuildHasher as _, RandomState};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use clap::Args;
use nodekeel_provisioner::agent::{Agent, AgentConfig, AgentDeps, AgentState, PrometheusAgentMetrics};
use nodekeel_provisioner::{DriverName, format_chain};
use nodekeel_supervisor::{StopSignals, serve_http};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;

use crate::check::{self, CheckFinding};
use crate::config::{DaemonConfig, LogConfig, LogFormat, parse_listen_address};
use crate::http::OPENMETRICS_TYPE;
use crate::{api_server, logging, run, start_runtime};

#[cfg(test)]
mod deployment_test;
mod permissions;

/// The flags of `agent`.
#[derive(Debug, Args)]
pub(crate) struct AgentFlags {
    /// Driver name
    #[arg(long, value_name = "NAME", default_value_t = DaemonConfig::default().driver)]
    driver: DriverName,
    /// Namespace of the Lease
    #[arg(long, value_name = "NAME", default_value = "nodekeel", env = "POD_NAMESPACE")]
    namespace: String,
    /// Name of the Lease
    #[arg(long, value_name = "NAME", default_value = "provisionerd-agent")]
    lease_name: String,
    /// Unique name of this agent [default: the hostname and a random number]
    #[arg(long, value_name = "NAME", env = "POD_NAME")]
    identity: Option<String>,
    /// How long a node may be unable to serve a claim that selects it
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_time)]
    grace_period: Duration,
    /// Report the volumes of a deleted node after this time
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_time)]
    node_gone_after: Duration,
    /// Remove released volumes of a deleted node after this time [default: never]
    ///
    /// Only the PersistentVolumes whose reclaim policy is Delete and whose claim is deleted; their data stay on
    /// the node's disk. Needs the permissions of deploy/agent/remove-volumes.yaml.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    remove_volumes_of_gone_nodes: Option<Duration>,
    /// Listen address of /healthz, /readyz and /metrics
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9811", value_parser = parse_listen_address)]
    listen: SocketAddr,
    /// Kubeconfig file
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Log format
    #[arg(long, value_name = "FORMAT", default_value = "compact")]
    log_format: LogFormat,
    /// Log level: error, warn, info, debug, trace, or directives
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: String,
    /// Check the permissions and exit
    #[arg(long)]
    check: bool,
}

/// Parses a time such as 90s, 5m, 2h or 7d.
fn parse_time(text: &str) -> Result<Duration, String> {
    let error = || format!("invalid time {text:?}: use a number and s, m, h or d, such as 5m");
    // The unit is the last character, which may have several bytes.
    let unit = text.char_indices().next_back().map(|(at, _)| at).unwrap_or_default();
    let (number, unit) = text.split_at(unit);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 60 * 60,
        "d" => 24 * 60 * 60,
        _ => return Err(error()),
    };
    // `parse` alone would accept a sign.
    let count = number.parse::<u32>().ok().filter(|_| number.bytes().all(|byte| byte.is_ascii_digit()));
    count.map(|count| Duration::from_secs(u64::from(count) * seconds)).ok_or_else(error)
}

impl AgentFlags {
    fn agent_config(&self) -> AgentConfig {
        let identity = self.identity.clone().unwrap_or_else(|| {
            let uname = rustix::system::uname();
            // Each `RandomState` has different keys.
            format!("{}_{:x}", uname.nodename().to_string_lossy(), RandomState::new().hash_one(0))
        });
        let mut config = AgentConfig::new(self.driver.clone(), identity);
        config.lease_namespace.clone_from(&self.namespace);
        config.lease_name.clone_from(&self.lease_name);
        config.grace_period = self.grace_period;
        config.node_gone_after = self.node_gone_after;
        config.remove_after = self.remove_volumes_of_gone_nodes;
        config
    }

    fn log_config(&self) -> LogConfig {
        LogConfig { format: self.log_format, level: self.log_level.clone() }
    }

    async fn check_permissions(&self, client: &kube::Client) -> CheckFinding {
        let may_remove = self.remove_volumes_of_gone_nodes.is_some();
        let needed = permissions::agent_permissions(&self.namespace, &self.lease_name, may_remove);
        check::check_scoped_permissions(client, needed, "deploy/agent").await
    }
}

/// Runs the agent until a signal.
pub(crate) fn run_agent(flags: &AgentFlags) -> Result<ExitCode> {
    // One thread: the agent waits for the API server, and each thread's allocator keeps memory.
    let runtime = start_runtime()?;
    if flags.check {
        return Ok(runtime.block_on(run_check(flags)));
    }
    logging::init_logging(&flags.log_config())?;
    runtime.block_on(run_until_signal(flags))
}

async fn run_check(flags: &AgentFlags) -> ExitCode {
    let finding = match api_server::api_client(flags.kubeconfig.as_deref()).await {
        Ok(client) => flags.check_permissions(&client).await,
        Err(error) => CheckFinding::Failure(error.into()),
    };
    check::print_findings(&[finding])
}

async fn run_until_signal(flags: &AgentFlags) -> Result<ExitCode> {
    // Registered first, so that no signal is lost during the start.
    let mut signals = StopSignals::listen().context("can't listen for SIGTERM and SIGINT")?;
    let hook = run::kill_hook()?;
    // An address in use is an error of the start, and not of a task later on.
    let listener = run::bind_listener(flags.listen)?;
    let client = api_server::api_client(flags.kubeconfig.as_deref()).await?;
    let mut registry = Registry::default();
    let metrics = Arc::new(PrometheusAgentMetrics::register_in(&mut registry));
    let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("provisionerd_build", "Build information", version);
    let agent = Agent::new(flags.agent_config(), AgentDeps { client: client.clone(), metrics, hook });
    spawn_http_server(listener, build_router(agent.clone(), registry))?;

    let token = CancellationToken::new();
    let mut run = pin!(agent.run_until(token.clone()));
    tracing::info!(listen = %flags.listen, driver = %flags.driver, "started");
    let warned = async {
        // The watches log a server that does not answer.
        if client.apiserver_version().await.is_ok()
            && let CheckFinding::Failure(error) = flags.check_permissions(&client).await
        {
            tracing::error!("{}", format_chain(&*error));
        }
        // The warning does not end the wait for a signal.
        std::future::pending::<()>().await;
    };
    tokio::select! {
        Err(error) = &mut run => return Err(error.into()),
        () = warned => {}
        () = signals.wait_for_stop() => {}
    }
    tracing::info!("shutting down; a second signal forces the exit");
    // The agent releases its Lease, so that another agent leads without waiting for the expiry.
    token.cancel();
    tokio::select! {
        Err(_) = run => {
            tracing::info!("stopped");
            Ok(ExitCode::SUCCESS)
        }
        () = signals.wait_for_forced_stop() => {
            tracing::warn!("a second signal forced the exit");
            Ok(ExitCode::from(7))
        }
    }
}

fn spawn_http_server(listener: TcpListener, router: Router) -> Result<()> {
    // tokio requires a non-blocking socket, as `bind_listener` creates it.
    let listener = tokio::net::TcpListener::from_std(listener).context("can't listen on the HTTP socket")?;
    tokio::spawn(serve_http(TcpListenerStream::new(listener), router));
    Ok(())
}

fn build_router(agent: Agent, registry: Registry) -> Router {
    let registry = Arc::new(registry);
    let metrics = async move || {
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
        ([(CONTENT_TYPE, OPENMETRICS_TYPE)], text)
    };
    let is_ready = async move || {
        let state = *agent.watch_state().borrow();
        match (state, agent.watch_failure()) {
            (_, Some(failure)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{failure}\n")),
            (AgentState::Starting, None) => {
                (StatusCode::SERVICE_UNAVAILABLE, "waiting for the Lease\n".to_owned())
            }
            // A standby is ready: there is nothing else that it waits for.
            (AgentState::Standby, None) => (StatusCode::OK, "ready: another agent leads\n".to_owned()),
            (AgentState::Leading, None) => (StatusCode::OK, "ready: leading\n".to_owned()),
        }
    };
    Router::new()
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(is_ready))
        .route("/metrics", get(metrics))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_number_and_a_unit() {
        for (text, seconds) in [("0s", 0), ("90s", 90), ("5m", 300), ("2h", 7200), ("7d", 604_800)] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)));
        }
        for text in ["", "5", "m", "-5m", "+5m", "1.5h", "5 m", "5é", "99999999999s"] {
            assert!(parse_time(text).is_err_and(|error| error.contains("such as 5m")), "{text}");
        }
    }
}
