//! Kills provisionerd at each moment of a volume's lifecycle, on a real API server, and starts it again:
//! nothing leaks, and nothing is provisioned twice.

use nodekeel_provisioner::VolumeStep;
use testbed::{KillPlace, KillTally};

use crate::client_cluster::kill_rounds;
use crate::{capacity, import};

mod clones;
mod images;
mod marks;
mod matrix;
mod run;
mod scenarios;
mod snapshots;

use run::LeakCounts;

/// The scenario of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClaimScenario {
    /// The claim is provisioned for a selected node, used, and deleted.
    Selected,
    /// The same, for the first node that selects itself.
    Immediate,
    /// The same, and another client removes the finalizer in between.
    FinalizerRemoved,
    /// The same, and its volume is given to a second claim.
    Rebound,
    /// The claim does not fit.
    TooLarge,
    /// The claim is expanded, once further than possible.
    Expanded,
    /// The claim is a clone of another one.
    Cloned,
    /// The same, and it is deleted before provisionerd starts again: no claim needs the copy, which is not empty.
    CloneAbandoned,
    /// A claim for a block volume is provisioned, written, expanded, and deleted.
    Block,
    /// The same, for a strict volume.
    Strict,
    /// The same, with XFS.
    StrictXfs,
    /// A claim for a strict volume is deleted before provisionerd starts again: no claim needs the volume, which is not empty.
    StrictAbandoned,
    /// The claim is a clone of one whose volume is on another node.
    HandedOver,
    /// A snapshot of the claim's volume is taken and deleted.
    Snapshotted,
    /// The disk of the claim's volume was declared lost, and is there.
    DeclaredLost,
    /// The claim's volume was reported as abnormal, and is there.
    ReportedAbnormal,
}

/// The steps of a clone.
const CLONE_STEPS: &[&str] = &[
    "CreateDirectory",
    "SetLimits",
    "CloneTree",
    "MarkUnpublished",
    "RenameIntoPlace",
    "CreatePersistentVolume",
    "MarkPublished",
];

/// The steps of a strict volume.
const STRICT_STEPS: &[&str] = &[
    "CreateDirectory",
    "SetLimits",
    "CreateImage",
    "FormatImage",
    "MarkUnpublished",
    "MarkKind",
    "RenameIntoPlace",
    "CreatePersistentVolume",
    "MarkPublished",
    "ResizeLimits",
    "GrowImage",
    "GrowDevice",
    "UpdateVolume",
    "MoveToTrash",
    "UnmarkKind",
    "EraseContent",
];

/// The steps of each scenario.
const STEPS: [(ClaimScenario, &[&str]); 16] = [
    (
        ClaimScenario::Selected,
        &[
            "CreateDirectory",
            "SetLimits",
            "RenameIntoPlace",
            "CreatePersistentVolume",
            "CreateEvent",
            "CreateTrashEntry",
            "MoveToTrash",
            "DeletePersistentVolume",
            "RemoveFinalizer",
            "EraseContent",
            "ReleaseProject",
            "RemoveTrashEntry",
        ],
    ),
    (ClaimScenario::Immediate, &["SelectNode"]),
    (ClaimScenario::FinalizerRemoved, &["AddFinalizer"]),
    (ClaimScenario::Rebound, &["RecordClaim"]),
    (ClaimScenario::TooLarge, &["DeselectNode"]),
    (
        ClaimScenario::Expanded,
        &["MarkResize", "ResizeLimits", "UpdateVolume", "FinishResize", "MarkInfeasible"],
    ),
    (ClaimScenario::Cloned, CLONE_STEPS),
    (ClaimScenario::CloneAbandoned, CLONE_STEPS),
    (ClaimScenario::Block, &["CreateImage", "MarkKind", "GrowImage", "GrowDevice", "UnmarkKind"]),
    (ClaimScenario::Strict, STRICT_STEPS),
    (
        ClaimScenario::StrictXfs,
        &["FormatImage", "RenameIntoPlace", "GrowImage", "GrowDevice", "UnmarkKind", "EraseContent"],
    ),
    (
        ClaimScenario::StrictAbandoned,
        &["FormatImage", "MarkUnpublished", "MarkKind", "RenameIntoPlace", "CreatePersistentVolume"],
    ),
    (ClaimScenario::HandedOver, &["HandOverClaim"]),
    (ClaimScenario::Snapshotted, &["CloneTree", "UpdateSnapshotStatus", "RemoveSnapshotFinalizer"]),
    (ClaimScenario::DeclaredLost, &["MarkLost"]),
    (ClaimScenario::ReportedAbnormal, &["MarkCondition"]),
];

/// The moments of the kills: before and after each step.
fn kill_moments() -> Vec<(ClaimScenario, String)> {
    let steps = STEPS.iter().flat_map(|(scenario, steps)| steps.iter().map(|step| (*scenario, *step)));
    steps
        .flat_map(|(scenario, step)| ["Before", "After"].map(|side| (scenario, format!("{side} {step}"))))
        .collect()
}

fn assert_no_leaks(rounds: usize) {
    let (counts, moments) = (matrix::kill_at_each_moment(rounds), kill_moments());
    println!("{counts}");
    assert_eq!(counts, LeakCounts { kills: rounds * moments.len(), ..LeakCounts::default() });
    let mut tally = KillTally::default();
    for (_, moment) in &moments {
        (0..rounds).for_each(|_| tally.record(KillPlace::Host, moment));
    }
    tally.print_lines();
}

/// Steps of mounts: this daemon has no kubelet. The tests of the mounter kill there, and those on a node.
const MOUNT_STEPS: [&str; 6] =
    ["CreateTarget", "AttachDevice", "MountVolume", "UnmountVolume", "RemoveTarget", "DetachDevice"];

#[test]
fn each_step_has_a_test_that_kills_there() {
    let here = STEPS.iter().flat_map(|(_, steps)| steps.iter().copied());
    let imports = import::STEPS.iter().flat_map(|(_, steps)| steps.iter().copied());
    let publications =
        capacity::PUBLICATION_MOMENTS.iter().filter_map(|moment| moment.strip_prefix("Before "));
    let mut killed: Vec<_> = here.chain(imports).chain(publications).chain(MOUNT_STEPS).collect();
    killed.sort_unstable();
    killed.dedup();
    let mut all = VolumeStep::ALL.map(|step| format!("{step:?}"));
    all.sort_unstable();
    assert_eq!(killed, all);
}

#[test]
#[ignore = "needs kube"]
fn a_daemon_killed_at_each_moment_leaks_nothing_and_provisions_nothing_twice() {
    assert_no_leaks(1);
}

#[test]
#[ignore = "soak: NODEKEEL_VOLUME_KILLS times through all moments"]
fn a_daemon_killed_repeatedly_leaks_nothing_and_provisions_nothing_twice() {
    assert_no_leaks(kill_rounds());
}
