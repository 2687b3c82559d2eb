//! All runs, some at the same time, in one control plane.

use std::path::{Path, PathBuf};

use futures_util::StreamExt as _;
use kube::Client;
use testbed::{FakeNode, Kube};

use super::run::{CrashRun, LeakCounts, MAX_BYTES, MAX_IMAGE_BYTES};
use super::{ClaimScenario, kill_moments};
use crate::client_cluster::{self as cluster, DRIVER, TestDaemon};

pub(super) const IMMEDIATE_CLASS: &str = "immediate";

/// The classes of strict volumes.
pub(super) const STRICT_CLASS: &str = "strict";
pub(super) const XFS_CLASS: &str = "strict-xfs";

/// Maximum number of parallel runs.
const MAX_PARALLEL: usize = 4;

/// One run: a kill at a moment of a scenario.
struct CrashCase {
    scenario: ClaimScenario,
    moment: String,
    pass: usize,
}

impl CrashCase {
    /// All of them, this many times.
    fn list(rounds: usize) -> impl Iterator<Item = Self> {
        (0..rounds).flat_map(|pass| {
            kill_moments().into_iter().map(move |(scenario, moment)| Self { scenario, moment, pass })
        })
    }

    /// The name of the node and the claim.
    fn name(&self) -> String {
        format!("{:?}-{}-{}", self.scenario, self.moment.replace(' ', "-"), self.pass).to_lowercase()
    }

    async fn run(self, client: Client, kubeconfig: &Path) -> LeakCounts {
        let moment = self.moment.as_str();
        let program = TestDaemon::new(kubeconfig, self.name());
        let start = |max_bytes, moment| CrashRun::start(client, program, max_bytes, moment);
        match self.scenario {
            ClaimScenario::Cloned | ClaimScenario::CloneAbandoned => {
                start(MAX_BYTES, "").clone_claim(self.scenario, moment).await
            }
            ClaimScenario::Block
            | ClaimScenario::Strict
            | ClaimScenario::StrictXfs
            | ClaimScenario::StrictAbandoned => start(MAX_IMAGE_BYTES, moment).use_image(self.scenario).await,
            ClaimScenario::HandedOver => start(MAX_BYTES, moment).hand_over_clone().await,
            ClaimScenario::Snapshotted => start(MAX_BYTES, "").take_snapshot(moment).await,
            ClaimScenario::DeclaredLost | ClaimScenario::ReportedAbnormal => {
                start(MAX_BYTES, "").mark_volume(self.scenario, moment).await
            }
            scenario => start(MAX_BYTES, moment).run_scenario(scenario).await,
        }
    }
}

/// Kills provisionerd at every moment, this many times.
pub(super) fn kill_at_each_moment(rounds: usize) -> LeakCounts {
    let (kube, kubeconfig) = start_control_plane(rounds);
    cluster::test_runtime().block_on(async {
        let client = cluster::admin_client(&kube).await;
        // An instance that selects its node for claims must run alone.
        let (alone, together): (Vec<_>, Vec<_>) =
            CrashCase::list(rounds).partition(|case| case.scenario == ClaimScenario::Immediate);
        let run = |case: CrashCase| case.run(client.clone(), &kubeconfig);
        let counts = futures_util::stream::iter(together).map(run).buffer_unordered(MAX_PARALLEL);
        let counts = counts.fold(LeakCounts::default(), async |sum, counts| sum.add(&counts)).await;
        let rest = futures_util::stream::iter(alone).then(run);
        rest.fold(counts, async |sum, counts| sum.add(&counts)).await
    })
}

/// A control plane with the classes and nodes that the runs need, and the kubeconfig of provisionerd's account.
fn start_control_plane(rounds: usize) -> (Kube, PathBuf) {
    const STRICT: &str =
        ", volumeBindingMode: WaitForFirstConsumer, allowVolumeExpansion: true, parameters: {strict: 'true'";
    let kube = cluster::start_control_plane();
    for (name, more) in [
        (IMMEDIATE_CLASS, String::new()),
        (STRICT_CLASS, format!("{STRICT}}}")),
        (XFS_CLASS, format!("{STRICT}, csi.storage.k8s.io/fstype: xfs}}")),
    ] {
        let class = format!(
            "{{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: {name}}}, provisioner: {DRIVER}{more}}}"
        );
        kube.apply_manifests(&class).expect("a class");
    }
    cluster::install_snapshot_api(&kube);
    // Only a schedulable node selects itself.
    for case in CrashCase::list(rounds).filter(|case| case.scenario == ClaimScenario::Immediate) {
        kube.create_fake_node(&FakeNode::new(case.name())).expect("a node");
    }
    let kubeconfig = cluster::account_kubeconfig(&kube);
    (kube, kubeconfig)
}
