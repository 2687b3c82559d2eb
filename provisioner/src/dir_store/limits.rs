//! The limits of volumes and snapshots: sets and reads them through the quota.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodekeel_fsquota::{AuditOptions, AuditReport, Bytes, ProjectId, QuotaLimits, QuotaSetter, QuotaStatus};
use nodekeel_localstorage::Dir;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

use crate::dir_store::error::{DirStoreError, quota_error};
use crate::dir_store::stored_dirs::StoredDirs;
use crate::error_chain::format_chain;
use crate::step::{StepRunner, VolumeStep};

/// The quota of a store.
pub(super) struct VolumeLimits {
    pub(super) quota: Arc<dyn QuotaSetter>,
    pub(super) dirs: Arc<StoredDirs>,
    pub(super) steps: StepRunner,
}

impl VolumeLimits {
    pub(super) fn set(&self, dir: &Dir, limits: QuotaLimits) -> Result<(), DirStoreError> {
        self.quota.set_limits(dir.as_fd(), limits.into()).map(drop).map_err(|error| quota_error(dir, error))
    }

    /// Sets the limits of an existing volume, so that they survive a power loss.
    pub(super) fn resize(&self, dir: &Dir, limits: QuotaLimits) -> Result<(), DirStoreError> {
        self.steps.run_step(VolumeStep::ResizeLimits, || self.set(dir, limits))?;
        // The kernel can't sync limits. A change of the time of the directory of volumes, which pods don't see, follows
        // them in the file system's journal, so the sync that makes it durable makes them durable, too.
        let volumes = &self.dirs.volumes;
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        futimens(volumes.as_fd(), &times).map_err(|errno| DirStoreError::SyncLimits {
            path: volumes.path().to_owned(),
            source: errno.into(),
        })?;
        volumes.sync().map_err(DirStoreError::Directory)
    }

    /// Sets the limits of a volume that has lost them, for all that is in it. Repeated after a kill, it completes them.
    /// Returns the number of files and directories that don't count all the same.
    pub(super) fn restore(&self, dir: &Dir, limits: QuotaLimits) -> Result<u64, DirStoreError> {
        let limited = self.quota.limit_tree(dir.as_fd(), limits.into());
        let (_, tree) = limited.map_err(|error| quota_error(dir, error))?;
        // Makes what the walk has changed durable, too, which is why it is not that of a resize.
        rustix::fs::syncfs(dir).map_err(|errno| DirStoreError::SyncLimits {
            path: dir.path().to_owned(),
            source: errno.into(),
        })?;
        // Symbolic links and device nodes can't be changed, and have no data.
        Ok(tree.foreign + tree.immutable)
    }

    /// Returns whether all that is in a directory, and nothing else, counts against its limits.
    pub(super) fn is_own(&self, dir: &Dir) -> Result<bool, DirStoreError> {
        self.quota.owns_project(dir.as_fd()).map_err(|error| quota_error(dir, error))
    }

    pub(super) fn clear(&self, dir: &Dir) -> Result<(), DirStoreError> {
        self.quota.clear_limits(dir.as_fd()).map_err(|error| quota_error(dir, error))
    }

    /// The limits and the usage; `None` if the directory has no limits.
    pub(super) fn find_status(&self, dir: &Dir) -> Result<Option<QuotaStatus>, DirStoreError> {
        self.quota.read_status(dir.as_fd()).map_err(|error| quota_error(dir, error))
    }

    /// The limits and the usage of a directory that must have limits.
    pub(super) fn read_status(&self, dir: &Dir) -> Result<QuotaStatus, DirStoreError> {
        self.find_status(dir)?.ok_or_else(|| DirStoreError::NoLimits { path: dir.path().to_owned() })
    }

    /// The limits and the used bytes of a directory. If they can't be read, they count as nothing: the volume
    /// is served all the same.
    pub(super) fn status_or_nothing(&self, dir: &Dir) -> (QuotaLimits, Bytes) {
        match self.quota.read_status(dir.as_fd()) {
            Ok(status) => status.map(|status| (status.limits, status.usage.bytes)).unwrap_or_default(),
            Err(error) => {
                let path = dir.path().display();
                tracing::warn!("{path} is not counted in the capacity: {}", format_chain(&error));
                Default::default()
            }
        }
    }

    /// The bytes that count against a directory; zero if they are unknown.
    pub(super) fn used_bytes(&self, dir: &Dir) -> u64 {
        self.read_status(dir).map_or(0, |status| status.usage.bytes.0)
    }

    /// The project of a volume, also while the limits are not enforced.
    pub(super) fn find_project(&self, dir: &Dir) -> Result<Option<ProjectId>, DirStoreError> {
        self.quota.find_project(dir.as_fd()).map_err(|error| quota_error(dir, error))
    }

    /// Releases the project of a removed directory; the path is for the error.
    pub(super) fn release_project(&self, project: ProjectId, path: PathBuf) -> Result<(), DirStoreError> {
        self.quota.release_project(project).map_err(|source| DirStoreError::Quota { path, source })
    }

    /// Releases project numbers that a killed process leaked, which no directory has any more, except those `kept` by
    /// trash entries: they are released with the entries.
    pub(super) fn release_leaked_projects(&self, kept: &[ProjectId]) {
        match self.quota.release_unused_projects(kept) {
            Ok(released) if released.is_empty() => {}
            Ok(released) => tracing::info!("released {} leaked projects", released.len()),
            // Leaked projects occupy only their numbers.
            Err(error) => tracing::warn!(
                "release leaked projects: {}; retrying at the next start",
                format_chain(&error)
            ),
        }
    }

    /// Audits the whole directory of the store, until it is canceled.
    pub(super) fn audit(
        &self,
        options: AuditOptions,
        is_canceled: &AtomicBool,
    ) -> Result<Option<AuditReport>, DirStoreError> {
        let (base, is_canceled) = (&self.dirs.base, || is_canceled.load(Ordering::Relaxed));
        let audited = self.quota.audit_usage(base.as_fd(), options, &is_canceled);
        audited.map_err(|error| quota_error(base, error))
    }
}
