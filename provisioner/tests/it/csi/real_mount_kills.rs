//! A process killed at each step of mounting and unmounting a volume: the next one completes or undoes it, and no device
//! is left.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use nodekeel_provisioner::csi::{BindMounter, MountRestrictions, TargetPath, VolumeMounter as _};
use nodekeel_provisioner::{ImageFormat, StepMoment, VolumeStep};
use rustix::process::Signal;
use testbed::{KillPlace, KillTally};

use super::harness::{MountSite, open_image};
use super::real_mounts::run_in_mount_namespace;
use crate::kill_sample::{KillOrder, kill_at, run_child};

/// How often a process is killed at each step; once without.
const ROUNDS_VARIABLE: &str = "NODEKEEL_VOLUME_KILLS";

const STEPS: [VolumeStep; 6] = [
    VolumeStep::CreateTarget,
    VolumeStep::AttachDevice,
    VolumeStep::MountVolume,
    VolumeStep::UnmountVolume,
    VolumeStep::RemoveTarget,
    VolumeStep::DetachDevice,
];

const POD: &str = "pods/a";

fn target_in(kubelet: &Path) -> TargetPath {
    TargetPath::try_new(kubelet, kubelet.join(POD).to_str().expect("UTF-8")).expect("a target")
}

/// The process that is killed.
#[test]
fn child() {
    let Some(order) = KillOrder::of_this_process() else { return };
    let kubelet = order.base.join("kubelet");
    let mounts = BindMounter::new(&kubelet).with_hook(Some(kill_at(order.moment)));
    let target = target_in(&kubelet);
    let image = order.base.join("volumes").join(super::harness::id(1).as_str()).join("image");
    let volume = open_image(&image, order.life.parse().expect("a format")).expect("open");
    mounts.mount(&volume, &target, MountRestrictions::default()).expect("mount");
    mounts.unmount(&target).and_then(|()| mounts.release(&volume)).expect("unmount");
}

/// Kills a process at each step. After that, the kubelet publishes the volume again, or unpublishes it.
fn kill_at_each_step(format: ImageFormat, is_repeated: bool, tally: &mut KillTally) {
    let fixture = MountSite::new();
    let (volume, target) = (fixture.create(1, format), fixture.target(POD));
    for step in STEPS {
        for moment in [StepMoment::Before, StepMoment::After] {
            let point = format!("{moment:?} {step:?}");
            let status = run_child("csi::real_mount_kills", &fixture.path(""), &point, format.as_str());
            if step == VolumeStep::DetachDevice && format != ImageFormat::Block {
                assert!(status.success(), "{point}: the device of a file system detaches itself");
            } else {
                assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{format} {point}");
                tally.record(KillPlace::Host, &point);
            }
            let mounts = BindMounter::new(fixture.path("kubelet"));
            let is_mounted = mounts.find_mount(&target).expect("inspect").is_some();
            if is_repeated && !is_mounted {
                mounts.mount(&volume, &target, MountRestrictions::default()).expect("mount");
            }
            let expected = if is_mounted || is_repeated { std::slice::from_ref(&target) } else { &[] };
            assert_eq!(mounts.list_targets(&volume).expect("list"), expected, "{format} {point}");
            fixture.unmount(POD);
            mounts.release(&volume).expect("release");
            assert!(!fixture.target_path(POD).exists(), "{format} {point}");
            fixture.wait_detached();
        }
    }
}

#[test]
#[ignore = "needs root: it attaches loop devices"]
fn a_process_killed_at_any_step_of_a_mount_leaves_what_the_next_one_completes_or_undoes() {
    run_in_mount_namespace(|| {
        let rounds = std::env::var(ROUNDS_VARIABLE).map_or(1, |count| count.parse().expect("a number"));
        let mut tally = KillTally::default();
        for _ in 0..rounds {
            for format in ImageFormat::ALL {
                for is_repeated in [true, false] {
                    kill_at_each_step(format, is_repeated, &mut tally);
                }
            }
        }
        assert_eq!(tally.count_at(KillPlace::Host), rounds * 2 * (12 + 10 + 10));
        tally.print_lines();
    });
}
