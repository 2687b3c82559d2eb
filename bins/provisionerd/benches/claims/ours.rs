//! Our provisioner, with directories on this machine's disk and limits in a map.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use nodekeel_fsquota::{Call, Change, Error, Limit, Limits, ProjectId, QuotaSetter, Status, Usage};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{Config, Deps, DirStore, FINALIZER, Provisioner};
use tokio_util::sync::CancellationToken;

use crate::side::{READY, Side, client};

pub(crate) async fn run(kubeconfig: &Path, directory: &Path) -> Result<()> {
    let store = Arc::new(DirStore::new(Dir::open(directory)?, Arc::new(Ledger::default()))?);
    let deps = Deps {
        client: client(kubeconfig).await?,
        store,
        meter: Arc::new(()),
        guard: None,
        registered: None,
        hook: None,
    };
    let provisioner = Provisioner::new(Config::new(Side::Ours.identity(Some(FINALIZER))?), deps);
    match provisioner.run_until(CancellationToken::new(), || println!("{READY}")).await {
        Err(error) => Err(error.into()),
    }
}

/// Limits by inode. Each call takes less than one of the kernel does.
#[derive(Debug, Default)]
struct Ledger(Mutex<HashMap<ProjectId, Limits>>);

impl Ledger {
    fn entries(&self) -> std::sync::MutexGuard<'_, HashMap<ProjectId, Limits>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn project(dir: BorrowedFd<'_>) -> Result<ProjectId, Error> {
    let failed = |source: std::io::Error| Error::Kernel { call: Call::ReadProject, source };
    let stat = rustix::fs::fstat(dir).map_err(|errno| failed(errno.into()))?;
    let number = u32::try_from(stat.st_ino & 0x7fff_ffff).ok().and_then(ProjectId::new);
    number.ok_or_else(|| failed(std::io::ErrorKind::InvalidData.into()))
}

fn changed<T>(change: Limit<T>, old: Option<T>) -> Option<T> {
    match change {
        Limit::Keep => old,
        Limit::Unlimited => None,
        Limit::At(limit) => Some(limit),
    }
}

impl QuotaSetter for Ledger {
    fn set(&self, dir: BorrowedFd<'_>, change: Change) -> Result<Status, Error> {
        let project = project(dir)?;
        let mut entries = self.entries();
        let limits = entries.entry(project).or_default();
        limits.bytes = changed(change.bytes, limits.bytes);
        limits.inodes = changed(change.inodes, limits.inodes);
        Ok(Status { project, limits: *limits, usage: Usage::default() })
    }

    fn status(&self, dir: BorrowedFd<'_>) -> Result<Option<Status>, Error> {
        let project = project(dir)?;
        let limits = self.entries().get(&project).copied();
        Ok(limits.map(|limits| Status { project, limits, usage: Usage::default() }))
    }

    fn clear(&self, dir: BorrowedFd<'_>) -> Result<(), Error> {
        self.release(project(dir)?)
    }

    fn release(&self, project: ProjectId) -> Result<(), Error> {
        self.entries().remove(&project);
        Ok(())
    }
}
