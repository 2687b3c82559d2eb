//! Snapshots, and volumes that are copies: trees whose files share their blocks with those of their source.

use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaStatus, QuotaUsage};
use nodekeel_localstorage::{Dir, FileCloner, FileMode};
use rustix::fs::{AtFlags, StatxFlags};

use crate::dir_store::capacity::CapacityLedger;
use crate::dir_store::error::DirStoreError;
use crate::dir_store::image_file::{image_size, open_image, sync_image, visible_limits};
use crate::dir_store::images::{ImageVolumes, copied_size};
use crate::dir_store::location::MountedDir;
use crate::dir_store::parts::StoreParts;
use crate::dir_store::staging::StagingArea;
use crate::id::VolumeId;
use crate::image::{ImageSpec, VolumeKind, directory_limits, promised_bytes};
use crate::snapshot::{SnapshotId, SnapshotInfo, StoredId};
use crate::step::VolumeStep;
use crate::store::larger_limit;

/// Bytes and inodes that a copy may use above its limits while it is made.
const MARGIN: QuotaUsage = QuotaUsage { bytes: Bytes(1 << 20), inodes: Inodes(64) };

/// Makes the snapshots of a store, and volumes from them and from other volumes.
pub(super) struct CopyStore {
    pub(super) parts: StoreParts,
    pub(super) ledger: Arc<CapacityLedger>,
    pub(super) staging: Arc<StagingArea>,
    pub(super) images: Arc<ImageVolumes>,
    pub(super) cloner: Arc<dyn FileCloner>,
}

struct CopyPlan<'a> {
    from: &'a StoredId,
    source: &'a Dir,
    to: &'a StoredId,
    limits: QuotaLimits,
    kind: VolumeKind,
    /// The size of the file of an image.
    size: Option<Bytes>,
    is_canceled: &'a dyn Fn() -> bool,
}

impl CopyStore {
    pub(super) fn find_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>, DirStoreError> {
        let dir = self.parts.dirs.find(&id.clone().into())?;
        dir.map(|dir| self.read_snapshot(id, &dir)).transpose()
    }

    fn read_snapshot(&self, id: &SnapshotId, dir: &Dir) -> Result<SnapshotInfo, DirStoreError> {
        let (status, kind) =
            (self.parts.limits.read_status(dir)?, self.parts.kinds.read(&id.clone().into(), dir)?);
        let limits = visible_limits(kind, dir, status.limits)?;
        let failed = |error: rustix::io::Errno| DirStoreError::ReadSnapshot {
            path: dir.path().to_owned(),
            source: error.into(),
        };
        let wanted = StatxFlags::BTIME | StatxFlags::CTIME;
        let stat = rustix::fs::statx(dir.as_fd(), c"", AtFlags::EMPTY_PATH, wanted).map_err(failed)?;
        // Not every file system records when a directory was created. Nothing writes into a snapshot, so its
        // last change is the next best.
        let has_birth = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
        let created = if has_birth { stat.stx_btime } else { stat.stx_ctime };
        let seconds = u64::try_from(created.tv_sec).unwrap_or_default();
        let created: SystemTime = UNIX_EPOCH + Duration::new(seconds, created.tv_nsec);
        Ok(SnapshotInfo { created, restore_size: limits.bytes.unwrap_or(status.usage.bytes), kind })
    }

    /// Creates a snapshot, unless it exists; `None` if the volume does not exist.
    pub(super) fn create_snapshot(
        &self,
        id: &SnapshotId,
        volume: &VolumeId,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<Option<SnapshotInfo>, DirStoreError> {
        let (from, to) = (StoredId::from(volume.clone()), StoredId::from(id.clone()));
        let _lock = self.parts.locks.lock_copy(&to);
        if let Some(dir) = self.parts.dirs.find(&to)? {
            // The rename of a killed call may not be durable yet.
            self.parts.dirs.sync(&to)?;
            return self.read_snapshot(id, &dir).map(Some);
        }
        let Some(source) = self.parts.dirs.find(&from)? else { return Ok(None) };
        // Before anything is promised or made: on ext4, each snapshot fails here.
        self.check_cloner()?;
        let status = self.parts.limits.read_status(&source)?;
        // The limits of the volume, so that it can be restored with them, and never less than its usage.
        let limits = QuotaLimits {
            bytes: larger_limit(status.limits.bytes, Some(status.usage.bytes)),
            inodes: larger_limit(status.limits.inodes, Some(status.usage.inodes)),
        };
        let kind = self.parts.kinds.read(&from, &source)?;
        // The volume itself may change all its blocks: then the snapshot alone holds the old ones.
        let promise = Some(status.usage.bytes);
        let plan = CopyPlan { from: &from, source: &source, to: &to, limits, kind, size: None, is_canceled };
        self.ledger.with_promise(to.as_str(), promise, || self.copy(&plan))?;
        let Some(dir) = self.parts.dirs.find(&to)? else { return Ok(None) };
        // The volume may have grown while it was copied.
        self.ledger.set_limit(to.as_str(), Some(self.parts.limits.read_status(&dir)?.usage.bytes));
        self.read_snapshot(id, &dir).map(Some)
    }

    /// Creates a volume with the files of its source, unless it exists.
    pub(super) fn create_volume(
        &self,
        id: &VolumeId,
        from: &StoredId,
        limits: QuotaLimits,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        let kind = VolumeKind::Directory;
        let to = StoredId::from(id.clone());
        let _lock = self.parts.locks.lock_copy(&to);
        if let Some(dir) = self.parts.dirs.find(&to)? {
            let _held = self.parts.locks.lock(id.as_str());
            self.parts.kinds.check(&to, &dir, kind)?;
            self.ledger.raise_limits(id, &dir, limits)?;
            return self.parts.dirs.sync(&to);
        }
        let source = self.find_source(from, kind)?;
        check_fit(from, &self.parts.limits.read_status(&source)?, limits)?;
        let plan = CopyPlan { from, source: &source, to: &to, limits, kind, size: None, is_canceled };
        self.ledger.with_promise(to.as_str(), limits.bytes, || self.copy(&plan))
    }

    /// Creates an image volume with the content of its source, unless it exists.
    pub(super) fn create_image(
        &self,
        id: &VolumeId,
        from: &StoredId,
        spec: ImageSpec,
        is_canceled: &dyn Fn() -> bool,
    ) -> Result<(), DirStoreError> {
        let to = StoredId::from(id.clone());
        let _lock = self.parts.locks.lock_copy(&to);
        if self.images.raise(id, spec)? {
            return Ok(());
        }
        let kind = VolumeKind::from(spec.format);
        let source = self.find_source(from, kind)?;
        let size = copied_size(from, image_size(&source)?, spec.size)?;
        let (limits, promise, size) = (directory_limits(size), promised_bytes(size), Some(size));
        let plan = CopyPlan { from, source: &source, to: &to, limits, kind, size, is_canceled };
        self.ledger.with_promise(to.as_str(), Some(promise), || self.copy(&plan))
    }

    /// The source of a copy of this kind.
    fn find_source(&self, from: &StoredId, kind: VolumeKind) -> Result<Dir, DirStoreError> {
        let source = self.parts.dirs.find(from)?;
        let source = source.ok_or_else(|| DirStoreError::NoSource { source_id: from.clone() })?;
        self.parts.kinds.check(from, &source, kind)?;
        self.check_cloner().map(|()| source)
    }

    /// Checks that files can be cloned: not in the source, whose limits may leave no space for the two files.
    fn check_cloner(&self) -> Result<(), DirStoreError> {
        self.staging.dir.check_cloner(&*self.cloner).map_err(DirStoreError::Directory)
    }

    /// Makes a copy in staging, and renames it into place; discards it if one fails.
    fn copy(&self, plan: &CopyPlan<'_>) -> Result<(), DirStoreError> {
        let made = self.make(plan).and_then(|()| {
            // The source must not have been removed while it was copied: files would then be missing.
            let identity = |dir: &Dir| MountedDir::from_fd(dir.as_fd()).ok();
            let found = self.parts.dirs.find(plan.from)?;
            if found.is_none_or(|dir| identity(&dir) != identity(plan.source)) {
                return Err(DirStoreError::NoSource { source_id: plan.from.clone() });
            }
            self.staging.commit(plan.to, plan.kind)
        });
        made.inspect_err(|_| self.staging.discard_failed(plan.to))
    }

    /// Makes a complete copy in staging, with its limits and a margin before its first file.
    fn make(&self, plan: &CopyPlan<'_>) -> Result<(), DirStoreError> {
        // Files that an earlier call has copied may have changed in the source since.
        self.staging.discard(plan.to)?;
        let dir = self.staging.create(plan.to, FileMode::PRIVATE_DIR, with_margin(plan.limits))?;
        if plan.kind != VolumeKind::Directory {
            // A mounted file system has its last writes in memory; the clone shows only the file.
            sync_image(plan.source)?;
        }
        let clone = || plan.source.clone_tree(&dir, &*self.cloner, plan.is_canceled);
        let cloned =
            self.parts.steps.run_step(VolumeStep::CloneTree, clone).map_err(DirStoreError::Directory)?;
        if cloned.devices > 0 || cloned.separate_files > 0 {
            tracing::warn!(
                handle = plan.to.as_str(),
                devices = cloned.devices,
                separate_files = cloned.separate_files,
                "left out device nodes of {}, or made files of its hard links",
                plan.from
            );
        }
        // A clone has the size of its source; the claim may request more.
        if let Some(size) = plan.size {
            self.images.extend(&dir, &open_image(&dir)?, size)?;
        }
        // The margin has served its purpose: a committed copy has the limits that were promised.
        self.parts.steps.run_step(VolumeStep::SetLimits, || self.parts.limits.set(&dir, plan.limits))
    }
}

/// The limits of a copy while it is made: its source may be full, and the copy's directories may occupy more blocks
/// than those of the source.
fn with_margin(limits: QuotaLimits) -> QuotaLimits {
    QuotaLimits {
        bytes: limits.bytes.map(|bytes| Bytes(bytes.0.saturating_add(MARGIN.bytes.0))),
        inodes: limits.inodes.map(|inodes| Inodes(inodes.0.saturating_add(MARGIN.inodes.0))),
    }
}

/// Checks that the usage of a source fits into the limits: the kernel's error would not name the limit. The snapshot of
/// a full volume may use a little more than the volume's limit.
fn check_fit(from: &StoredId, status: &QuotaStatus, limits: QuotaLimits) -> Result<(), DirStoreError> {
    let (bytes, inodes) = (status.usage.bytes, status.usage.inodes);
    let too_large = |used: String, limit: String| {
        Err(DirStoreError::SourceTooLarge { source_id: from.clone(), used, limit })
    };
    match limits {
        QuotaLimits { bytes: Some(Bytes(limit)), .. } if bytes.0 > limit.saturating_add(MARGIN.bytes.0) => {
            too_large(format!("{} bytes", bytes.0), format!("{limit} bytes"))
        }
        QuotaLimits { inodes: Some(Inodes(limit)), .. } if inodes.0 > limit => {
            too_large(format!("{} inodes", inodes.0), format!("{limit} inodes"))
        }
        _ => Ok(()),
    }
}
