//! The directory of volumes, opened for one instance.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_fsquota::{OpenError, ProjectQuota, QuotaSetter};
use nodekeel_localstorage::{Dir, Error as DirError};
use nodekeel_provisioner::{DirStore, DirStoreError, DirStoreOptions, Hook};
use thiserror::Error;

use crate::config::Config;

/// Why there can be no volumes.
#[derive(Debug, Error)]
pub(crate) enum VolumesError {
    #[error("{} can't be used: {}, or give another by --directory", path.display(), remedy(source.kind()))]
    Directory {
        path: PathBuf,
        #[source]
        source: DirError,
    },
    #[error("{} can have no volumes with limits", path.display())]
    Quota {
        path: PathBuf,
        #[source]
        source: OpenError,
    },
    #[error("another instance works on {}: end it, or give another by --directory", path.display())]
    InUse { path: PathBuf },
    #[error("lock {}: {}, or give another by --directory", path.display(), remedy(source.kind()))]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("take up the volumes of {}: see that nobody has changed what is in it", path.display())]
    Store {
        path: PathBuf,
        #[source]
        source: DirStoreError,
    },
}

/// What to do so that a directory can be used.
fn remedy(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => "make it on XFS or ext4 with project quotas",
        io::ErrorKind::PermissionDenied => "run as root",
        io::ErrorKind::ReadOnlyFilesystem => "mount its file system for writing",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "make room on its file system",
        // A link, a file, another file system: the source names it.
        _ => "remove what is in the way",
    }
}

/// Opens the directory, with the quotas of its file system.
pub(crate) fn open(config: &Config) -> Result<(Dir, ProjectQuota), VolumesError> {
    let path = || config.directory.clone();
    let base =
        Dir::open(&config.directory).map_err(|source| VolumesError::Directory { path: path(), source })?;
    let quota = ProjectQuota::open(&config.directory)
        .map_err(|source| VolumesError::Quota { path: path(), source })?;
    Ok((base, quota))
}

/// The same for `run`, which says what limits don't protect from.
fn open_to_use(config: &Config) -> Result<(Dir, Arc<dyn QuotaSetter>), VolumesError> {
    #[cfg(feature = "kill-points")]
    if let Some(books) = crate::books::Books::find() {
        let base = Dir::open(&config.directory)
            .map_err(|source| VolumesError::Directory { path: config.directory.clone(), source })?;
        tracing::warn!("limits of volumes: they are only written down, for a test");
        return Ok((base, Arc::new(books)));
    }
    let (base, quota) = open(config)?;
    for warning in quota.warnings() {
        tracing::warn!("limits of volumes: {warning}");
    }
    Ok((base, Arc::new(quota)))
}

/// Takes the directory, and goes on with what a killed instance has begun.
pub(crate) fn take(config: &Config, hook: Option<Arc<dyn Hook>>) -> Result<Arc<DirStore>, VolumesError> {
    let path = || config.directory.clone();
    let (base, quota) = open_to_use(config)?;
    let mut options = DirStoreOptions::default();
    options.mode = config.volume_mode;
    options.hook = hook;
    let store = DirStore::with(base, quota, options).map_err(|source| match source {
        DirStoreError::Directory(source) => VolumesError::Directory { path: path(), source },
        DirStoreError::InUse { .. } => VolumesError::InUse { path: path() },
        DirStoreError::Lock { source, .. } => VolumesError::Lock { path: path(), source },
        source => VolumesError::Store { path: path(), source },
    })?;
    Ok(Arc::new(store))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_told_with_what_to_do() {
        let config = Config { directory: "/nowhere/at/all".into(), ..Config::default() };
        let error = open(&config).expect_err("no such directory");
        assert!(error.to_string().contains("--directory"), "{error}");
        let config = Config { directory: "/proc".into(), ..Config::default() };
        let error = open(&config).expect_err("no quotas there");
        let source = std::error::Error::source(&error).expect("a cause").to_string();
        assert!(source.contains("use XFS or ext4"), "{source}");
    }
}
