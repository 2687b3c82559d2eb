//! `provisionerd run`.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::api::ListParams;
use nodekeel_provisioner::csi::{BindMounter, DriverLock, NodePlugin, PluginDeps};
use nodekeel_provisioner::{
    Deps, DirStore, NamedStore, NodeName, Provisioner, ProvisionerConfig, ProvisionerIdentity, StepHook,
    StoreAction, StoreIdentity, StoreName, VolumeRecovery, format_chain, plan_new_store, plan_store,
};
use nodekeel_supervisor::{
    Context, Event, Failure, RunnableChange, RunnableState, StopSignals, Supervisor, listen_http,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use thiserror::Error;
use tokio::sync::watch;

use crate::check::{self, CheckFinding};
use crate::config::DaemonConfig;
use crate::http::{HttpServer, HttpState};
use crate::metrics::DaemonMetrics;
use crate::{api_server, logging, sys, volumes};

/// Time for blocking calls to finish once everything else has stopped.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(5);

/// The time between two returns of free memory.
const TRIM_INTERVAL: Duration = Duration::from_secs(30);

/// Timeout of the API server when the directory can't be used: without an answer, the start fails.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub(crate) enum StartError {
    #[error("can't listen on {address}: set another address with --listen")]
    Listen {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
}

pub(crate) fn run_daemon(config: DaemonConfig) -> Result<ExitCode> {
    logging::init_logging(&config.log)?;
    raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("can't start the async runtime")?;
    let code = runtime.block_on(run_until_signal(&config));
    runtime.shutdown_timeout(BLOCKING_TIMEOUT);
    code
}

/// Returns what lists and bursts of claims have left free, as the allocator returns the end of its memory alone.
async fn return_free_memory() {
    loop {
        tokio::time::sleep(TRIM_INTERVAL).await;
        sys::return_free_memory();
    }
}

/// Lets this process open as many files as its hard limit allows. The soft one is 1,024 by default, for programs that
/// call `select`.
fn raise_open_files() {
    let hard = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }) {
        tracing::warn!("can't raise the limit of open files: {error}");
    }
}

async fn run_until_signal(config: &DaemonConfig) -> Result<ExitCode> {
    // Registered first, so that no signal is lost during the start.
    let mut signals = StopSignals::listen().context("can't listen for SIGTERM and SIGINT")?;
    // All that can fail is opened before the tree starts.
    let parts = DaemonParts::assemble(config).await?;
    let (not_ready_sender, not_ready) = watch::channel(vec!["the start".to_owned()]);
    // In a task: an API server that does not answer must not delay the start.
    tokio::spawn(log_findings(config.clone(), parts.client.clone()));
    tokio::spawn(return_free_memory());
    let supervisor = Arc::new(Supervisor::builder().event_hook(log_event).start(parts.into_root(not_ready)));
    let watching = tokio::spawn(track_readiness(Arc::clone(&supervisor), not_ready_sender));
    tracing::info!(directory = %config.directory.display(), listen = %config.listen, "started");
    // A second signal ends it at once: the next start resumes the work that this exit interrupts.
    let report = supervisor.run_until_signal(&mut signals).await;
    // The task owns the supervisor, and would not end by itself.
    watching.abort();
    report.problems().for_each(|problem| tracing::error!("{problem}"));
    if report.is_forced {
        return Ok(ExitCode::from(7));
    }
    tracing::info!("stopped");
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::from(6) })
}

/// Logs conditions that keep pods from their volumes although everything runs; none of them prevents the
/// start.
async fn log_findings(config: DaemonConfig, client: kube::Client) {
    let mut findings = Vec::new();
    if config.csi {
        findings.push(check::check_shared_mount(&config.kubelet.join("pods"), check::is_in_pod()));
    }
    // The watches log a server that does not answer.
    if client.apiserver_version().await.is_ok() {
        findings.push(check::check_permissions(&client).await);
        findings.extend(check::check_api_objects(&config, &client).await);
    }
    for finding in findings {
        match finding {
            CheckFinding::Pass(_) => {}
            CheckFinding::Warning(text) => tracing::info!("{text}"),
            CheckFinding::Failure(error) => tracing::error!("{}", format_chain(&*error)),
        }
    }
}

/// A store, and its name.
#[derive(Debug, Clone)]
pub(crate) struct OpenStore {
    pub(crate) name: Option<StoreName>,
    pub(crate) store: Arc<DirStore>,
}

struct DaemonParts {
    /// At least one.
    stores: Vec<OpenStore>,
    client: kube::Client,
    provisioner: Provisioner,
    plugin: Option<(NodePlugin, DriverLock)>,
    listener: TcpListener,
    metrics: Arc<DaemonMetrics>,
}

impl DaemonParts {
    async fn assemble(config: &DaemonConfig) -> Result<Self> {
        let node = config.node_name()?;
        let hook = kill_hook()?;
        // A second instance on this address fails here, before it opens the store.
        let listener = bind_listener(config.listen)?;
        let identity = config.provisioner_identity(node.clone());
        let (store, client) = open_store(config, &identity, hook.clone()).await?;
        let mut stores = vec![OpenStore { name: None, store: Arc::clone(&store) }];
        for config in config.of_stores().skip(1) {
            stores
                .push(OpenStore { name: config.store.clone(), store: closed_store(&config, hook.clone())? });
        }
        let metrics = Arc::new(DaemonMetrics::new());
        let plugin = if config.csi { Some(open_plugin(config, &node, &stores, hook.clone())?) } else { None };
        let mut wanted = ProvisionerConfig::new(identity);
        wanted.concurrency = config.concurrency;
        (wanted.audit_interval, wanted.audit_rate) = (config.audit.interval, config.audit.rate);
        let deps = Deps {
            client: client.clone(),
            store: store.clone(),
            snapshots: Some(store.clone()),
            metrics: Arc::new(metrics.meter.clone()),
            guard: plugin.as_ref().map(|(plugin, _)| plugin.volume_guard()),
            registered: plugin.as_ref().map(|(plugin, _)| plugin.registration_state()),
            hook,
        };
        let mut provisioner = Provisioner::new(wanted, deps);
        for OpenStore { name, store } in &stores {
            let Some(name) = name else { continue };
            let added = NamedStore {
                store: store.clone(),
                snapshots: Some(store.clone()),
                metrics: Arc::new(metrics.meter.of_store(name)),
                guard: plugin.as_ref().map(|(plugin, _)| plugin.guard_of(store.clone())),
            };
            provisioner = provisioner.with_store(name.clone(), added);
        }
        Ok(Self { provisioner, client, stores, plugin, listener, metrics })
    }

    /// The root runnable of the tree.
    fn into_root(self, not_ready: watch::Receiver<Vec<String>>) -> impl Fn(Context) -> RootFuture {
        let Self { stores, client: _, provisioner, plugin, listener, metrics } = self;
        let (plugin, lock) = plugin.unzip();
        let registered = plugin.as_ref().map(NodePlugin::registration_state);
        let state = HttpState { metrics, stores, registered, provisioner: provisioner.clone(), not_ready };
        let parts = std::sync::Mutex::new(Some((HttpServer { listener, state }, plugin, provisioner)));
        move |ctx: Context| {
            // Held for as long as the tree exists.
            let _ = &lock;
            let parts = parts.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
            Box::pin(async move {
                // The root fails only by a bug, and then its parts cannot be started again.
                let (http, plugin, provisioner) = parts.ok_or("the root cannot run twice")?;
                ctx.run_child("http", http)?;
                if let Some(plugin) = plugin {
                    ctx.run_child("csi", plugin)?;
                }
                ctx.run_child("provisioner", provisioner)?;
                ctx.signal_ready()?;
                Err(Failure::from(ctx.canceled().await))
            }) as RootFuture
        }
    }
}

/// Opens the store. If its directory can't be used, and the node has volumes or snapshots, their disk is absent: then the
/// store is closed, and served once it is back.
async fn open_store(
    config: &DaemonConfig,
    identity: &ProvisionerIdentity,
    hook: Option<Arc<dyn StepHook>>,
) -> Result<(Arc<DirStore>, kube::Client)> {
    let options = volumes::store_options(config, hook)?;
    // Both are opened before a decision: an absent disk is tolerated only if the API server knows volumes of this
    // node.
    let (opened, client) = (
        volumes::open_store(config, options.clone()),
        api_server::api_client(config.kubeconfig.as_deref()).await,
    );
    match (opened, client) {
        (Ok(store), client) => Ok((store, client?)),
        // With further stores, those are served whatever becomes of this one.
        (Err(error), Ok(client))
            if error.may_be_absent()
                && (!config.stores.is_empty() || needs_store(&client, identity).await) =>
        {
            tracing::error!("the volumes are not served: {}", format_chain(&error));
            Ok((Arc::new(DirStore::closed(&config.directory, options)), client))
        }
        (Err(error), _) => Err(error.into()),
    }
}

/// A store with a name, which its provisioner opens: a directory that can't be used, or whose disk hangs, is no reason not to
/// serve the others.
fn closed_store(config: &DaemonConfig, hook: Option<Arc<dyn StepHook>>) -> Result<Arc<DirStore>> {
    let options = volumes::store_options(config, hook)?;
    Ok(Arc::new(DirStore::closed(&config.directory, options)))
}

/// True if the node has volumes or snapshots; false if the API server does not answer in time.
async fn needs_store(client: &kube::Client, identity: &ProvisionerIdentity) -> bool {
    let is_rejected = async {
        let volumes = Api::<PersistentVolume>::all(client.clone()).list(&ListParams::default()).await?;
        // An absent store is rejected if a volume or a snapshot needs it.
        let action = plan_store(identity, &StoreIdentity::Absent, &BTreeSet::new(), &volumes.items);
        if matches!(action, StoreAction::Reject(_)) {
            return Ok(true);
        }
        let recovery = VolumeRecovery::new(client.clone(), identity.clone(), None);
        let ready = recovery.list_ready_snapshots().await?;
        let action = plan_new_store(identity, &BTreeSet::new(), &ready, &volumes.items);
        Ok::<_, anyhow::Error>(matches!(action, StoreAction::Reject(_)))
    };
    matches!(tokio::time::timeout(LIST_TIMEOUT, is_rejected).await, Ok(Ok(true)))
}

/// Creates the node plugin, and rejects a second instance at the same kubelet.
fn open_plugin(
    config: &DaemonConfig,
    node: &NodeName,
    stores: &[OpenStore],
    hook: Option<Arc<dyn StepHook>>,
) -> Result<(NodePlugin, DriverLock)> {
    let store = &stores[0].store;
    let deps = PluginDeps {
        driver: config.driver.clone(),
        node: node.clone(),
        store: Arc::clone(store) as _,
        volumes: Arc::clone(store) as _,
        mounter: Arc::new(BindMounter::new(&config.kubelet).with_hook(hook)),
    };
    let mut plugin = NodePlugin::new(deps, &config.kubelet)?;
    for OpenStore { name, store } in stores {
        if let Some(name) = name {
            plugin = plugin.with_store(name.clone(), Arc::clone(store) as _, Arc::clone(store) as _);
        }
    }
    let lock = plugin.lock_driver()?;
    Ok((plugin, lock))
}

type RootFuture = std::pin::Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

/// Logs the events of the tree.
fn log_event(event: &Event) {
    let dn = &*event.dn;
    match &event.change {
        RunnableChange::Exited { state: RunnableState::Dead, exit } => tracing::error!(dn, "{exit}"),
        RunnableChange::Straggling { .. } => tracing::warn!(dn, "{}", event.change),
        RunnableChange::Ready => tracing::info!(dn, "ready"),
        change => tracing::debug!(dn, "{change}"),
    }
}

/// Updates the list of runnables that are not ready whenever the tree changes.
async fn track_readiness(supervisor: Arc<Supervisor>, not_ready: watch::Sender<Vec<String>>) {
    let mut changes = supervisor.watch_changes();
    loop {
        let tree = supervisor.snapshot();
        let is_up = |state: RunnableState| matches!(state, RunnableState::Ready | RunnableState::Done);
        let names = tree.iter().filter(|node| !is_up(node.state)).map(|node| node.dn.to_string());
        let names: Vec<_> = names.collect();
        not_ready.send_if_modified(|old| {
            let is_new = *old != names;
            *old = names;
            is_new
        });
        // The watch was started before the snapshot, so that no change in between is missed.
        if changes.changed().await.is_err() {
            return;
        }
    }
}

pub(crate) fn bind_listener(address: SocketAddr) -> Result<TcpListener, StartError> {
    listen_http(address).map_err(|source| StartError::Listen { address, source })
}

#[cfg(feature = "kill-points")]
pub(crate) fn kill_hook() -> Result<Option<Arc<dyn StepHook>>> {
    crate::kill_points::kill_hook()
}

#[cfg(not(feature = "kill-points"))]
#[expect(clippy::unnecessary_wraps, reason = "with kill points, it can fail")]
pub(crate) fn kill_hook() -> Result<Option<Arc<dyn StepHook>>> {
    Ok(None)
}
