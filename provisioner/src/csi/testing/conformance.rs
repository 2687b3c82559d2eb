//! The conformance suite of mounters.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::csi::mounter::{
    FileId, MountRestrictions, TargetConflict, TargetMount, TargetMountError, VolumeMounter,
};
use crate::csi::target_path::TargetPath;
use crate::image::{ImageFormat, VolumeKind};
use crate::store::OpenVolume;

const UNMOUNT_WITHIN: Duration = Duration::from_secs(10);

/// The directories that the suite uses.
#[derive(Debug, Clone, Copy)]
pub struct ConformanceSetup<'a> {
    /// Two volumes of one kind to mount; their content is not changed.
    pub volumes: [&'a OpenVolume; 2],
    /// The kubelet's directory. It contains an empty directory `pods`, in which targets are created and
    /// removed again.
    pub kubelet: &'a Path,
}

impl ConformanceSetup<'_> {
    fn target_path(&self, name: &str) -> TargetPath {
        let path = self.kubelet.join("pods").join(name);
        TargetPath::try_new(self.kubelet, path.to_str().expect("UTF-8")).expect("a target")
    }
}

/// Checks that an implementation keeps the contract of [`VolumeMounter`].
///
/// # Panics
/// If it breaks the contract; the message names the broken part.
pub fn conformance(mounter: &dyn VolumeMounter, setup: ConformanceSetup<'_>) {
    check_absent_target(mounter, setup);
    check_mount_and_unmount(mounter, setup);
    check_flags(mounter, setup);
    check_no_stacking(mounter, setup);
    check_list_targets(mounter, setup);
}

fn mount_at(mounter: &dyn VolumeMounter, target: &TargetPath) -> Option<TargetMount> {
    mounter.find_mount(target).expect("inspect a target")
}

/// A child that another thread starts holds what is open here until it executes its program.
fn unmount_when_free(mounter: &dyn VolumeMounter, target: &TargetPath) -> Result<(), TargetMountError> {
    let deadline = Instant::now() + UNMOUNT_WITHIN;
    loop {
        match mounter.unmount(target) {
            Err(TargetMountError::Busy { .. }) if Instant::now() < deadline => std::thread::yield_now(),
            unmounted => return unmounted,
        }
    }
}

fn checked_unmount(mounter: &dyn VolumeMounter, target: &TargetPath) {
    unmount_when_free(mounter, target).expect("unmount");
    assert_eq!(mount_at(mounter, target), None, "an unmounted target has no mount");
}

fn check_absent_target(mounter: &dyn VolumeMounter, setup: ConformanceSetup<'_>) {
    let target = setup.target_path("none");
    assert_eq!(mount_at(mounter, &target), None, "a missing target has no mount");
    mounter.unmount(&target).expect("unmounting a missing target succeeds");
}

fn check_mount_and_unmount(mounter: &dyn VolumeMounter, setup: ConformanceSetup<'_>) {
    let (volume, target) = (setup.volumes[0], setup.target_path("one"));
    for _ in 0..2 {
        mounter.mount(volume, &target, MountRestrictions::default()).expect("mount, also after an unmount");
        let file = FileId::from_fd(volume.as_fd()).expect("an open volume");
        assert_eq!(mount_at(mounter, &target).map(|mount| mount.volume), Some(file), "the volume is mounted");
        checked_unmount(mounter, &target);
        mounter.unmount(&target).expect("unmounting again succeeds");
    }
}

fn check_flags(mounter: &dyn VolumeMounter, setup: ConformanceSetup<'_>) {
    let (volume, target) = (setup.volumes[0], setup.target_path("flags"));
    let is_device = volume.kind() == VolumeKind::Image(ImageFormat::Block);
    for bits in 0..16 {
        let bit = |at: u32| bits >> at & 1 == 1;
        let flags = MountRestrictions { read_only: bit(0), no_suid: bit(1), no_dev: bit(2), no_exec: bit(3) };
        mounter.mount(volume, &target, flags).expect("mount");
        let found = mount_at(mounter, &target).expect("mounted").flags;
        // The node of a device is always mounted with the same flags; the device itself is read-only or not.
        if is_device {
            assert_eq!(found.read_only, flags.read_only, "the access is the requested one")
        } else {
            assert_eq!(found, flags, "the flags are the requested ones")
        }
        checked_unmount(mounter, &target);
    }
}

fn check_no_stacking(mounter: &dyn VolumeMounter, setup: ConformanceSetup<'_>) {
    let ([one, two], target) = (setup.volumes, setup.target_path("twice"));
    mounter.mount(one, &target, MountRestrictions::default()).expect("mount");
    for volume in [one, two] {
        let again = mounter.mount(volume, &target, MountRestrictions::default());
        let is_rejected =
            matches!(again, Err(TargetMountError::Occupied { source: TargetConflict::Mount, .. }));
        assert!(is_rejected, "a mount is not stacked on another: {again:?}");
    }
    let volume = mount_at(mounter, &target).map(|mount| mount.volume);
    assert_eq!(volume, FileId::from_fd(one.as_fd()).ok(), "the first mount stays");
    checked_unmount(mounter, &target);
}

fn check_list_targets(mounter: &dyn VolumeMounter, setup: ConformanceSetup<'_>) {
    let [one, two] = setup.volumes;
    let [first, second, other] = ["a", "b", "c"].map(|name| setup.target_path(name));
    for (volume, target) in [(one, &first), (one, &second), (two, &other)] {
        mounter.mount(volume, target, MountRestrictions::default()).expect("mount");
    }
    let targets = |volume| mounter.list_targets(volume).expect("list the targets");
    assert_eq!(
        targets(one),
        [first.clone(), second.clone()],
        "the targets of a volume are listed, and no others"
    );
    assert_eq!(targets(two), std::slice::from_ref(&other));
    for target in [&first, &second, &other] {
        checked_unmount(mounter, target);
    }
    assert_eq!(targets(one), []);
}
