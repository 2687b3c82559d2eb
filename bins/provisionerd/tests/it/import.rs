//! `provisionerd import` on a real API server, next to a running daemon, killed at each step and repeated.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Output;

use anyhow::ensure;
use kube::Client;
use kube::api::ListParams;
use nodekeel_provisioner::SELECTED_NODE;
use serde_json::json;
use testbed::{KillPlace, KillTally, wait_until};

use crate::client_cluster::{
    TIMEOUT, TestDaemon, claim_manifest, create_claim, kill_rounds, patch_claim, run_with_daemon,
    volumes_api, wait_bound,
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
        create_claim(&self.client, claim_manifest(name, None, json!({}))).await;
        let source = self.program.base.path().join(format!("incoming-{name}"));
        fs::create_dir_all(source.join("below")).expect("a directory");
        fs::write(source.join("below/file"), name).expect("a file");
        source
    }

    async fn import(&self, name: &str, mode: &str, source: &PathBuf, kill_at: Option<&str>) -> Output {
        let mut command = self.program.command(&["import", "--claim", &format!("default/{name}")]);
        command.args((mode == "move").then_some("--move")).arg(source);
        command.envs(kill_at.map(|moment| ("PROVISIONERD_KILL_AT", moment)));
        command.output().await.expect("provisionerd runs")
    }

    async fn import_killed_at(&self, mode: &str, moment: &str, round: usize) {
        let name = format!("{mode}-{}-{round}", moment.replace(' ', "-").to_lowercase());
        let source = self.create_claim(&name).await;
        let killed = self.import(&name, mode, &source, Some(moment)).await;
        assert_eq!(killed.status.signal(), Some(9), "{name}: {}", String::from_utf8_lossy(&killed.stderr));
        let done = self.import(&name, mode, &source, None).await;
        assert!(done.status.success(), "{name}: {}", String::from_utf8_lossy(&done.stderr));
        assert_eq!(source.exists(), mode == "copy", "{name}");
        self.assert_bound(&name).await;
    }

    /// The claim is bound to a volume with the data.
    async fn assert_bound(&self, name: &str) {
        let claim = wait_bound(&self.client, name).await;
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
    run_with_daemon("importer", async |client, program| {
        let _daemon = program.start(&[]);
        let identity = program.base.path().join("store-id");
        let is_served = || {
            ensure!(identity.exists(), "the store has no identity yet");
            Ok(())
        };
        tokio::task::block_in_place(|| wait_until(TIMEOUT, "the daemon to serve its store", is_served))
            .unwrap_or_else(|error| panic!("{error:#}: {}", program.log_text()));
        let site = ImportFixture { client, program };
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
    run_with_daemon("importer", async |client, program| {
        let _daemon = program.start(&[]);
        let site = ImportFixture { client, program };
        let source = site.create_claim("used").await;
        // As a scheduler does.
        let selected = json!({ "metadata": { "annotations": { SELECTED_NODE: "importer" } } });
        patch_claim(&site.client, "used", selected).await;
        wait_bound(&site.client, "used").await;
        for mode in ["copy", "move"] {
            let output = site.import("used", mode, &source, None).await;
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
