//! Kills provisionerd at the moments of a volume's lifecycle, with limits, loop devices and mounts of the kernel: nothing
//! leaks, and nothing is provisioned twice.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use nodekeel_provisioner::{ImageFormat, StepMoment, VolumeStep};
use testbed::guest::GuestBuilder;
use testbed::power_cut::selected_seed;
use testbed::{Kube, KubeUser};

use crate::deployment::{TestCluster, with_node};
use crate::disk::VolumeFileSystem;
use crate::images;

mod copies;
mod daemon_runner;
mod lifecycles;

use daemon_runner::{DaemonRunner, KUBECONFIG_AT, PROGRAM_AT};

const ACCOUNT: (&str, &str) = ("nodekeel", "provisionerd");

const CLASS: &str = "{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: immediate}, provisioner: \
                     volumes.nodekeel}";

/// How often a stress run goes through all moments.
const ROUNDS_VARIABLE: &str = "NODEKEEL_NODE_VOLUME_KILLS";

/// One of so many moments is in a sample.
const SAMPLE: usize = 10;

/// Steps that only some claims reach, each in a lifecycle of its kind.
const RARE_STEPS: [VolumeStep; 4] =
    [VolumeStep::DeselectNode, VolumeStep::SelectNode, VolumeStep::RecordClaim, VolumeStep::RemoveCapacity];

/// Steps at which provisionerd changes what others have written.
const MARK_STEPS: [VolumeStep; 3] =
    [VolumeStep::HandOverClaim, VolumeStep::MarkLost, VolumeStep::MarkCondition];

/// Steps of block and strict volumes.
const IMAGE_STEPS: [VolumeStep; 9] = [
    VolumeStep::CreateImage,
    VolumeStep::FormatImage,
    VolumeStep::MarkUnpublished,
    VolumeStep::MarkKind,
    VolumeStep::MarkPublished,
    VolumeStep::AttachDevice,
    VolumeStep::GrowImage,
    VolumeStep::GrowDevice,
    VolumeStep::UnmarkKind,
];

/// Steps of a clone, and of a snapshot.
const COPY_STEPS: [VolumeStep; 3] =
    [VolumeStep::CloneTree, VolumeStep::UpdateSnapshotStatus, VolumeStep::RemoveSnapshotFinalizer];

/// Steps of imports, which are a command.
const IMPORT_STEPS: [VolumeStep; 3] = [VolumeStep::MoveToImport, VolumeStep::LimitTree, VolumeStep::CopyTree];

/// Steps that directories and images have in common, where the second do more: they have devices and files.
const COMMON_STEPS: [VolumeStep; 19] = [
    VolumeStep::CreateDirectory,
    VolumeStep::SetLimits,
    VolumeStep::RenameIntoPlace,
    VolumeStep::CreatePersistentVolume,
    VolumeStep::CreateTarget,
    VolumeStep::MountVolume,
    VolumeStep::MarkResize,
    VolumeStep::ResizeLimits,
    VolumeStep::UpdateVolume,
    VolumeStep::FinishResize,
    VolumeStep::UnmountVolume,
    VolumeStep::RemoveTarget,
    VolumeStep::CreateTrashEntry,
    VolumeStep::MoveToTrash,
    VolumeStep::DeletePersistentVolume,
    VolumeStep::RemoveFinalizer,
    VolumeStep::EraseContent,
    VolumeStep::ReleaseProject,
    VolumeStep::RemoveTrashEntry,
];

/// The steps of a directory with a pod, in order.
fn directory_steps() -> Vec<VolumeStep> {
    let of_others =
        [&RARE_STEPS[..], &MARK_STEPS, &IMAGE_STEPS, &COPY_STEPS, &IMPORT_STEPS, &[VolumeStep::DetachDevice]];
    let elsewhere = of_others.concat();
    VolumeStep::ALL.into_iter().filter(|step| !elsewhere.contains(step)).collect()
}

/// How often provisionerd is killed.
#[derive(Clone, Copy)]
enum KillCoverage {
    /// Around some steps of directories: a kill takes twenty seconds on an emulated node.
    Sample,
    /// Before and after each step of each kind of volume, so many times.
    Whole { rounds: usize },
}

impl KillCoverage {
    fn whole() -> Self {
        let rounds = std::env::var(ROUNDS_VARIABLE).map_or(1, |count| count.parse().expect("a number"));
        Self::Whole { rounds }
    }

    fn rounds(self) -> usize {
        match self {
            Self::Sample => 1,
            Self::Whole { rounds } => rounds,
        }
    }

    /// Moments around steps, as provisionerd names them.
    fn moments(self, steps: &[VolumeStep]) -> BTreeSet<String> {
        let sides = [StepMoment::Before, StepMoment::After];
        let all = steps.iter().flat_map(|step| sides.map(|side| format!("{side:?} {step:?}")));
        match self {
            Self::Sample => {
                let seed = usize::try_from(selected_seed().expect("a seed")).expect("a small seed");
                all.skip(seed % SAMPLE).step_by(SAMPLE).collect()
            }
            Self::Whole { .. } => all.collect(),
        }
    }

    /// The images of a pod, and the steps at which provisionerd is killed while it has them.
    fn image_lives(self) -> Vec<(Vec<ImageFormat>, Vec<VolumeStep>)> {
        let mut of_block = IMAGE_STEPS.to_vec();
        of_block.push(VolumeStep::DetachDevice);
        match self {
            Self::Sample => Vec::new(),
            Self::Whole { .. } => {
                of_block.extend(COMMON_STEPS);
                let of_strict = || [&IMAGE_STEPS[..], &COMMON_STEPS].concat();
                vec![
                    (vec![ImageFormat::Block], of_block),
                    (vec![ImageFormat::Ext4], of_strict()),
                    (vec![ImageFormat::Xfs], of_strict()),
                ]
            }
        }
    }
}

#[test]
#[ignore = "needs kube and a node"]
fn a_daemon_killed_around_some_steps_on_xfs_leaks_nothing_and_provisions_nothing_twice() {
    kill_at_moments(VolumeFileSystem::Xfs, KillCoverage::Sample);
}

#[test]
#[ignore = "soak"]
fn a_daemon_killed_at_each_moment_on_xfs_leaks_nothing_and_provisions_nothing_twice() {
    kill_at_moments(VolumeFileSystem::Xfs, KillCoverage::whole());
}

#[test]
#[ignore = "soak"]
fn a_daemon_killed_at_each_moment_on_ext4_leaks_nothing_and_provisions_nothing_twice() {
    kill_at_moments(VolumeFileSystem::Ext4, KillCoverage::whole());
}

fn kill_at_moments(file_system: VolumeFileSystem, coverage: KillCoverage) {
    let kube = Kube::builder().with_user(KubeUser::service_account(ACCOUNT.0, ACCOUNT.1));
    let furnish = |kube: &Kube, guest: GuestBuilder| {
        let kubeconfig = kube.kubeconfig_for_guest(&KubeUser::service_account(ACCOUNT.0, ACCOUNT.1).name)?;
        let guest = guest.add_program(PROGRAM_AT, env!("CARGO_BIN_EXE_provisionerd"));
        Ok(guest.add_text(KUBECONFIG_AT, 0o600, kubeconfig))
    };
    with_node(file_system, kube, furnish, |cluster| {
        for manifest in [
            include_str!("../../../../deploy/namespace.yaml"),
            include_str!("../../../../deploy/rbac.yaml"),
            include_str!("../../../../deploy/csidriver.yaml"),
            include_str!("../../../../deploy/storageclass.yaml"),
            CLASS,
        ] {
            cluster.kube.apply_manifests(manifest)?;
        }
        copies::install_snapshot_api(cluster)?;
        let program = DaemonRunner::default();
        std::thread::scope(|scope| {
            let guest = cluster.node.guest();
            let runs = scope.spawn(|| program.run(guest));
            let lived = (0..coverage.rounds())
                .try_for_each(|round| run_lifecycles(cluster, &program, coverage, round));
            program.end(cluster);
            let ran = runs.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            lived.and(ran).with_context(|| program.output())
        })?;
        program.tally().print_lines();
        println!("nothing leaked, nothing provisioned twice");
        Ok(())
    });
}

/// Runs volume lifecycles of each kind until provisionerd was killed at each moment of them.
fn run_lifecycles(
    cluster: &TestCluster,
    program: &DaemonRunner,
    coverage: KillCoverage,
    round: usize,
) -> Result<()> {
    let kill_at = |steps: &[VolumeStep]| program.add_moments(cluster, coverage.moments(steps));
    kill_at(&directory_steps())?;
    cluster.wait_driver_registered()?;
    repeat_lifecycle(cluster, program, |number| {
        lifecycles::check_claim_with_pod(cluster, &format!("data-{round}-{number}"))
    })?;
    for (formats, steps) in coverage.image_lives() {
        kill_at(&steps)?;
        repeat_lifecycle(cluster, program, |_| {
            images::start_pod(cluster, &formats)?;
            images::expand_claims(cluster, &formats)?;
            images::delete_all(cluster, &formats)
        })?;
    }
    kill_at(&RARE_STEPS)?;
    lifecycles::check_claim_without_space(cluster, program)?;
    lifecycles::check_claim_without_pod(cluster)?;
    lifecycles::check_rebound_volume(cluster)?;
    lifecycles::check_removed_class(cluster)?;
    program.wait_killed(cluster, "")?;
    cluster.times.log_step("claims without space and without a pod");
    match coverage {
        KillCoverage::Sample => Ok(()),
        KillCoverage::Whole { .. } => run_copies(cluster, program, coverage),
    }
}

/// Runs lifecycles of what refers to other objects.
fn run_copies(cluster: &TestCluster, program: &DaemonRunner, coverage: KillCoverage) -> Result<()> {
    // No other file system shares blocks.
    if cluster.file_system == VolumeFileSystem::Xfs {
        program.add_moments(cluster, coverage.moments(&COPY_STEPS))?;
        repeat_lifecycle(cluster, program, |_| copies::check_copies(cluster))?;
    }
    program.add_moments(cluster, coverage.moments(&MARK_STEPS))?;
    lifecycles::check_wrong_marks(cluster, program)?;
    copies::check_handed_over_clone(cluster, program)?;
    cluster.times.log_step("a volume with wrong marks, and a clone of another node's volume");
    Ok(())
}

/// Repeats a lifecycle until provisionerd was killed at all moments.
fn repeat_lifecycle(
    cluster: &TestCluster,
    program: &DaemonRunner,
    live: impl Fn(usize) -> Result<()>,
) -> Result<()> {
    for number in 0.. {
        let before = program.pending().len();
        live(number)?;
        let left = program.pending().clone();
        cluster.times.log_step(&format!("a volume lifecycle with {} kills", before - left.len()));
        if left.is_empty() {
            break;
        }
        ensure!(left.len() < before, "never reached {left:?}");
    }
    Ok(())
}
