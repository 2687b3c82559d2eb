//! The reserve that images leave free on the data volume: etcd and others stop when it is full.
//!
//! On XFS with project quotas containerd's root gets a limit, which binds imports, a kubelet's pulls and what containers
//! write. Elsewhere only imports are checked, before they write.

use std::fmt;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::statvfs::statvfs;
use nodekeel_containerd_svc::DiskReserve;
use nodekeel_fsquota::{
    Bytes, Error as QuotaError, FileSystemKind, LimitChange, ProjectQuota, QuotaChange, QuotaSetter as _,
    QuotaStatus,
};
use nodekeel_localstorage::Dir;
use thiserror::Error;
use tokio::task::spawn_blocking;

use super::DN;
use super::images::ImageAccess;
use crate::error_chain::error_chain;
use crate::health::{ConditionsFuture, HealthCondition, HealthSource, NodeSnapshot, format_bytes};

/// The smallest limit of images: to the kernel, 0 means unlimited.
const MIN_LIMIT: u64 = 1 << 20;

/// The mechanism that keeps the reserve free.
#[derive(Debug, Clone)]
pub(super) enum ReserveEnforcement {
    /// Nothing: none is configured.
    Unused,
    /// A limit of containerd's root.
    ProjectLimit,
    /// The check of imports alone, for this reason.
    ImportCheck(String),
    /// The one or the other: the volume is not open yet.
    Unknown,
}

/// Always equal: the enforcement describes the machine. It is detected again when the volume opens, so that two
/// plans do not differ by it.
impl PartialEq for ReserveEnforcement {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl ReserveEnforcement {
    /// Finds what will keep the reserve of an existing directory's file system free.
    pub(super) fn detect(existing: &Path, reserve: DiskReserve) -> Self {
        if is_unused(reserve) {
            Self::Unused
        } else {
            Self::of_file_system(existing).map_or_else(|why| why, |_| Self::ProjectLimit)
        }
    }

    /// The quotas of a file system that binds containerd, or why imports alone are checked.
    fn of_file_system(existing: &Path) -> Result<ProjectQuota, Self> {
        let quota = ProjectQuota::open(existing).map_err(|error| Self::ImportCheck(error_chain(&error)))?;
        // XFS applies project limits to root, too. The others exempt it, and containerd runs as root.
        match quota.file_system().kind {
            FileSystemKind::Xfs => Ok(quota),
            other => Err(Self::ImportCheck(format!("{other} does not limit root"))),
        }
    }
}

impl fmt::Display for ReserveEnforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unused => f.write_str("no reserve of the disk"),
            Self::ProjectLimit => f.write_str("a project limit keeps the reserve of the disk free"),
            Self::ImportCheck(why) => {
                write!(f, "imports alone are checked to keep the reserve of the disk free ({why})")
            }
            Self::Unknown => f.write_str(
                "the reserve of the disk is kept by a project limit if the volume is an XFS with quotas",
            ),
        }
    }
}

/// The limit could not be set.
#[derive(Debug, Error)]
enum ReserveError {
    #[error("can't read the free space of {}", path.display())]
    ReadSpace { path: PathBuf, source: io::Error },
    #[error("can't open containerd's directory {}", path.display())]
    Open { path: PathBuf, source: nodekeel_localstorage::Error },
    #[error("can't limit {}", path.display())]
    Limit { path: PathBuf, source: QuotaError },
}

/// Sets the limit, and keeps the reason if that fails.
#[derive(Debug)]
pub(super) struct ImageReserve {
    reserve: DiskReserve,
    /// Bytes that others on the disk will have at least.
    min_others: u64,
    images: Arc<ImageAccess>,
    /// The reason why the limit could not be set, although the file system has quotas.
    failure: Mutex<Option<String>>,
}

impl ImageReserve {
    /// For the images of a containerd, next to others that will take at least that many bytes.
    pub(super) fn new(images: Arc<ImageAccess>, min_others: u64) -> Self {
        Self { reserve: images.reserve, min_others, images, failure: Mutex::default() }
    }

    /// Limits containerd's root, if its file system can; otherwise, imports are checked. It blocks, and at the first time
    /// takes a while if there are images: their files are counted from then on.
    pub(super) fn apply(&self, root: &Path) {
        let applied = self.limit_root(root);
        let failure = applied.as_ref().err().map(|error| error_chain(error));
        match applied {
            Ok(Some(limit)) => {
                let (name, limit) = (root.display(), format_bytes(limit));
                tracing::info!("{name} may use {limit}: the reserve of the disk stays free");
            }
            Ok(None) => {}
            // The node runs on: the check of imports still protects the disk.
            Err(error) => tracing::warn!("imports alone are checked: {}", error_chain(&error)),
        }
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
    }

    /// Returns the limit in bytes; `None` if the file system has no quotas that bind containerd, or if the reserve is 0.
    fn limit_root(&self, root: &Path) -> Result<Option<u64>, ReserveError> {
        let Ok(quota) = ReserveEnforcement::of_file_system(root) else { return Ok(None) };
        let path = || root.to_owned();
        let dir = Dir::open(root).map_err(|source| ReserveError::Open { path: path(), source })?;
        let failed = |source| ReserveError::Limit { path: path(), source };
        let known = quota.read_status(dir.as_fd()).map_err(failed)?;
        // A limit that an earlier configuration has set would stay in force.
        if is_unused(self.reserve) {
            if known.is_some() {
                quota.set_limits(dir.as_fd(), byte_limit(LimitChange::Unlimited)).map_err(failed)?;
            }
            return Ok(None);
        }
        // The use of the images must be known before the limit can be computed from it.
        let counted = count_images(&quota, &dir).map_err(failed)?;
        let visible_at = disk_directory(root);
        if visible_at == root {
            // On its own mount point, the limit of the root would hide the disk: it is lifted for the measurement.
            quota.set_limits(dir.as_fd(), byte_limit(LimitChange::Unlimited)).map_err(failed)?;
        }
        let disk = read_disk(visible_at)?;
        let limit = image_limit(disk, counted.usage.bytes.0, self.reserve, self.min_others);
        quota.set_limits(dir.as_fd(), byte_limit(LimitChange::Set(Bytes(limit)))).map_err(failed)?;
        Ok(Some(limit))
    }
}

fn is_unused(reserve: DiskReserve) -> bool {
    reserve.bytes_on(u64::MAX) == 0
}

fn byte_limit(bytes: LimitChange<Bytes>) -> QuotaChange {
    QuotaChange { bytes, inodes: LimitChange::Keep }
}

/// Gives containerd's root a project, with everything in it, and keeps the limits that it has.
fn count_images(quota: &ProjectQuota, dir: &Dir) -> Result<QuotaStatus, QuotaError> {
    // A directory that is empty, or counted already, needs no walk. Files of a new one are only counted after a
    // walk.
    match quota.set_limits(dir.as_fd(), byte_limit(LimitChange::Keep)) {
        Err(QuotaError::NotEmpty | QuotaError::SharedProject { .. }) => {
            Ok(quota.set_limits_recursive(dir.as_fd(), byte_limit(LimitChange::Keep))?.0)
        }
        counted => counted,
    }
}

/// The bytes of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DiskBytes {
    all: u64,
    free: u64,
}

/// The place where the disk of a directory is visible: next to the directory, since its limit hides the disk, unless it
/// is a mount point.
fn disk_directory(root: &Path) -> &Path {
    let device = |path: &Path| std::fs::metadata(path).map(|found| found.dev()).ok();
    // A different device means that the root is a mount point: its parent shows another disk.
    root.parent().filter(|parent| device(parent) == device(root)).unwrap_or(root)
}

fn read_disk(path: &Path) -> Result<DiskBytes, ReserveError> {
    let disk = statvfs(path)
        .map_err(|errno| ReserveError::ReadSpace { path: path.to_owned(), source: errno.into() })?;
    let bytes = |blocks: u64| blocks.saturating_mul(disk.fragment_size());
    // The free blocks include those that are reserved for root, since containerd runs as root.
    Ok(DiskBytes { all: bytes(disk.blocks()), free: bytes(disk.blocks_free()) })
}

/// The bytes that images may have: those that they have now, and the free ones above the reserve; or less, if others on
/// the disk have less now than they will have at least.
fn image_limit(disk: DiskBytes, images: u64, reserve: DiskReserve, min_others: u64) -> u64 {
    // Others get at least their minimum: an etcd that has not allocated its files yet must not be crowded out.
    let others = disk.all.saturating_sub(disk.free).saturating_sub(images).max(min_others);
    disk.all.saturating_sub(reserve.bytes_on(disk.all)).saturating_sub(others).max(MIN_LIMIT)
}

/// Asks the file system how much of its limit containerd's root has used.
pub(super) struct ReserveHealth(pub(super) Arc<ImageReserve>);

impl HealthSource for ReserveHealth {
    fn conditions<'a>(&'a self, node: &'a NodeSnapshot) -> ConditionsFuture<'a> {
        Box::pin(async {
            let failure = self.0.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(failure) = failure {
                let problem = format!("its images and a kubelet's pulls may fill the disk: {failure}");
                let hint = format!("repair that, then `nodectl restart {DN}`");
                return vec![HealthCondition::warning(DN, problem).hint(hint)];
            }
            let Some(root) = self.0.images.root_dir() else { return Vec::new() };
            let object = root.display().to_string();
            // The quota is read on a thread: a disk that hangs would block the thread of all sources.
            let status = spawn_blocking(move || read_limit(&root)).await.ok().flatten();
            let Some((free, limit)) = status else { return Vec::new() };
            let found = node.space_severity(free, limit).map(|severity| {
                let [free, limit] = [free, limit].map(format_bytes);
                let problem = format!(
                    "images and containers have almost used their share of the disk: {free} of {limit} free; the \
                     reserve stays free"
                );
                let hint = format!(
                    "delete images (`crictl rmi --prune`), or free or grow the disk, or lower \
                     services.containerd.reserve, then `nodectl restart {DN}`"
                );
                HealthCondition { severity, ..HealthCondition::problem(object, problem).hint(hint) }
            });
            found.into_iter().collect()
        })
    }
}

/// The rest of the limit of a directory, and the limit; `None` if it has none.
fn read_limit(root: &Path) -> Option<(u64, u64)> {
    let quota = ProjectQuota::open_for_reading(root).ok()?;
    let status = quota.read_status(Dir::open(root).ok()?.as_fd()).ok()??;
    let limit = status.limits.bytes?.0;
    Some((limit.saturating_sub(status.usage.bytes.0), limit))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn images_may_use_what_is_free_above_the_reserve() {
        let reserve = DiskReserve::from_bytes(100 * MIB);
        let limit = |free, images| {
            image_limit(DiskBytes { all: 700 * MIB, free: free * MIB }, images * MIB, reserve, 128 * MIB)
                / MIB
        };
        // etcd has not allocated its first segments yet.
        assert_eq!(limit(690, 0), 472);
        assert_eq!(limit(572, 0), 472);
        // Images keep the bytes that they use, and do not get those of others.
        assert_eq!(limit(400, 172), 472);
        assert_eq!(limit(100, 472), 472);
        assert_eq!(limit(300, 100), 300);
        // Others have used the reserve.
        assert_eq!(limit(50, 100), 50);
        assert_eq!(limit(0, 0), 1);
    }

    proptest! {
        #[test]
        fn images_up_to_their_limit_leave_the_reserve_free(
            all in 0..1_u64 << 50,
            free in 0..=1_000_u64,
            images in 0..=1_000_u64,
            reserve in prop::option::of(0..1_u64 << 40),
            min_others in 0..1_u64 << 30,
        ) {
            let free = all / 1_000 * free;
            let images = (all - free) / 1_000 * images;
            let reserve = reserve.map_or_else(DiskReserve::default, DiskReserve::from_bytes);
            let limit = image_limit(DiskBytes { all, free }, images, reserve, min_others);
            prop_assert!(limit >= MIN_LIMIT);
            let others = all - free - images;
            prop_assert!(limit == MIN_LIMIT || limit + others + reserve.bytes_on(all) <= all);
        }
    }

    #[test]
    fn a_disk_is_read_next_to_what_hides_it_and_never_another_disk() {
        let scratch = tempfile::tempdir().expect("a directory");
        let root = scratch.path().join("root");
        std::fs::create_dir(&root).expect("created");
        assert_eq!(disk_directory(&root), scratch.path());
        assert_eq!(disk_directory(Path::new("/proc")), Path::new("/proc"));
    }

    #[test]
    fn a_file_system_without_quotas_says_that_imports_alone_are_checked() {
        let found = ReserveEnforcement::detect(Path::new("/proc"), DiskReserve::default()).to_string();
        assert!(found.starts_with("imports alone are checked"), "{found}");
        let none = ReserveEnforcement::detect(Path::new("/proc"), DiskReserve::from_bytes(0));
        assert_eq!(none.to_string(), "no reserve of the disk");
    }
}
