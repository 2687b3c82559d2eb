//! containerd, with everything that it keeps below the node's data directory.

use std::time::Duration;

use nodekeel_containerd_svc::{Containerd, Preseed};
use nodekeel_logtree::Journal;

use crate::plan;

/// containerd as the tree runs it, with its images below it where the operator gives some.
pub(crate) fn runnable(
    planned: &plan::Containerd,
    path: String,
    grace: Duration,
    journal: Journal,
) -> Containerd {
    let mut containerd = Containerd::new(&planned.binary, planned.place.clone(), path, journal);
    containerd.extra_args = planned.config.extra_args.iter().map(Into::into).collect();
    containerd.grace = grace;
    containerd.config = planned.told.clone();
    let unpack = planned.config.unpack;
    containerd.preseed = planned.config.preseed.as_ref().map(|images| Preseed::new(images).unpack(unpack));
    containerd
}
