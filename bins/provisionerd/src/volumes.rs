//! Opens the directory of volumes, for one instance.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use nodekeel_fsquota::{OpenError, ProjectQuota, QuotaSetter};
use nodekeel_localstorage::{Dir, Error as DirError, TrustError};
use nodekeel_provisioner::{DirStore, DirStoreError, DirStoreOptions, StepHook};
use thiserror::Error;

use crate::config::{ConfigError, DaemonConfig};

/// The directory of volumes cannot be used.
#[derive(Debug, Error)]
pub(crate) enum VolumesError {
    #[error("can't open directory {}: {}, or set another directory (--directory, --stores)", path.display(), directory_hint(source.io_kind()))]
    Directory {
        path: PathBuf,
        #[source]
        source: DirError,
    },
    #[error("can't use directory {}: correct its owner or mode, or set another directory (--directory, --stores)", path.display())]
    Untrusted {
        path: PathBuf,
        #[source]
        source: TrustError,
    },
    #[error("the file system of {} does not enforce project quotas", path.display())]
    Quota {
        path: PathBuf,
        #[source]
        source: OpenError,
    },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("another instance of provisionerd uses {}: stop it, or set another directory (--directory, --stores)", path.display())]
    InUse { path: PathBuf },
    #[error("can't lock {}: {}, or set another directory (--directory, --stores)", path.display(), directory_hint(source.kind()))]
    Lock {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "can't resume interrupted work on the volumes in {}: check whether another program changed files \
         there",
        path.display()
    )]
    Recover {
        path: PathBuf,
        #[source]
        source: DirStoreError,
    },
}

impl VolumesError {
    /// True if the directory may be usable once a disk is mounted there.
    pub(crate) fn may_be_absent(&self) -> bool {
        // The mount point of an absent disk is a directory of another file system, which may have no project
        // quotas.
        matches!(self, Self::Directory { .. } | Self::Quota { .. })
    }
}

/// The hint for an error of the directory.
fn directory_hint(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => "create it on XFS or ext4 with project quotas",
        io::ErrorKind::PermissionDenied => "run as root",
        io::ErrorKind::ReadOnlyFilesystem => "mount its file system read-write",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space on its file system",
        io::ErrorKind::InvalidInput | io::ErrorKind::NotADirectory => "remove the conflicting file",
        // Such as an I/O error, which has no kind of its own: nothing in the directory is to blame.
        _ => "check its disk and the kernel's log",
    }
}

/// Opens the directory, unless others can change or replace it.
fn open_base(config: &DaemonConfig) -> Result<Dir, VolumesError> {
    let path = || config.directory.clone();
    let base =
        Dir::open(&config.directory).map_err(|source| VolumesError::Directory { path: path(), source })?;
    base.check_owner_and_parents().map_err(|source| VolumesError::Untrusted { path: path(), source })?;
    Ok(base)
}

/// Opens the directory and the project quotas of its file system.
pub(crate) fn open_directory(config: &DaemonConfig) -> Result<(Dir, ProjectQuota), VolumesError> {
    let path = || config.directory.clone();
    let base = open_base(config)?;
    let quota = ProjectQuota::open(&config.directory)
        .map_err(|source| VolumesError::Quota { path: path(), source })?;
    Ok((base, quota))
}

/// Opens the directory for `run`, and logs what limits do not prevent.
pub(crate) fn open_with_warnings(config: &DaemonConfig) -> Result<(Dir, Arc<dyn QuotaSetter>), VolumesError> {
    #[cfg(feature = "kill-points")]
    if let Some(quota) = crate::file_quota::FileQuota::from_env() {
        let base = open_base(config)?;
        tracing::warn!("limits of volumes are not enforced: a test keeps them in files");
        return Ok((base, Arc::new(quota)));
    }
    let (base, quota) = open_directory(config)?;
    for warning in quota.enforcement_gaps() {
        tracing::warn!("limits of volumes: {warning}");
    }
    Ok((base, Arc::new(quota)))
}

/// Opens the directory while another instance runs, for reading.
pub(crate) fn open_for_reading(config: &DaemonConfig) -> Result<(Dir, Box<dyn QuotaSetter>), VolumesError> {
    let path = || config.directory.clone();
    let base = open_base(config)?;
    #[cfg(feature = "kill-points")]
    if let Some(quota) = crate::file_quota::FileQuota::from_env() {
        return Ok((base, Box::new(quota)));
    }
    // For reading, so that the commands also work on a file system that was remounted read-only.
    let quota = ProjectQuota::open_for_reading(&config.directory);
    let quota = quota.map_err(|source| VolumesError::Quota { path: path(), source })?;
    Ok((base, Box::new(quota)))
}

/// The options of the store, which opens its directory again after its disk was lost.
pub(crate) fn store_options(
    config: &DaemonConfig,
    hook: Option<Arc<dyn StepHook>>,
) -> Result<DirStoreOptions, VolumesError> {
    let mut options = DirStoreOptions::default();
    options.mode = config.volume_mode;
    options.capacity = config.capacity_policy()?;
    options.hook = hook;
    #[cfg(feature = "kill-points")]
    if crate::file_quota::FileQuota::from_env().is_some() {
        options.cloner = Arc::new(nodekeel_localstorage::testing::DataCloner);
    }
    let config = config.clone();
    options.opener = Some(Arc::new(move || Ok(open_with_warnings(&config)?)));
    Ok(options)
}

/// Acquires the directory, and resumes operations that a killed instance left in progress.
pub(crate) fn open_store(
    config: &DaemonConfig,
    options: DirStoreOptions,
) -> Result<Arc<DirStore>, VolumesError> {
    let path = || config.directory.clone();
    let (base, quota) = open_with_warnings(config)?;
    let store = DirStore::with_options(base, quota, options).map_err(|source| match source {
        // These have a hint of their own. Any other error is one of the interrupted work.
        DirStoreError::Directory(source) => VolumesError::Directory { path: path(), source },
        DirStoreError::InUse { .. } => VolumesError::InUse { path: path() },
        DirStoreError::Lock { source, .. } => VolumesError::Lock { path: path(), source },
        source => VolumesError::Recover { path: path(), source },
    })?;
    Ok(Arc::new(store))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_in_the_way_is_to_be_removed() {
        let hint = |errno: i32| {
            let source = io::Error::from_raw_os_error(errno);
            VolumesError::Lock { path: "/d".into(), source }.to_string()
        };
        assert!(hint(libc::EIO).contains("check its disk"), "{}", hint(libc::EIO));
        assert!(hint(libc::ENOTDIR).contains("remove the conflicting file"), "{}", hint(libc::ENOTDIR));
    }

    #[test]
    fn an_unusable_directory_is_reported_with_a_hint() {
        let config = DaemonConfig { directory: "/nowhere/at/all".into(), ..DaemonConfig::default() };
        let error = open_directory(&config).expect_err("no such directory");
        assert!(error.to_string().contains("--directory"), "{error}");
        let config = DaemonConfig { directory: "/proc".into(), ..DaemonConfig::default() };
        let error = open_directory(&config).expect_err("no quotas there");
        let source = std::error::Error::source(&error).expect("a cause").to_string();
        assert!(source.contains("use XFS or ext4"), "{source}");
    }
}
