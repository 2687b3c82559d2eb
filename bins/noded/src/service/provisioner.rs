//! Volumes for the claims of a Kubernetes cluster, as a service of the node.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kube::config::{KubeConfigOptions, Kubeconfig};
use nodekeel_fsquota::{OpenError, ProjectQuota, QuotaSetter};
use nodekeel_logtree::{Dn, Level, LogMessage, LogStore};
use nodekeel_provisioner::csi::{BindMounter, NodePlugin, PluginDeps};
use nodekeel_provisioner::{
    Deps, DirStore, DirStoreError, FINALIZER, Provisioner, ProvisionerConfig, ProvisionerIdentity, RunError,
};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;

use super::no_quota::NoQuota;
use crate::data::{self, DataError};
use crate::plan::{LimitEnforcement, ProvisionerPlan, quota_error_with_hint};

/// Its DN.
pub(crate) const DN: &str = "root.provisioner";

/// Why the volumes can't be opened, although the plan found no problem.
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
#[derive(Debug, Clone)]
pub(crate) struct VolumeService {
    plan: ProvisionerPlan,
    store: Arc<DirStore>,
}

impl VolumeService {
    /// Opens the existing directory, and resumes what a killed instance has started.
    pub(crate) fn open(plan: &ProvisionerPlan, log_store: &LogStore) -> Result<Self, VolumesError> {
        let path = || plan.directory.clone();
        let base = data::open_directory(&plan.directory).map_err(VolumesError::Directory)?;
        let store = DirStore::new(base, open_quota(plan, log_store)?).map_err(|source| match source {
            DirStoreError::Directory(source) => VolumesError::Directory(source.into()),
            DirStoreError::InUse { .. } => VolumesError::InUse { path: path() },
            source => VolumesError::Store { path: path(), source },
        })?;
        Ok(Self { plan: plan.clone(), store: Arc::new(store) })
    }

    fn csi_plugin(&self) -> Result<Option<NodePlugin>, Failure> {
        let Some(kubelet) = &self.plan.kubelet else { return Ok(None) };
        let deps = PluginDeps {
            driver: self.plan.driver.clone(),
            node: self.plan.node.clone(),
            store: self.store.clone(),
            volumes: self.store.clone(),
            mounter: Arc::new(BindMounter::new(kubelet)),
        };
        Ok(Some(NodePlugin::new(deps, kubelet)?))
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

/// Each incarnation creates a new client, since the kubeconfig may have changed; the volumes stay locked
/// meanwhile.
impl Runnable for VolumeService {
    fn run(&self, ctx: Context) -> RunFuture {
        let this = self.clone();
        Box::pin(async move { run_provisioner(&this, ctx).await })
    }
}

async fn run_provisioner(volumes: &VolumeService, ctx: Context) -> Result<(), Failure> {
    let plan = &volumes.plan;
    let client = new_client(&plan.kubeconfig).await?;
    let plugin = volumes.csi_plugin()?;
    let identity = ProvisionerIdentity {
        driver: plan.driver.clone(),
        node: plan.node.clone(),
        finalizer: Some(FINALIZER.to_owned()),
    };
    let deps = Deps {
        client,
        store: volumes.store.clone(),
        metrics: Arc::new(()),
        guard: plugin.as_ref().map(NodePlugin::volume_guard),
        registered: plugin.as_ref().map(NodePlugin::registration_state),
        hook: None,
    };
    if let Some(plugin) = plugin {
        ctx.run_child("csi", plugin)?;
    }
    let provisioner = Provisioner::new(ProvisionerConfig::new(identity), deps);
    ctx.run_child("controller", move |ctx: Context| run_controller(provisioner.clone(), ctx))?;
    ctx.wait_ready(&format!("{}.controller", ctx.dn())).await?;
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
#[error("can't load kubeconfig {}", path.display())]
struct ClientError {
    path: PathBuf,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

async fn new_client(kubeconfig: &std::path::Path) -> Result<kube::Client, ClientError> {
    let failed = |source| ClientError { path: kubeconfig.to_owned(), source };
    let file = Kubeconfig::read_from(kubeconfig).map_err(|error| failed(error.into()))?;
    let options = KubeConfigOptions::default();
    let config =
        kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|error| failed(error.into()))?;
    kube::Client::try_from(config).map_err(|error| failed(error.into()))
}
