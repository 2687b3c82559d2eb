//! Volumes for the claims of a Kubernetes cluster, as a service of the node.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kube::config::{KubeConfigOptions, Kubeconfig};
use nodekeel_fsquota::{OpenError, ProjectQuota, QuotaSetter};
use nodekeel_logtree::{Dn, Journal, Level, Message};
use nodekeel_provisioner::csi::{OsMounts, Plugin, PluginDeps};
use nodekeel_provisioner::{
    Config, Deps, DirStore, DirStoreError, FINALIZER, Identity, Provisioner, RunError,
};
use nodekeel_supervisor::{Context, Failure, RunFuture, Runnable};
use thiserror::Error;

use super::no_quota::NoQuota;
use crate::data::{self, DataError};
use crate::plan::{Limits, Volumes, no_limits};

/// What the tree calls it.
pub(crate) const DN: &str = "root.provisioner";

/// Why there can be no volumes, though nothing was in the way when it was looked at.
#[derive(Debug, Error)]
pub(crate) enum VolumesError {
    #[error(transparent)]
    Directory(DataError),
    #[error("{}", no_limits(.0))]
    Quota(OpenError),
    #[error(
        "the volumes in {} are used by another program; end it, or set provisioner.directory to another directory",
        path.display()
    )]
    InUse { path: PathBuf },
    #[error("take up the volumes in {}", path.display())]
    Store {
        path: PathBuf,
        #[source]
        source: DirStoreError,
    },
}

/// The volumes of the node, taken: nobody else can have their store meanwhile.
#[derive(Debug, Clone)]
pub(crate) struct Taken {
    plan: Volumes,
    store: Arc<DirStore>,
}

impl Taken {
    /// Takes the directory, which is there, and goes on with what a killed instance has begun.
    pub(crate) fn take(plan: &Volumes, journal: &Journal) -> Result<Self, VolumesError> {
        let path = || plan.directory.clone();
        let base = data::open(&plan.directory).map_err(VolumesError::Directory)?;
        let store = DirStore::new(base, quota(plan, journal)?).map_err(|source| match source {
            DirStoreError::Directory(source) => VolumesError::Directory(source.into()),
            DirStoreError::InUse { .. } => VolumesError::InUse { path: path() },
            source => VolumesError::Store { path: path(), source },
        })?;
        Ok(Self { plan: plan.clone(), store: Arc::new(store) })
    }

    fn plugin(&self) -> Result<Option<Plugin>, Failure> {
        let Some(kubelet) = &self.plan.kubelet else { return Ok(None) };
        let deps = PluginDeps {
            driver: self.plan.driver.clone(),
            node: self.plan.node.clone(),
            store: self.store.clone(),
            volumes: self.store.clone(),
            mounts: Arc::new(OsMounts::new(kubelet)),
        };
        Ok(Some(Plugin::new(deps, kubelet)?))
    }
}

fn quota(plan: &Volumes, journal: &Journal) -> Result<Arc<dyn QuotaSetter>, VolumesError> {
    let dn: Dn = DN.parse().expect("it is a name");
    let warn = |text: String| journal.append(&dn, Message::new(Level::Warn, text));
    match plan.limits {
        Limits::Enforced { .. } => {
            let quota = ProjectQuota::open(&plan.directory).map_err(VolumesError::Quota)?;
            quota.warnings().iter().for_each(|warning| warn(format!("limits of volumes: {warning}")));
            Ok(Arc::new(quota))
        }
        Limits::None => {
            let directory = plan.directory.display();
            warn(format!("volumes in {directory} have NO LIMITS: provisioner.quota is \"none\""));
            Ok(Arc::new(NoQuota::new(journal.clone(), dn)))
        }
    }
}

/// It makes its client anew with each run, for the kubeconfig may have changed; the volumes stay taken meanwhile.
impl Runnable for Taken {
    fn run(&self, ctx: Context) -> RunFuture {
        let this = self.clone();
        Box::pin(async move { serve(&this, ctx).await })
    }
}

async fn serve(volumes: &Taken, ctx: Context) -> Result<(), Failure> {
    let plan = &volumes.plan;
    let client = client(&plan.kubeconfig).await?;
    let plugin = volumes.plugin()?;
    let identity = Identity {
        driver: plan.driver.clone(),
        node: plan.node.clone(),
        finalizer: Some(FINALIZER.to_owned()),
    };
    let deps = Deps {
        client,
        store: volumes.store.clone(),
        meter: Arc::new(()),
        guard: plugin.as_ref().map(Plugin::guard),
        registered: plugin.as_ref().map(Plugin::known),
        hook: None,
    };
    if let Some(plugin) = plugin {
        ctx.run("csi", plugin)?;
    }
    let provisioner = Provisioner::new(Config::new(identity), deps);
    ctx.run("controller", move |ctx: Context| control(provisioner.clone(), ctx))?;
    ctx.wait_ready(&format!("{}.controller", ctx.dn())).await?;
    ctx.ready()?;
    Err(ctx.cancelled().await.into())
}

/// Runs the provisioner. Until it is ready it waits for an API server that may never answer, also when it is told to stop;
/// what little may be under way then is left as by a crash, and the next run takes it up.
async fn control(provisioner: Provisioner, ctx: Context) -> Result<(), Failure> {
    let is_ready = AtomicBool::new(false);
    let ready = || {
        is_ready.store(true, Ordering::Relaxed);
        // Stale only if this run has ended, and then nobody asks.
        let _ = ctx.ready();
    };
    let stopped = async {
        let cancelled = ctx.cancelled().await;
        if is_ready.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        cancelled
    };
    tokio::select! {
        Err(error) = provisioner.run_until(ctx.token(), ready) => match error {
            RunError::Cancelled => Err(ctx.cancelled().await.into()),
            error => Err(Failure::new(error)),
        },
        cancelled = stopped => Err(cancelled.into()),
    }
}

/// What was wrong with the kubeconfig after it was looked at.
#[derive(Debug, Error)]
#[error("use the kubeconfig {}", path.display())]
struct ClientError {
    path: PathBuf,
    #[source]
    source: Box<dyn std::error::Error + Send + Sync>,
}

async fn client(kubeconfig: &std::path::Path) -> Result<kube::Client, ClientError> {
    let failed = |source| ClientError { path: kubeconfig.to_owned(), source };
    let file = Kubeconfig::read_from(kubeconfig).map_err(|error| failed(error.into()))?;
    let options = KubeConfigOptions::default();
    let config =
        kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|error| failed(error.into()))?;
    kube::Client::try_from(config).map_err(|error| failed(error.into()))
}
