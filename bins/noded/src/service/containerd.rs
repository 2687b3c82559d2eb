//! containerd, with all its data below the node's data directory.

use std::time::Duration;

use nodekeel_containerd_svc::{Containerd, DiskReserve, Preseed};
use nodekeel_logtree::LogStore;

use crate::config::ContainerdConfig;
use crate::plan;

/// What images leave free on the disk.
pub(crate) fn disk_reserve(config: &ContainerdConfig) -> DiskReserve {
    config.reserve.map_or_else(DiskReserve::default, DiskReserve::from_bytes)
}

/// containerd as a runnable, with the import of preseeded images below it.
pub(crate) fn containerd_runnable(
    planned: &plan::ContainerdPlan,
    path: String,
    grace: Duration,
    log_store: LogStore,
) -> Containerd {
    let mut containerd = Containerd::new(&planned.binary, planned.directories.clone(), path, log_store);
    containerd.extra_args = planned.config.extra_args.iter().map(Into::into).collect();
    containerd.grace_period = grace;
    containerd.config = planned.daemon_config.clone();
    containerd.disk_reserve = disk_reserve(&planned.config);
    let unpack = planned.config.unpack;
    containerd.preseed =
        planned.config.preseed.as_ref().map(|images| Preseed::new(images).with_unpacking(unpack));
    containerd
}
