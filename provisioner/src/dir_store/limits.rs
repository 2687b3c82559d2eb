//! Changes the limits of existing volumes.

use std::os::fd::AsFd as _;

use nodekeel_fsquota::QuotaLimits;
use nodekeel_localstorage::Dir;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, futimens};

use crate::dir_store::{DirStoreError, StoreInner};
use crate::step::VolumeStep;

impl StoreInner {
    /// Sets the limits of an existing volume, so that they survive a power loss.
    pub(super) fn resize_limits(&self, dir: &Dir, limits: QuotaLimits) -> Result<(), DirStoreError> {
        self.steps.run_step(VolumeStep::ResizeLimits, || self.set_limits(dir, limits))?;
        self.touch_volumes()?;
        self.sync_volumes()
    }

    /// Changes the time of the directory of volumes, which pods don't see. The kernel can't sync limits, but in
    /// the file system's journal this change follows them, so the sync that makes it durable makes them
    /// durable, too.
    fn touch_volumes(&self) -> Result<(), DirStoreError> {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        futimens(self.volumes.as_fd(), &times).map_err(|errno| DirStoreError::SyncLimits {
            path: self.volumes.path().to_owned(),
            source: errno.into(),
        })
    }
}
