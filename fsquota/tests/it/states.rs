//! What one directory's limits become: fsquota's state table, the recommended column, and what is around it.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use nodekeel_fsquota::{Bytes, Change, Error, Inodes, Limit, Limits, QuotaSetter, Status};
use rustix::fs::{Mode, OFlags};

const MIB: u64 = 1 << 20;

fn change(bytes: Limit<u64>, inodes: Limit<u64>) -> Change {
    let bytes = match bytes {
        Limit::At(bytes) => Limit::At(Bytes(bytes)),
        Limit::Unlimited => Limit::Unlimited,
        Limit::Keep => Limit::Keep,
    };
    let inodes = match inodes {
        Limit::At(inodes) => Limit::At(Inodes(inodes)),
        Limit::Unlimited => Limit::Unlimited,
        Limit::Keep => Limit::Keep,
    };
    Change { bytes, inodes }
}

fn limits(bytes: Option<u64>, inodes: Option<u64>) -> Limits {
    Limits { bytes: bytes.map(Bytes), inodes: inodes.map(Inodes) }
}

fn make(scratch: &Path, name: &str) -> File {
    fs::create_dir(scratch.join(name)).unwrap();
    File::open(scratch.join(name)).unwrap()
}

/// Walks through the table with directories made in `scratch`; `number` makes their names.
pub(crate) fn walk_through(setter: &dyn QuotaSetter, scratch: &Path) {
    use Limit::{At, Keep, Unlimited};
    let set = |dir: &File, bytes, inodes| setter.set(dir.as_fd(), change(bytes, inodes)).unwrap();
    let status = |dir: &File| setter.status(dir.as_fd()).unwrap();

    let none_to_both = make(scratch, "none-to-both");
    let both = set(&none_to_both, At(MIB), At(100));
    assert_eq!(both.limits, limits(Some(MIB), Some(100)));
    let none_to_bytes = make(scratch, "none-to-bytes");
    assert_eq!(set(&none_to_bytes, At(MIB), Unlimited).limits, limits(Some(MIB), None));

    let bytes_alone = set(&none_to_both, At(2 * MIB), Keep);
    assert_eq!(bytes_alone.limits, limits(Some(2 * MIB), Some(100)), "inodes are kept");
    let inodes_dropped = set(&none_to_both, At(MIB), Unlimited);
    assert_eq!(inodes_dropped.limits, limits(Some(MIB), None), "and can be dropped");
    let inodes_alone = set(&none_to_both, Keep, At(50));
    assert_eq!(inodes_alone.limits, limits(Some(MIB), Some(50)), "bytes are kept");
    let bytes_dropped = set(&none_to_both, Unlimited, At(50));
    assert_eq!(bytes_dropped.limits, limits(None, Some(50)), "and can be dropped");
    assert_eq!(bytes_dropped.project, both.project, "it is one project all along");

    setter.clear(none_to_both.as_fd()).unwrap();
    assert_eq!(status(&none_to_both), None);
    let untouched = make(scratch, "untouched");
    setter.clear(untouched.as_fd()).unwrap();
    assert_eq!(status(&untouched), None, "clearing what has no limits is nothing");

    over_the_limit(setter, scratch);
    in_the_way(setter, scratch);
}

fn over_the_limit(setter: &dyn QuotaSetter, scratch: &Path) {
    let dir = make(scratch, "over");
    setter.set(dir.as_fd(), change(Limit::At(16 * MIB), Limit::At(10))).unwrap();
    fs::write(scratch.join("over/file"), vec![1; MIB as usize]).unwrap();
    File::open(scratch.join("over/file")).unwrap().sync_all().unwrap();
    let shrunk: Status = setter.set(dir.as_fd(), change(Limit::At(MIB / 2), Limit::Keep)).unwrap();
    assert!(shrunk.over_limit() && shrunk.usage.bytes.0 >= MIB, "{shrunk:?}");
    assert_eq!(shrunk.available().bytes, Some(Bytes(0)), "never below 0");
    assert_eq!(fs::read(scratch.join("over/file")).unwrap().len(), MIB as usize, "what is there stays");
}

fn in_the_way(setter: &dyn QuotaSetter, scratch: &Path) {
    make(scratch, "target");
    std::os::unix::fs::symlink("target", scratch.join("link")).unwrap();
    let open = |flags| rustix::fs::open(scratch.join("link"), flags, Mode::empty());
    let link: OwnedFd = open(OFlags::PATH | OFlags::NOFOLLOW).unwrap();
    let refused = setter.set(link.as_fd(), change(Limit::At(MIB), Limit::Keep));
    assert!(matches!(refused, Err(Error::NotADirectory)), "{refused:?}");
    let target = File::open(scratch.join("target")).unwrap();
    assert_eq!(setter.status(target.as_fd()).unwrap(), None, "the link was not followed");
    let file = File::create(scratch.join("file")).unwrap();
    let refused = setter.set(file.as_fd(), change(Limit::At(MIB), Limit::Keep));
    assert!(matches!(refused, Err(Error::NotADirectory)), "{refused:?}");
}
