//! `provisionerd import` on a real API server, beside a running daemon, killed at each step and repeated.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Output;

use anyhow::ensure;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::Client;
use kube::api::ListParams;
use serde_json::json;
use testbed::{KillPlace, KillTally, wait_until};
use tokio::process::Command;

use crate::cluster::{
    self, DRIVER, TIMEOUT, TestDaemon, claims_api, create_object, kill_rounds, volumes_api, wait_object,
};

/// The steps of a copy and of a move.
pub(crate) const STEPS: [(&str, &[&str]); 2] = [
    ("copy", &["CreateDirectory", "SetLimits", "CopyTree", "RenameIntoPlace", "CreatePersistentVolume"]),
    ("move", &["MoveToImport", "LimitTree", "RenameIntoPlace", "CreatePersistentVolume"]),
];

/// Before and after each step, with its mode.
fn kill_moments() -> impl Iterator<Item = (&'static str, String)> {
    let steps = STEPS.iter().flat_map(|(mode, steps)| steps.iter().map(|step| (*mode, *step)));
    steps.flat_map(|(mode, step)| ["Before", "After"].map(|side| (mode, format!("{side} {step}"))))
}

/// Imports for the claims of a node whose daemon runs.
struct ImportFixture {
    client: Client,
    program: TestDaemon,
}

impl ImportFixture {
    /// A claim that no pod uses, and a directory with data for it.
    async fn create_claim(&self, name: &str) -> PathBuf {
        let claim = json!({
            "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Mi" } },
                "storageClassName": "nodekeel",
            },
        });
        let _: PersistentVolumeClaim = create_object(&claims_api(&self.client), claim).await;
        let source = self.program.base.path().join(format!("incoming-{name}"));
        fs::create_dir_all(source.join("below")).expect("a directory");
        fs::write(source.join("below/file"), name).expect("a file");
        source
    }

    async fn import(&self, (name, mode): (&str, &str), source: &PathBuf, kill_at: Option<&str>) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
        command.args(["import", "--claim", &format!("default/{name}"), "--driver", DRIVER]);
        command.args((mode == "move").then_some("--move")).arg(source);
        command.arg("--directory").arg(self.program.base.path()).args(["--node", &self.program.node]);
        command.arg("--kubeconfig").arg(&self.program.kubeconfig);
        command.env_clear().env("PROVISIONERD_BOOKS", self.program.quota_dir.path());
        command.envs(kill_at.map(|moment| ("PROVISIONERD_KILL_AT", moment)));
        command.output().await.expect("provisionerd runs")
    }

    async fn import_killed_at(&self, mode: &str, moment: &str, round: usize) {
        let name = format!("{mode}-{}-{round}", moment.replace(' ', "-").to_lowercase());
        let source = self.create_claim(&name).await;
        let killed = self.import((&name, mode), &source, Some(moment)).await;
        assert_eq!(killed.status.signal(), Some(9), "{name}: {}", String::from_utf8_lossy(&killed.stderr));
        let done = self.import((&name, mode), &source, None).await;
        assert!(done.status.success(), "{name}: {}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(source.exists(), mode == "copy", "{name}");
        self.assert_bound(&name).await;
    }

    /// The claim is bound to a volume with the data.
    async fn assert_bound(&self, name: &str) {
        let is_bound = |claim: Option<&PersistentVolumeClaim>| {
            claim.and_then(|claim| claim.status.as_ref()?.phase.as_deref()) == Some("Bound")
        };
        let claim = wait_object(&claims_api(&self.client), name, is_bound).await.expect("it exists");
        let volume = claim.spec.and_then(|spec| spec.volume_name).expect("a volume");
        let file = self.program.base.path().join("volumes").join(&volume).join("below/file");
        assert_eq!(fs::read_to_string(file).expect("the data"), name);
        let object = volumes_api(&self.client).get(&volume).await.expect("a PersistentVolume");
        let policy = object.spec.and_then(|spec| spec.persistent_volume_reclaim_policy);
        assert_eq!(policy.as_deref(), Some("Retain"), "{name}");
    }
}

#[test]
#[ignore = "needs kube"]
fn an_import_killed_at_each_step_binds_the_claim_to_the_data_once() {
    let kube = cluster::start_control_plane();
    let kubeconfig = cluster::account_kubeconfig(&kube);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let program = TestDaemon::new(&kubeconfig, "importer".to_owned());
        let _daemon = program.start(&[]);
        let identity = program.base.path().join("store-id");
        let is_served = || {
            ensure!(identity.exists(), "the store has no identity yet");
            Ok(())
        };
        tokio::task::block_in_place(|| wait_until(TIMEOUT, "the daemon to serve its store", is_served))
            .unwrap_or_else(|error| panic!("{error:#}: {}", program.log_text()));
        let site = ImportFixture { client: cluster::admin_client(&kube).await, program };
        let mut tally = KillTally::default();
        for round in 0..kill_rounds() {
            for (mode, moment) in kill_moments() {
                site.import_killed_at(mode, &moment, round).await;
                tally.record(KillPlace::Host, &moment);
            }
        }
        let count = tally.count_at(KillPlace::Host);
        let volumes = volumes_api(&site.client).list(&ListParams::default()).await.expect("a list");
        assert_eq!(volumes.items.len(), count, "one for each claim");
        assert_eq!(site.program.list_names("volumes").len(), count);
        assert_eq!(site.program.list_names(".import"), Vec::<String>::new(), "nothing is left");
        assert_eq!(site.program.project_names().len(), count, "no project leaks");
        tally.print_lines();
    });
}

#[test]
#[ignore = "needs kube"]
fn a_claim_that_a_pod_has_used_is_rejected_with_its_volume() {
    let kube = cluster::start_control_plane();
    let kubeconfig = cluster::account_kubeconfig(&kube);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let program = TestDaemon::new(&kubeconfig, "importer".to_owned());
        let _daemon = program.start(&[]);
        let site = ImportFixture { client: cluster::admin_client(&kube).await, program };
        let source = site.create_claim("used").await;
        let selected = json!({ "metadata": { "annotations": {
            "volume.kubernetes.io/selected-node": "importer",
        } } });
        let (claims, params) = (claims_api(&site.client), kube::api::PatchParams::default());
        claims.patch("used", &params, &kube::api::Patch::Merge(selected)).await.expect("a scheduler's patch");
        let is_bound = |claim: Option<&PersistentVolumeClaim>| {
            claim.and_then(|claim| claim.status.as_ref()?.phase.as_deref()) == Some("Bound")
        };
        wait_object(&claims, "used", is_bound).await;
        for mode in ["copy", "move"] {
            let output = site.import(("used", mode), &source, None).await;
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                !output.status.success() && message.contains("the claim already has volume"),
                "{message}"
            );
            assert!(message.contains("create another claim"), "{message}");
            assert_eq!(fs::read_to_string(source.join("below/file")).expect("unchanged"), "used");
        }
    });
}
