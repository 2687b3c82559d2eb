//! The transitions of a directory's limits: fsquota's state table, the recommended column, and its edge
//! cases.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use nodekeel_fsquota::{
    Bytes, Error, Inodes, LimitChange, QuotaChange, QuotaLimits, QuotaSetter, QuotaStatus,
};
use rustix::fs::{Mode, OFlags};

const MIB: u64 = 1 << 20;

fn quota_change(bytes: LimitChange<u64>, inodes: LimitChange<u64>) -> QuotaChange {
    let bytes = match bytes {
        LimitChange::Set(bytes) => LimitChange::Set(Bytes(bytes)),
        LimitChange::Unlimited => LimitChange::Unlimited,
        LimitChange::Keep => LimitChange::Keep,
    };
    let inodes = match inodes {
        LimitChange::Set(inodes) => LimitChange::Set(Inodes(inodes)),
        LimitChange::Unlimited => LimitChange::Unlimited,
        LimitChange::Keep => LimitChange::Keep,
    };
    QuotaChange { bytes, inodes }
}

fn limits(bytes: Option<u64>, inodes: Option<u64>) -> QuotaLimits {
    QuotaLimits { bytes: bytes.map(Bytes), inodes: inodes.map(Inodes) }
}

fn create_dir(scratch: &Path, name: &str) -> File {
    fs::create_dir(scratch.join(name)).unwrap();
    File::open(scratch.join(name)).unwrap()
}

/// Checks every row of the table with directories created in `scratch`.
pub(crate) fn check_state_table(setter: &dyn QuotaSetter, scratch: &Path) {
    use LimitChange::{Keep, Set, Unlimited};
    let set =
        |dir: &File, bytes, inodes| setter.set_limits(dir.as_fd(), quota_change(bytes, inodes)).unwrap();
    let status = |dir: &File| setter.read_status(dir.as_fd()).unwrap();

    let none_to_both = create_dir(scratch, "none-to-both");
    let both = set(&none_to_both, Set(MIB), Set(100));
    assert_eq!(both.limits, limits(Some(MIB), Some(100)));
    let none_to_bytes = create_dir(scratch, "none-to-bytes");
    assert_eq!(set(&none_to_bytes, Set(MIB), Unlimited).limits, limits(Some(MIB), None));

    let bytes_alone = set(&none_to_both, Set(2 * MIB), Keep);
    assert_eq!(bytes_alone.limits, limits(Some(2 * MIB), Some(100)), "inodes are kept");
    let inodes_dropped = set(&none_to_both, Set(MIB), Unlimited);
    assert_eq!(inodes_dropped.limits, limits(Some(MIB), None), "and can be dropped");
    let inodes_alone = set(&none_to_both, Keep, Set(50));
    assert_eq!(inodes_alone.limits, limits(Some(MIB), Some(50)), "bytes are kept");
    let bytes_dropped = set(&none_to_both, Unlimited, Set(50));
    assert_eq!(bytes_dropped.limits, limits(None, Some(50)), "and can be dropped");
    assert_eq!(bytes_dropped.project, both.project, "the project stays the same throughout");

    setter.clear_limits(none_to_both.as_fd()).unwrap();
    assert_eq!(status(&none_to_both), None);
    let untouched = create_dir(scratch, "untouched");
    setter.clear_limits(untouched.as_fd()).unwrap();
    assert_eq!(status(&untouched), None, "clearing an unlimited directory changes nothing");

    check_over_limit(setter, scratch);
    check_non_directories(setter, scratch);
}

fn check_over_limit(setter: &dyn QuotaSetter, scratch: &Path) {
    let dir = create_dir(scratch, "over");
    setter.set_limits(dir.as_fd(), quota_change(LimitChange::Set(16 * MIB), LimitChange::Set(10))).unwrap();
    fs::write(scratch.join("over/file"), vec![1; MIB as usize]).unwrap();
    File::open(scratch.join("over/file")).unwrap().sync_all().unwrap();
    let shrunk: QuotaStatus =
        setter.set_limits(dir.as_fd(), quota_change(LimitChange::Set(MIB / 2), LimitChange::Keep)).unwrap();
    assert!(shrunk.is_over_limit() && shrunk.usage.bytes.0 >= MIB, "{shrunk:?}");
    assert_eq!(shrunk.remaining_quota().bytes, Some(Bytes(0)), "never below 0");
    assert_eq!(fs::read(scratch.join("over/file")).unwrap().len(), MIB as usize, "existing data stays");
}

fn check_non_directories(setter: &dyn QuotaSetter, scratch: &Path) {
    create_dir(scratch, "target");
    std::os::unix::fs::symlink("target", scratch.join("link")).unwrap();
    let open = |flags| rustix::fs::open(scratch.join("link"), flags, Mode::empty());
    let link: OwnedFd = open(OFlags::PATH | OFlags::NOFOLLOW).unwrap();
    let rejected = setter.set_limits(link.as_fd(), quota_change(LimitChange::Set(MIB), LimitChange::Keep));
    assert!(matches!(rejected, Err(Error::NotADirectory)), "{rejected:?}");
    let target = File::open(scratch.join("target")).unwrap();
    assert_eq!(setter.read_status(target.as_fd()).unwrap(), None, "the link was not followed");
    let file = File::create(scratch.join("file")).unwrap();
    let rejected = setter.set_limits(file.as_fd(), quota_change(LimitChange::Set(MIB), LimitChange::Keep));
    assert!(matches!(rejected, Err(Error::NotADirectory)), "{rejected:?}");
}
