//! Kills provisionerd at each moment of a volume's lifecycle, on a real API server, and starts it again:
//! nothing leaks, and nothing is provisioned twice.

use futures_util::StreamExt as _;
use testbed::FakeNode;

use crate::cluster::{self, DRIVER, TestDaemon};

mod clones;
mod images;
mod leak_counts;
mod run;
mod scenarios;

use leak_counts::LeakCounts;
use run::{CrashRun, MAX_BYTES, MAX_IMAGE_BYTES};

const IMMEDIATE_CLASS: &str = "immediate";

/// The class of strict volumes.
const STRICT_CLASS: &str = "strict";

/// Maximum number of parallel runs.
const MAX_PARALLEL: usize = 4;

/// The variable with the number of passes of a stress run through all moments.
const ROUNDS_VARIABLE: &str = "NODEKEEL_VOLUME_KILLS";

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
    /// The same, and it is deleted before provisionerd starts again: nobody needs the copy, which is not empty.
    CloneAbandoned,
    /// A claim for a block volume is provisioned, written, expanded, and deleted.
    Block,
    /// The same, for a strict volume.
    Strict,
    /// A claim for a strict volume is deleted before provisionerd starts again: nobody needs the volume, which is not empty.
    StrictAbandoned,
}

impl ClaimScenario {
    fn is_clone(self) -> bool {
        matches!(self, Self::Cloned | Self::CloneAbandoned)
    }

    fn is_image(self) -> bool {
        matches!(self, Self::Block | Self::Strict | Self::StrictAbandoned)
    }
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
const STEPS: [(ClaimScenario, &[&str]); 11] = [
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
        ClaimScenario::StrictAbandoned,
        &["FormatImage", "MarkUnpublished", "MarkKind", "RenameIntoPlace", "CreatePersistentVolume"],
    ),
];

/// The moments of the kills: before and after each step.
fn kill_moments() -> Vec<(ClaimScenario, String)> {
    let steps = STEPS.iter().flat_map(|(scenario, steps)| steps.iter().map(|step| (*scenario, *step)));
    steps
        .flat_map(|(scenario, step)| ["Before", "After"].map(|side| (scenario, format!("{side} {step}"))))
        .collect()
}

/// The name of the node and the claim of a run.
fn node_name(scenario: ClaimScenario, moment: &str, pass: usize) -> String {
    format!("{scenario:?}-{}-{pass}", moment.replace(' ', "-")).to_lowercase()
}

/// Kills provisionerd at every moment, this many times.
fn kill_at_each_moment(rounds: usize) -> LeakCounts {
    let kube = cluster::start_control_plane();
    for (name, more) in [
        (IMMEDIATE_CLASS, ""),
        (
            STRICT_CLASS,
            ", volumeBindingMode: WaitForFirstConsumer, allowVolumeExpansion: true, parameters: {strict: 'true'}",
        ),
    ] {
        let class = format!(
            "{{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: {name}}}, provisioner: {DRIVER}{more}}}"
        );
        kube.apply_manifests(&class).expect("a class");
    }
    let kubeconfig = cluster::account_kubeconfig(&kube);
    // Only a schedulable node selects itself.
    for pass in 0..rounds {
        for (scenario, moment) in kill_moments() {
            if scenario == ClaimScenario::Immediate {
                kube.create_fake_node(&FakeNode::new(node_name(scenario, &moment, pass))).expect("a node");
            }
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let client = cluster::admin_client(&kube).await;
        let all = (0..rounds).flat_map(|pass| kill_moments().into_iter().map(move |moment| (pass, moment)));
        let pass = |(pass, (scenario, moment)): (usize, (ClaimScenario, String))| {
            let (client, kubeconfig) = (client.clone(), kubeconfig.clone());
            async move {
                let name = node_name(scenario, &moment, pass);
                let program = TestDaemon::new(&kubeconfig, name.clone());
                match scenario {
                    _ if scenario.is_clone() => {
                        let run = CrashRun::start((client, name), (program, MAX_BYTES), "");
                        run.clone_claim(scenario, &moment).await
                    }
                    _ if scenario.is_image() => {
                        let run = CrashRun::start((client, name), (program, MAX_IMAGE_BYTES), &moment);
                        run.use_image(scenario).await
                    }
                    _ => {
                        let mut run = CrashRun::start((client, name), (program, MAX_BYTES), &moment);
                        run.run_scenario(scenario).await
                    }
                }
            }
        };
        // An instance that selects its node for claims must run alone.
        let (alone, together): (Vec<_>, Vec<_>) =
            all.partition(|(_, (scenario, _))| *scenario == ClaimScenario::Immediate);
        let counts = futures_util::stream::iter(together).map(pass).buffer_unordered(MAX_PARALLEL);
        let counts = counts.fold(LeakCounts::default(), async |sum, counts| sum.add(&counts)).await;
        let rest = futures_util::stream::iter(alone).then(pass);
        rest.fold(counts, async |sum, counts| sum.add(&counts)).await
    })
}

fn assert_no_leaks(rounds: usize) {
    let counts = kill_at_each_moment(rounds);
    println!("{counts}");
    assert_eq!(counts, LeakCounts { kills: rounds * kill_moments().len(), ..LeakCounts::default() });
}

#[test]
#[ignore = "needs kube"]
fn a_daemon_killed_at_each_moment_leaks_nothing_and_provisions_nothing_twice() {
    assert_no_leaks(1);
}

#[test]
#[ignore = "soak: NODEKEEL_VOLUME_KILLS times through all moments"]
fn a_daemon_killed_repeatedly_leaks_nothing_and_provisions_nothing_twice() {
    assert_no_leaks(std::env::var(ROUNDS_VARIABLE).map_or(2, |count| count.parse().expect("a number")));
}
