//! Volumes for the claims of a Kubernetes cluster, as a service of the node.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kube::client::RustlsTlsError;
use kube::config::{KubeConfigOptions, Kubeconfig};
use nodekeel_fsquota::{OpenError, ProjectQuota, QuotaSetter};
use nodekeel_localstorage::Dir;
use nodekeel_logtree::{Dn, Level, LogMessage, LogStore};
use nodekeel_provisioner::csi::{BindMounter, NodePlugin, PluginDeps};
use nodekeel_provisioner::{
    Deps, DirStore, DirStoreError, DirStoreOptions, FINALIZER, NamedStore, PrometheusMetrics, Provisioner,
    ProvisionerConfig, ProvisionerIdentity, RunError, StoreName,
};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;

use super::health::CurrentProvisioner;
use super::kubelet_dir::wait_for_kubelet;
use super::no_quota::NoQuota;
use super::{DN, LimitEnforcement, ProvisionerPlan, quota_error_with_hint};
use crate::data::{self, DataError};

/// The reason why the volumes can't be opened, although the plan found no problem.
#[derive(Debug, Error)]
pub(crate) enum VolumesError {
    #[error(transparent)]
    Directory(DataError),
    #[error("{}", quota_error_with_hint(.0))]
    Quota(OpenError),
    #[error(
        "the volumes in {} are in use by another program: stop it, or set provisioner.directory to another directory",
        path.display()
    )]
    InUse { path: PathBuf },
    #[error("can't open the volumes in {}", path.display())]
    Store {
        path: PathBuf,
        #[source]
        source: DirStoreError,
    },
}

/// The volumes of the node, with their store locked.
#[derive(Clone)]
pub(crate) struct VolumeService {
    plan: ProvisionerPlan,
    reports: ServiceReports,
    /// Opens its directory again after its disk was lost.
    store: Arc<DirStore>,
    /// The stores with a name, which the provisioner opens: one that can't be, or whose disk hangs, keeps none of the
    /// others.
    stores: Vec<(StoreName, Arc<DirStore>)>,
}

/// The sinks of what the service reports.
#[derive(Debug, Clone)]
pub(super) struct ServiceReports {
    pub(super) log_store: LogStore,
    pub(super) metrics: Arc<PrometheusMetrics>,
    /// The provisioner that runs, to ask whether the API server can be used.
    pub(super) current: CurrentProvisioner,
}

impl VolumeService {
    /// Opens the existing directory, and resumes the work of a killed instance.
    pub(crate) fn open(
        plan: ProvisionerPlan,
        reports: ServiceReports,
        base: impl Fn() -> Result<Dir, DataError> + Send + Sync + 'static,
    ) -> Result<Self, VolumesError> {
        let store = Arc::new(StoreOpener::new(base, &plan, &reports.log_store).open()?);
        let mut stores = Vec::new();
        for (name, directory) in plan.stores.clone() {
            let plan = ProvisionerPlan { directory: directory.clone(), ..plan.clone() };
            let base = move || data::open_trusted_directory(&directory);
            let opener = StoreOpener::new(base, &plan, &reports.log_store);
            stores.push((name, Arc::new(DirStore::closed(&plan.directory, opener.options))));
        }
        Ok(Self { plan, reports, store, stores })
    }

    fn csi_plugin(&self) -> Result<Option<NodePlugin>, Failure> {
        let Some(kubelet) = &self.plan.kubelet else { return Ok(None) };
        let mut plugin = NodePlugin::new(self.plugin_deps(kubelet), kubelet)?;
        for (name, store) in &self.stores {
            plugin = plugin.with_store(name.clone(), Arc::clone(store) as _, Arc::clone(store) as _);
        }
        Ok(Some(plugin))
    }

    fn plugin_deps(&self, kubelet: &Path) -> PluginDeps {
        PluginDeps {
            driver: self.plan.driver.clone(),
            node: self.plan.node.clone(),
            store: Arc::clone(&self.store) as _,
            volumes: Arc::clone(&self.store) as _,
            mounter: Arc::new(BindMounter::new(kubelet)),
        }
    }
}

/// Opens the directory of a store.
struct StoreOpener {
    open: Arc<dyn Fn() -> Result<OpenDirectory, VolumesError> + Send + Sync>,
    options: DirStoreOptions,
    plan: ProvisionerPlan,
}

type OpenDirectory = (Dir, Arc<dyn QuotaSetter>);

impl StoreOpener {
    fn new(
        open_base: impl Fn() -> Result<Dir, DataError> + Send + Sync + 'static,
        plan: &ProvisionerPlan,
        log_store: &LogStore,
    ) -> Self {
        let mut options = DirStoreOptions::default();
        options.capacity = plan.capacity;
        options.program_directories = plan.images.program_directories().to_owned();
        let (planned, logs) = (plan.clone(), log_store.clone());
        let open = Arc::new(move || {
            let base = open_base().map_err(VolumesError::Directory)?;
            Ok((base, open_quota(&planned, &logs)?))
        });
        let reopen: Arc<dyn Fn() -> _ + Send + Sync> = open.clone();
        options.opener = Some(Arc::new(move || Ok(reopen()?)));
        Self { open, options, plan: plan.clone() }
    }

    fn open(&self) -> Result<DirStore, VolumesError> {
        let path = || self.plan.directory.clone();
        // Opened once at the start, so that a missing disk or quota is an error of the start.
        let (base, quota) = (self.open)()?;
        DirStore::with_options(base, quota, self.options.clone()).map_err(|source| match source {
            DirStoreError::Directory(source) => VolumesError::Directory(source.into()),
            DirStoreError::InUse { .. } => VolumesError::InUse { path: path() },
            source => VolumesError::Store { path: path(), source },
        })
    }
}

fn open_quota(plan: &ProvisionerPlan, log_store: &LogStore) -> Result<Arc<dyn QuotaSetter>, VolumesError> {
    let dn: Dn = DN.parse().expect("a valid DN");
    let warn = |text: String| log_store.append_message(&dn, LogMessage::new(Level::Warn, text));
    match plan.limits {
        LimitEnforcement::Enforced { .. } => {
            let quota = ProjectQuota::open(&plan.directory).map_err(VolumesError::Quota)?;
            quota.enforcement_gaps().iter().for_each(|warning| warn(format!("limits of volumes: {warning}")));
            Ok(Arc::new(quota))
        }
        LimitEnforcement::None => {
            let directory = plan.directory.display();
            warn(format!("volumes in {directory} have NO LIMITS: provisioner.quota is \"none\""));
            Ok(Arc::new(NoQuota::new(log_store.clone(), dn)))
        }
    }
}

/// Each incarnation creates a new client, since the kubeconfig may have changed; the volumes stay locked between
/// incarnations.
impl Runnable for VolumeService {
    fn run(&self, ctx: Context) -> RunFuture {
        let this = self.clone();
        Box::pin(async move { run_provisioner(&this, ctx).await })
    }
}

async fn run_provisioner(volumes: &VolumeService, ctx: Context) -> Result<(), Failure> {
    let plan = &volumes.plan;
    // The client comes first: a kubeconfig that is invalid by now is reported without a wait for the kubelet.
    let client = new_client(&plan.kubeconfig).await?;
    if let Some(kubelet) = &plan.kubelet {
        // The kubelet may be a service of this node. The plugin needs the directories that the kubelet creates.
        wait_for_kubelet(kubelet, &ctx).await?;
    }
    let plugin = volumes.csi_plugin()?;
    // Two instances with one driver name at this kubelet would both provision each claim.
    let _lock = plugin.as_ref().map(NodePlugin::lock_driver).transpose()?;
    let identity = ProvisionerIdentity {
        driver: plan.driver.clone(),
        node: plan.node.clone(),
        finalizer: Some(FINALIZER.to_owned()),
        store: None,
    };
    let deps = Deps {
        client,
        snapshots: Some(Arc::clone(&volumes.store) as _),
        store: Arc::clone(&volumes.store) as _,
        metrics: Arc::clone(&volumes.reports.metrics) as _,
        guard: plugin.as_ref().map(NodePlugin::volume_guard),
        registered: plugin.as_ref().map(NodePlugin::registration_state),
        hook: None,
    };
    let named = volumes.stores.iter().map(|(name, store)| {
        let added = NamedStore {
            store: Arc::clone(store) as _,
            snapshots: Some(Arc::clone(store) as _),
            metrics: Arc::new(volumes.reports.metrics.of_store(name)),
            guard: plugin.as_ref().map(|plugin| plugin.guard_of(Arc::clone(store) as _)),
        };
        (name.clone(), added)
    });
    let named: Vec<_> = named.collect();
    // The plugin is a child, so that it ends with this incarnation and its lock of the driver.
    if let Some(plugin) = plugin {
        ctx.run_child("csi", plugin)?;
    }
    let mut config = ProvisionerConfig::new(identity);
    (config.audit_interval, config.audit_rate) = (plan.audit.interval, plan.audit.rate);
    let provisioner = Provisioner::new(config, deps);
    let provisioner =
        named.into_iter().fold(provisioner, |provisioner, (name, added)| provisioner.with_store(name, added));
    // Published before the controller is ready: the health can tell why it does not become ready.
    let _published = volumes.reports.current.publish(provisioner.clone());
    ctx.run_child("controller", move |ctx: Context| run_controller(provisioner.clone(), ctx))?;
    ctx.wait_ready("controller").await?;
    ctx.signal_ready()?;
    Err(ctx.canceled().await.into())
}

/// Runs the provisioner. Until it is ready it waits for an API server that may never answer, even after a
/// cancel; so it is dropped then, as by a crash, and the next incarnation resumes.
async fn run_controller(provisioner: Provisioner, ctx: Context) -> Result<(), Failure> {
    let is_ready = AtomicBool::new(false);
    let ready = || {
        is_ready.store(true, Ordering::Relaxed);
        // Fails only if this incarnation has exited, and then readiness does not matter.
        let _ = ctx.signal_ready();
    };
    let stopped = async {
        let canceled = ctx.canceled().await;
        // A provisioner that is ready ends by its token. Only one that still waits for the API server is dropped.
        if is_ready.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        canceled
    };
    tokio::select! {
        Err(error) = provisioner.run_until(ctx.cancellation_token(), ready) => match error {
            RunError::Canceled => Err(ctx.canceled().await.into()),
            error => Err(Failure::new(error)),
        },
        canceled = stopped => Err(canceled.into()),
    }
}

/// The kubeconfig became invalid after the plan checked it.
#[derive(Debug, Error)]
#[error("can't create a Kubernetes client from kubeconfig {}", path.display())]
struct ClientError {
    path: PathBuf,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

/// The meaning of a client error on a machine without root certificates: the cause does not name it.
#[derive(Debug, Error)]
#[error(
    "the kubeconfig names no certificate-authority, and this machine has no root certificates: add \
     certificate-authority to it, or install root certificates (Debian: ca-certificates)"
)]
struct NoRootCertificates;

async fn new_client(kubeconfig: &Path) -> Result<kube::Client, ClientError> {
    let failed = |source| ClientError { path: kubeconfig.to_owned(), source };
    let file = Kubeconfig::read_from(kubeconfig).map_err(|error| failed(error.into()))?;
    let options = KubeConfigOptions::default();
    let config =
        kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|error| failed(error.into()))?;
    let has_ca = config.root_cert.is_some();
    kube::Client::try_from(config).map_err(|error| match error {
        kube::Error::RustlsTls(RustlsTlsError::AddRootCertificate(_)) if !has_ca => {
            failed(NoRootCertificates.into())
        }
        error => failed(error.into()),
    })
}

#[cfg(test)]
#[path = "volume_service_test.rs"]
mod tests;
