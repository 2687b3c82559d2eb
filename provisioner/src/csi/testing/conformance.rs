//! The contract of mounts, as a check.

use std::os::fd::BorrowedFd;
use std::path::Path;

use crate::csi::mounts::{Conflict, FileId, MountError, MountFlags, Mounted, Mounts};
use crate::csi::target::Target;

/// What the check is made with.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'a> {
    /// Two directories to mount; what they hold is left alone.
    pub volumes: [BorrowedFd<'a>; 2],
    /// The kubelet's directory. Below it is an empty directory `pods`, in which targets are made and removed again.
    pub kubelet: &'a Path,
}

impl Ground<'_> {
    fn target(&self, name: &str) -> Target {
        let path = self.kubelet.join("pods").join(name);
        Target::try_new(self.kubelet, path.to_str().expect("UTF-8")).expect("a target")
    }
}

/// Checks that an implementation keeps the contract of [`Mounts`].
///
/// # Panics
/// It breaks the contract; the text says which part of it.
pub fn conformance(mounts: &dyn Mounts, ground: Ground<'_>) {
    nothing_there(mounts, ground);
    there_and_gone(mounts, ground);
    flags_are_kept(mounts, ground);
    never_stacked(mounts, ground);
    targets_are_found(mounts, ground);
}

fn mounted(mounts: &dyn Mounts, target: &Target) -> Option<Mounted> {
    mounts.mounted(target).expect("look at a target")
}

fn unmount(mounts: &dyn Mounts, target: &Target) {
    mounts.unmount(target).expect("unmount");
    assert_eq!(mounted(mounts, target), None, "what is unmounted is gone");
}

fn nothing_there(mounts: &dyn Mounts, ground: Ground<'_>) {
    let target = ground.target("none");
    assert_eq!(mounted(mounts, &target), None, "nothing is mounted where there is nothing");
    mounts.unmount(&target).expect("unmounting where there is nothing is success");
}

fn there_and_gone(mounts: &dyn Mounts, ground: Ground<'_>) {
    let (volume, target) = (ground.volumes[0], ground.target("one"));
    for _ in 0..2 {
        mounts.mount(volume, &target, MountFlags::default()).expect("mount, also again after an unmount");
        let of = FileId::of(volume).expect("an open directory");
        assert_eq!(mounted(mounts, &target).map(|mount| mount.of), Some(of), "the volume is what is mounted");
        unmount(mounts, &target);
        mounts.unmount(&target).expect("unmounting again is success");
    }
}

fn flags_are_kept(mounts: &dyn Mounts, ground: Ground<'_>) {
    let (volume, target) = (ground.volumes[0], ground.target("flags"));
    for bits in 0..16 {
        let bit = |at: u32| bits >> at & 1 == 1;
        let flags = MountFlags { read_only: bit(0), no_suid: bit(1), no_dev: bit(2), no_exec: bit(3) };
        mounts.mount(volume, &target, flags).expect("mount");
        assert_eq!(mounted(mounts, &target).map(|mount| mount.flags), Some(flags), "flags are as asked");
        unmount(mounts, &target);
    }
}

fn never_stacked(mounts: &dyn Mounts, ground: Ground<'_>) {
    let ([one, two], target) = (ground.volumes, ground.target("twice"));
    mounts.mount(one, &target, MountFlags::default()).expect("mount");
    for volume in [one, two] {
        let again = mounts.mount(volume, &target, MountFlags::default());
        let is_refused = matches!(again, Err(MountError::Occupied { source: Conflict::Mount, .. }));
        assert!(is_refused, "a mount is not stacked on another: {again:?}");
    }
    let of = mounted(mounts, &target).map(|mount| mount.of);
    assert_eq!(of, FileId::of(one).ok(), "what was mounted first stays");
    unmount(mounts, &target);
}

fn targets_are_found(mounts: &dyn Mounts, ground: Ground<'_>) {
    let [one, two] = ground.volumes;
    let [first, second, other] = ["a", "b", "c"].map(|name| ground.target(name));
    for (volume, target) in [(one, &first), (one, &second), (two, &other)] {
        mounts.mount(volume, target, MountFlags::default()).expect("mount");
    }
    let targets = |volume| mounts.targets(volume).expect("list the targets");
    assert_eq!(targets(one), [first.clone(), second.clone()], "a volume's targets are found, and no others");
    assert_eq!(targets(two), std::slice::from_ref(&other));
    for target in [&first, &second, &other] {
        unmount(mounts, target);
    }
    assert_eq!(targets(one), []);
}
