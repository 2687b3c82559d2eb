//! Does once what a volume needs: a directory whose limit binds.

use std::os::fd::AsFd as _;

use nodekeel_fsquota::{Bytes, Error as QuotaError, Inodes, ProjectId, QuotaLimits, QuotaSetter};
use nodekeel_localstorage::{Dir, FileMode};

use crate::dir_store::error::{DirStoreError, quota_error};
use crate::dir_store::stored_dirs::find_dir;

/// The directory of a probe. No volume and no snapshot has such a name.
pub(super) const PROBE_DIR: &str = ".probe";

/// Small, since as much is written.
const LIMITS: QuotaLimits = QuotaLimits { bytes: Some(Bytes(64 << 10)), inodes: Some(Inodes(16)) };

/// Creates a directory with a limit, sees that the limit binds, and removes the directory, also after a failure. What a
/// killed probe has left is removed first. Returns the project that is to be released later, if it is in use: a process
/// that was forked during the probe has its file until it executes its program.
pub(super) fn probe_directory(
    parent: &Dir,
    quota: &dyn QuotaSetter,
) -> Result<Option<ProjectId>, DirStoreError> {
    remove_leftover(parent, quota)?;
    let dir = parent.ensure_dir(PROBE_DIR, FileMode::PRIVATE_DIR).map_err(DirStoreError::Directory)?;
    let limited = quota.set_limits(dir.as_fd(), LIMITS.into());
    let probed = limited.and_then(|_| quota.verify_limit(dir.as_fd()));
    drop(dir);
    let removed = remove_leftover(parent, quota);
    // The first failure is the one that a volume would have met.
    probed.map_err(|source| DirStoreError::Quota { path: parent.path().join(PROBE_DIR), source })?;
    removed
}

/// Removes the directory of a probe, with all that is in it. Returns its project, if it is still in use.
pub(super) fn remove_leftover(
    parent: &Dir,
    quota: &dyn QuotaSetter,
) -> Result<Option<ProjectId>, DirStoreError> {
    let Some(dir) = find_dir(parent, PROBE_DIR)? else { return Ok(None) };
    // Before it is removed: nothing else has a record of its project.
    let project = quota.find_project(dir.as_fd()).map_err(|source| quota_error(&dir, source))?;
    parent.remove_tree(PROBE_DIR).map_err(DirStoreError::Directory)?;
    let path = dir.path().to_owned();
    // The kernel counts a removed directory while it is open.
    drop(dir);
    match project.map_or(Ok(()), |project| quota.release_project(project)) {
        Ok(()) => Ok(None),
        Err(QuotaError::ProjectInUse { project }) => Ok(Some(project)),
        Err(source) => Err(DirStoreError::Quota { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use nodekeel_fsquota::KernelOperation;
    use nodekeel_fsquota::testing::MemQuota;

    use super::*;

    fn names(dir: &Dir) -> Vec<String> {
        let listed = dir.list().expect("a list");
        listed.iter().map(|entry| entry.name.as_os_str().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn a_probe_leaves_nothing_also_after_a_failure_or_a_kill() {
        let base = tempfile::tempdir().expect("a directory");
        let (parent, quota) = (Dir::open(base.path()).expect("the base"), MemQuota::new());
        // As a probe that was killed after it had set limits and written.
        let left = parent.ensure_dir(PROBE_DIR, FileMode::PRIVATE_DIR).expect("created");
        quota.set_limits(left.as_fd(), LIMITS.into()).expect("limited");
        std::fs::write(left.path().join("file"), "data").expect("written");
        drop(left);
        for fails in [None, Some(KernelOperation::WriteLimits), Some(KernelOperation::ReadEnforcement), None]
        {
            if let Some(call) = fails {
                quota.fail_next_kernel_call(call, ErrorKind::Other);
            }
            let probed = probe_directory(&parent, &quota);
            assert_eq!(probed.is_err(), fails.is_some(), "{fails:?}: {probed:?}");
            assert_eq!((names(&parent), quota.list_projects()), (Vec::new(), Vec::new()), "{fails:?}");
        }
    }
}
