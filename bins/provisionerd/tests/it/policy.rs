//! The admission policy of `deploy/policy`, as the API server understands it.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testbed::{Kube, Scratch, output, wait_until};

use crate::cluster::{self, DRIVER, PATIENCE};

const ACCOUNT: &str = "system:serviceaccount:nodekeel:provisionerd";
const POLICY: &str = "provisionerd-own-node";
const VOLUME: &str = include_str!("../../../../provisioner/testdata/manifests/plain.json");

struct Site {
    kube: Kube,
    scratch: Scratch,
}

impl Site {
    fn start() -> Self {
        let kube = cluster::start();
        kube.apply(include_str!("../../../../deploy/policy/own-node.yaml")).expect("the policy");
        let site = Self { kube, scratch: Scratch::new().expect("a directory") };
        // It holds once the API server has seen its own object.
        let is_in_force = || {
            let foreign = site.create("node-a", &volume("probe", DRIVER, &["node-b"]), "--dry-run=server");
            let said = format!("{:#}", foreign.err().context("a foreign volume would be taken")?);
            ensure!(said.contains(POLICY), "{said}");
            Ok(())
        };
        wait_until(PATIENCE, "the policy to be in force", is_in_force).expect("it comes");
        site
    }

    /// provisionerd's account, by a token that was given to a pod of this node; "" is a token of no node.
    fn of_node(&self, node: &str) -> Command {
        let mut kubectl = self.kube.kubectl();
        kubectl.args([
            "--as",
            ACCOUNT,
            "--as-group=system:serviceaccounts",
            "--as-group=system:authenticated",
        ]);
        if !node.is_empty() {
            kubectl.arg(format!("--as-user-extra=authentication.kubernetes.io/node-name={node}"));
        }
        kubectl
    }

    fn create(&self, node: &str, object: &Value, how: &str) -> Result<String> {
        let file = self.scratch.path().join("object.json");
        fs::write(&file, object.to_string())?;
        output(self.of_node(node).args(["create", "--validate=false", how, "--filename"]).arg(file))
    }

    fn patch(&self, node: &str, kind: &str, name: &str, patch: &Value) -> Result<String> {
        output(self.of_node(node).args(["patch", kind, name, "--type=merge", "--patch", &patch.to_string()]))
    }

    fn delete(&self, node: &str, name: &str) -> Result<String> {
        output(self.of_node(node).args(["delete", "persistentvolume", name, "--wait=false"]))
    }
}

/// A volume as the provisioner makes it, of this driver and on these nodes.
fn volume(name: &str, driver: &str, nodes: &[&str]) -> Value {
    let mut volume: Value = serde_json::from_str(VOLUME).expect("JSON");
    volume["metadata"]["name"] = name.into();
    volume["spec"]["csi"]["driver"] = driver.into();
    let terms = &mut volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    terms[0]["matchExpressions"][0]["values"] = nodes.into();
    volume
}

fn assert_refused(tried: Result<String>, why: &str) {
    let said = format!("{:#}", tried.expect_err("the policy refuses it"));
    assert!(said.contains(POLICY) && said.contains(why), "{said}");
}

const FOREIGN: &str = "not one of this driver on this node alone";

#[test]
#[ignore = "needs kube"]
fn an_account_on_one_node_can_not_touch_the_volumes_of_another() {
    let site = Site::start();
    let finalizers = |list: &[&str]| json!({ "metadata": { "finalizers": list } });
    for node in ["node-a", "node-b"] {
        site.create(node, &volume(&format!("of-{node}"), DRIVER, &[node]), "--output=name").expect("its own");
    }
    let other = volume("other", DRIVER, &["node-a", "node-b"]);
    assert_refused(site.create("node-a", &other, "--output=name"), FOREIGN);
    let mut nowhere = other.clone();
    nowhere["spec"]["nodeAffinity"] = Value::Null;
    assert_refused(site.create("node-a", &nowhere, "--output=name"), FOREIGN);
    let driver = volume("other", "foreign.example", &["node-a"]);
    assert_refused(site.create("node-a", &driver, "--output=name"), FOREIGN);
    assert_refused(site.create("", &volume("other", DRIVER, &["node-a"]), "--output=name"), "names no node");

    assert_refused(site.patch("node-a", "persistentvolume", "of-node-b", &finalizers(&[])), FOREIGN);
    assert_refused(site.delete("node-a", "of-node-b"), FOREIGN);
    assert_refused(site.delete("", "of-node-a"), "names no node");
    site.patch("node-a", "persistentvolume", "of-node-a", &finalizers(&[])).expect("its own");
    site.delete("node-a", "of-node-a").expect("its own");
    // Everybody else is none of its business.
    site.kube.create(&other.to_string()).expect("the admin's");
    site.kube.delete("persistentvolume", "of-node-b").expect("the admin's");
}

#[test]
#[ignore = "needs kube"]
fn of_a_claim_an_account_changes_its_own_nodes_selection_alone() {
    const ONLY_NODE: &str = "only its selected node may be changed";
    let site = Site::start();
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "claim", "namespace": "default" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } },
    });
    site.kube.create(&claim.to_string()).expect("a claim");
    let select = |by: &str, node: Option<&str>| {
        let patch = json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": node } } });
        site.patch(by, "persistentvolumeclaim", "claim", &patch)
    };
    assert_refused(select("node-a", Some("node-b")), ONLY_NODE);
    select("node-a", Some("node-a")).expect("its own");
    assert_refused(select("node-b", None), ONLY_NODE);
    assert_refused(select("node-b", Some("node-b")), ONLY_NODE);
    assert_refused(select("", None), "names no node");
    select("node-a", None).expect("its own");
    let bound = json!({ "spec": { "volumeName": "another" } });
    assert_refused(site.patch("node-a", "persistentvolumeclaim", "claim", &bound), ONLY_NODE);
}

#[test]
#[ignore = "needs kube"]
fn its_expressions_fit_the_types_that_they_are_about() {
    let site = Site::start();
    let is_checked = |policy: &Value| !policy["status"]["observedGeneration"].is_null();
    let policy = site.kube.until("validatingadmissionpolicy", POLICY, is_checked);
    let policy = policy.expect("the controller manager has looked");
    let warnings = &policy["status"]["typeChecking"]["expressionWarnings"];
    assert!(warnings.is_null(), "{warnings}");
}
