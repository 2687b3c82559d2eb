//! The provisioner of this workspace, with directories on the local disk and limits in a map.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use nodekeel_fsquota::{
    Error, KernelOperation, LimitChange, ProjectId, QuotaChange, QuotaLimits, QuotaSetter, QuotaStatus,
    QuotaUsage,
};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{Deps, DirStore, FINALIZER, Provisioner, ProvisionerConfig};
use tokio_util::sync::CancellationToken;

use crate::contender::{Contender, READY, api_client};

pub(crate) async fn run(kubeconfig: &Path, directory: &Path) -> Result<()> {
    let store = Arc::new(DirStore::new(Dir::open(directory)?, Arc::new(MemoryQuota::default()))?);
    let deps = Deps {
        client: api_client(kubeconfig).await?,
        store,
        metrics: Arc::new(()),
        guard: None,
        registered: None,
        snapshots: None,
        hook: None,
    };
    let provisioner =
        Provisioner::new(ProvisionerConfig::new(Contender::Ours.identity(Some(FINALIZER))?), deps);
    match provisioner.run_until(CancellationToken::new(), || println!("{READY}")).await {
        Err(error) => Err(error.into()),
    }
}

/// Limits by inode, in memory. A call takes less time than one of the kernel.
#[derive(Debug, Default)]
struct MemoryQuota(Mutex<HashMap<ProjectId, QuotaLimits>>);

impl MemoryQuota {
    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<ProjectId, QuotaLimits>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn project_id(dir: BorrowedFd<'_>) -> Result<ProjectId, Error> {
    let failed = |source: std::io::Error| Error::Kernel { call: KernelOperation::ReadProject, source };
    let stat = rustix::fs::fstat(dir).map_err(|errno| failed(errno.into()))?;
    let number = u32::try_from(stat.st_ino & 0x7fff_ffff).ok().and_then(ProjectId::new);
    number.ok_or_else(|| failed(std::io::ErrorKind::InvalidData.into()))
}

fn apply_change<T>(change: LimitChange<T>, old: Option<T>) -> Option<T> {
    match change {
        LimitChange::Keep => old,
        LimitChange::Unlimited => None,
        LimitChange::Set(limit) => Some(limit),
    }
}

impl QuotaSetter for MemoryQuota {
    fn set_limits(&self, dir: BorrowedFd<'_>, change: QuotaChange) -> Result<QuotaStatus, Error> {
        let project = project_id(dir)?;
        let mut entries = self.entries();
        let limits = entries.entry(project).or_default();
        limits.bytes = apply_change(change.bytes, limits.bytes);
        limits.inodes = apply_change(change.inodes, limits.inodes);
        Ok(QuotaStatus { project, limits: *limits, usage: QuotaUsage::default() })
    }

    fn read_status(&self, dir: BorrowedFd<'_>) -> Result<Option<QuotaStatus>, Error> {
        let project = project_id(dir)?;
        let limits = self.entries().get(&project).copied();
        Ok(limits.map(|limits| QuotaStatus { project, limits, usage: QuotaUsage::default() }))
    }

    fn clear_limits(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.release_project(project_id(dir)?)
    }

    fn release_project(&self, project: ProjectId) -> Result<(), Error> {
        self.entries().remove(&project);
        Ok(())
    }
}
