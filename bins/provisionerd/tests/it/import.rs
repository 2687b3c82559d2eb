//! `provisionerd import` on a real API server, next to a running daemon, killed at each step and repeated.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Output;

use nodekeel_provisioner::SELECTED_NODE;
use serde_json::json;
use testbed::{KillPlace, KillTally, Kube, wait_until};

use crate::cluster::{
    TIMEOUT, TestDaemon, claim_manifest, create, kill_rounds, list_names, moments_of, start_control_plane,
    wait_bound,
};

pub(crate) const COPY_STEPS: [&str; 5] =
    ["CreateDirectory", "SetLimits", "CopyTree", "RenameIntoPlace", "CreatePersistentVolume"];
pub(crate) const MOVE_STEPS: [&str; 4] =
    ["MoveToImport", "LimitTree", "RenameIntoPlace", "CreatePersistentVolume"];

/// Creates a claim that no pod uses, and a directory with data for it.
fn create_claim(kube: &Kube, daemon: &TestDaemon, name: &str) -> PathBuf {
    create(kube, &claim_manifest(name, None, json!({})));
    let source = daemon.base.path().join(format!("incoming-{name}"));
    fs::create_dir_all(source.join("below")).expect("a directory");
    fs::write(source.join("below/file"), name).expect("a file");
    source
}

fn import(daemon: &TestDaemon, name: &str, mode: &str, source: &Path, kill_at: Option<&str>) -> Output {
    let mut command = daemon.command(&["import", "--claim", &format!("default/{name}")]);
    command.args((mode == "move").then_some("--move")).arg(source);
    command.envs(kill_at.map(|moment| ("PROVISIONERD_KILL_AT", moment)));
    command.output().expect("provisionerd runs")
}

#[test]
#[ignore = "sampled: needs kube"]
fn an_import_killed_at_each_step_binds_the_claim_to_the_data_once() {
    let kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "importer");
    let _running = daemon.start(&[], &[]);
    wait_until(TIMEOUT, "the store to be served", || Ok(fs::metadata(daemon.base.path().join("store-id"))?))
        .unwrap();
    let (mut tally, mut count) = (KillTally::default(), 0);
    for round in 0..kill_rounds() {
        for (mode, steps) in [("copy", &COPY_STEPS[..]), ("move", &MOVE_STEPS)] {
            for moment in moments_of(steps) {
                let name = format!("{mode}-{}-{round}", moment.replace(' ', "-").to_lowercase());
                let source = create_claim(&kube, &daemon, &name);
                let killed = import(&daemon, &name, mode, &source, Some(&moment));
                assert_eq!(killed.status.signal(), Some(9), "{name}: {killed:?}");
                let done = import(&daemon, &name, mode, &source, None);
                assert!(done.status.success(), "{name}: {done:?}");
                assert_eq!(source.exists(), mode == "copy", "{name}");
                let volume = wait_bound(&kube, &name);
                let file = daemon.file_of(&volume).with_file_name("below/file");
                assert_eq!(fs::read_to_string(file).expect("the data"), name);
                let object = kube.get_object("pv", &volume).expect("a PersistentVolume");
                assert_eq!(object["spec"]["persistentVolumeReclaimPolicy"], "Retain", "{name}");
                tally.record(KillPlace::Host, &moment);
                count += 1;
            }
        }
    }
    assert_eq!(kube.list_objects("pv").expect("a list").len(), count, "one for each claim");
    assert_eq!(daemon.list_names("volumes").len(), count);
    assert_eq!(daemon.list_names(".import"), Vec::<String>::new(), "nothing is left");
    assert_eq!(list_names(daemon.limits.path()).len(), count, "no project leaks");
    tally.print_lines();
}

#[test]
#[ignore = "sampled: needs kube"]
fn a_claim_that_a_pod_has_used_is_rejected_with_its_volume() {
    let kube = start_control_plane();
    let daemon = TestDaemon::new(&kube, "importer");
    let _running = daemon.start(&[], &[]);
    let source = create_claim(&kube, &daemon, "used");
    // As a scheduler does.
    let selected = json!({ "metadata": { "annotations": { SELECTED_NODE: "importer" } } });
    kube.patch_object("pvc", "used", &selected).expect("a patch");
    wait_bound(&kube, "used");
    for mode in ["copy", "move"] {
        let output = import(&daemon, "used", mode, &source, None);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains("the claim already has volume"), "{message}");
        assert!(message.contains("create another claim"), "{message}");
        assert_eq!(fs::read_to_string(source.join("below/file")).expect("unchanged"), "used");
    }
}
