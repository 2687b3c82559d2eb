//! `provisionerd run`.

use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nodekeel_provisioner::csi::{OsMounts, Plugin, PluginDeps};
use nodekeel_provisioner::{
    Config as ProvisionerConfig, Deps, DirStore, FINALIZER, Hook, Identity, Provisioner,
};
use nodekeel_supervisor::{Change, Context, Event, Failure, State, StopSignals, Supervisor};
use thiserror::Error;
use tokio::sync::watch;

use crate::check::{self, Finding};
use crate::config::Config;
use crate::http::{Http, Told};
use crate::metrics::Metrics;
use crate::{cluster, log, volumes};

/// How long blocking calls may take once everything else has stopped.
const ALLOWANCE: Duration = Duration::from_secs(5);

/// Why nothing was started.
#[derive(Debug, Error)]
pub(crate) enum StartError {
    #[error("listen on {address}: give another address by --listen")]
    Listen {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
}

pub(crate) fn run(config: Config) -> Result<ExitCode> {
    log::start(&config.log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?;
    let code = runtime.block_on(until_signalled(&config));
    runtime.shutdown_timeout(ALLOWANCE);
    code
}

async fn until_signalled(config: &Config) -> Result<ExitCode> {
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let parts = Parts::make(config).await?;
    let (waiting, told) = watch::channel(vec!["the start".to_owned()]);
    tokio::spawn(look(config.clone(), parts.client.clone()));
    let supervisor = Arc::new(Supervisor::builder().hook(tell).start(parts.root(told)));
    let watching = tokio::spawn(watch_tree(Arc::clone(&supervisor), waiting));
    tracing::info!(directory = %config.directory.display(), listen = %config.listen, "started");
    signals.asked().await;
    tracing::info!("stopping; a second signal forces");
    let code = stop(&supervisor, &mut signals).await;
    watching.abort();
    Ok(code)
}

/// Says what would keep pods from their volumes although all runs; none of it is a reason not to start.
async fn look(config: Config, client: kube::Client) {
    let mut findings = Vec::new();
    if config.csi {
        findings.push(check::shared(&config.kubelet.join("pods"), check::is_pod()));
    }
    // A server that does not answer is told of by who watches it.
    if client.apiserver_version().await.is_ok() {
        findings.extend(check::granted(&config, &client).await);
    }
    for finding in findings {
        match finding {
            Finding::Good(_) => {}
            Finding::Warning(text) => tracing::info!("{text}"),
            Finding::Bad(error) => tracing::error!("{error:#}"),
        }
    }
}

async fn stop(supervisor: &Supervisor, signals: &mut StopSignals) -> ExitCode {
    let report = tokio::select! {
        report = supervisor.shutdown() => report,
        () = signals.insisted() => {
            tracing::warn!("forced by a second signal");
            return ExitCode::from(7);
        }
    };
    for straggler in &report.stragglers {
        tracing::error!("{} did not stop within {:?} and was given up on", straggler.dn, straggler.waited);
    }
    tracing::info!("stopped");
    if report.stragglers.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(6) }
}

/// All that runs.
struct Parts {
    store: Arc<DirStore>,
    client: kube::Client,
    provisioner: Provisioner,
    plugin: Option<Plugin>,
    listener: TcpListener,
    metrics: Arc<Metrics>,
}

impl Parts {
    async fn make(config: &Config) -> Result<Self> {
        let node = config.node()?;
        let hook = hook()?;
        let listener = listen(config.listen)?;
        let store = volumes::take(config, hook.clone())?;
        let client = cluster::client(config.kubeconfig.as_deref()).await?;
        let metrics = Arc::new(Metrics::new());
        let plugin = match config.csi {
            true => Some(Plugin::new(
                PluginDeps {
                    driver: config.driver.clone(),
                    node: node.clone(),
                    store: store.clone(),
                    volumes: store.clone(),
                    mounts: Arc::new(OsMounts::new(&config.kubelet)),
                },
                &config.kubelet,
            )?),
            false => None,
        };
        let identity =
            Identity { driver: config.driver.clone(), node, finalizer: Some(FINALIZER.to_owned()) };
        let mut wanted = ProvisionerConfig::new(identity);
        wanted.concurrency = config.concurrency;
        let deps = Deps {
            client: client.clone(),
            store: store.clone(),
            meter: Arc::new(metrics.meter.clone()),
            guard: plugin.as_ref().map(Plugin::guard),
            registered: plugin.as_ref().map(Plugin::known),
            hook,
        };
        Ok(Self { provisioner: Provisioner::new(wanted, deps), client, store, plugin, listener, metrics })
    }

    /// The root of the tree.
    fn root(self, waiting: watch::Receiver<Vec<String>>) -> impl Fn(Context) -> RootRun {
        let Self { store, client: _, provisioner, plugin, listener, metrics } = self;
        let known = plugin.as_ref().map(Plugin::known);
        let told = Told { metrics, store, known, waiting };
        let parts = std::sync::Mutex::new(Some((Http { listener, told }, plugin, provisioner)));
        move |ctx: Context| {
            let parts = parts.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            Box::pin(async move {
                // The root only fails by a bug, after which there is nothing to start again.
                let (http, plugin, provisioner) = parts.ok_or("the root of the tree has run before")?;
                ctx.run("http", http)?;
                if let Some(plugin) = plugin {
                    ctx.run("csi", plugin)?;
                }
                ctx.run("provisioner", provisioner)?;
                ctx.ready()?;
                Err(Failure::from(ctx.cancelled().await))
            }) as RootRun
        }
    }
}

type RootRun = std::pin::Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// Logs what becomes of what runs.
fn tell(event: &Event) {
    let dn = &*event.dn;
    match &event.change {
        Change::Exited { state: State::Dead, exit } => tracing::error!(dn, "{exit}"),
        Change::Straggling { .. } => tracing::warn!(dn, "{}", event.change),
        Change::Ready => tracing::info!(dn, "ready"),
        change => tracing::debug!(dn, "{change}"),
    }
}

/// Tells what isn't ready, whenever the tree changes.
async fn watch_tree(supervisor: Arc<Supervisor>, waiting: watch::Sender<Vec<String>>) {
    let mut changes = supervisor.watch();
    loop {
        let tree = supervisor.snapshot();
        let is_up = |state: State| matches!(state, State::Ready | State::Done);
        let names = tree.iter().filter(|node| !is_up(node.state)).map(|node| node.dn.to_string());
        let names: Vec<_> = names.collect();
        waiting.send_if_modified(|old| {
            let is_new = *old != names;
            *old = names;
            is_new
        });
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener, StartError> {
    let bind = || {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|source| StartError::Listen { address, source })
}

#[cfg(feature = "kill-points")]
fn hook() -> Result<Option<Arc<dyn Hook>>> {
    crate::kill::hook()
}

#[cfg(not(feature = "kill-points"))]
#[expect(clippy::unnecessary_wraps, reason = "with kill points, it can fail")]
fn hook() -> Result<Option<Arc<dyn Hook>>> {
    Ok(None)
}
