//! What each principal can do at most, tried on a real API server with the tokens that it would have: `deploy/README.md` has the
//! table.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use nodekeel_provisioner::{DriverName, SELECTED_NODE, STORAGE_PROVISIONER};
use serde_json::{Value, json};
use testbed::{FakeNode, Kube, ScratchDir, SharedKube, command_output, merge_patch};
use tokio::runtime::Runtime;

use crate::accounts;
use crate::cluster::{self, DRIVER, TIMEOUT, claim_manifest};

mod with_daemon;

const DEPLOY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy");
const VOLUME: &str = include_str!("../../../../provisioner/testdata/manifests/plain.json");

/// Classes of another driver, and one of this with immediate binding.
const CLASSES: &str = "
{ apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: { name: other }, provisioner: other.example,
  volumeBindingMode: WaitForFirstConsumer }
---
{ apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: { name: now }, provisioner: volumes.nodekeel }
";

/// Objects that no token may change.
const PROBE_CLAIM: &str = r#"{
    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "probe", "namespace": "default" },
    "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } },
              "storageClassName": "none" }
}"#;
const PROBE_SNAPSHOT: &str = r#"{
    "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent", "metadata": { "name": "probe" },
    "spec": { "deletionPolicy": "Delete", "driver": "other.example", "source": { "volumeHandle": "v" },
              "volumeSnapshotRef": { "name": "probe", "namespace": "default" } }
}"#;

/// A control plane with all permissions and policies of `deploy/`, and two nodes with the driver.
fn start_control_plane() -> Kube {
    let kube = cluster::start_control_plane();
    cluster::install_snapshot_api(&kube);
    for manifests in
        [include_str!("../../../../deploy/agent/remove-volumes.yaml"), CLASSES, PROBE_CLAIM, PROBE_SNAPSHOT]
    {
        kube.apply_manifests(manifests).expect("the manifests");
    }
    let policies = format!("{DEPLOY}/policy");
    command_output(kube.kubectl_command().args(["apply", "--kustomize", &policies])).expect("the policies");
    for node in ["node-a", "node-b"] {
        kube.create_fake_node(&FakeNode::new(node).with_driver(DRIVER)).expect("a node");
    }
    kube
}

fn test_runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn shared_kube() -> Arc<Kube> {
    static SHARED: SharedKube = SharedKube::new();
    SHARED.get_or_start(start_control_plane)
}

/// Whoever has one of the tokens.
struct Principal {
    client: Client,
    kubeconfig: PathBuf,
    _home: ScratchDir,
}

impl Principal {
    /// The token of a pod with this account on a node, as its kubelet gets it. The pod is new.
    async fn of_pod(kube: &Kube, account: &str, node: &str, pod: &str) -> Self {
        let manifest = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": pod, "namespace": "nodekeel" },
            "spec": { "nodeName": node, "serviceAccountName": account, "containers": [{ "name": "c", "image": "none" }] },
        });
        kube.create_objects(&manifest.to_string()).expect("a pod");
        let mut kubectl = kube.kubectl_command();
        kubectl.args(["create", "token", account, "--namespace=nodekeel", "--bound-object-kind=Pod"]);
        let token = command_output(kubectl.args(["--bound-object-name", pod])).expect("a token");
        let config =
            fs::read_to_string(kube.kubeconfig_file("admin").expect("a user")).expect("a kubeconfig");
        let mut config: Value = serde_json::from_str(&config).expect("JSON");
        config["users"][0]["user"]["token"] = token.trim().into();
        config["contexts"][0]["context"]["namespace"] = "nodekeel".into();
        let home = ScratchDir::new().expect("a directory");
        let kubeconfig = home.path().join("kubeconfig");
        fs::write(&kubeconfig, config.to_string()).expect("a kubeconfig");
        let file = Kubeconfig::read_from(&kubeconfig).expect("a kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("a configuration")).expect("a client");
        Self { client, kubeconfig, _home: home }
    }

    /// The token of provisionerd on `node-a`, once the API server enforces each policy of it, with its parameters.
    async fn of_node(kube: &Kube, pod: &str) -> Self {
        let node = Self::of_pod(kube, "provisionerd", "node-a", pod).await;
        for (object, why) in [
            (volume("0001", json!({ "spec": { "nodeAffinity": null } })), FOREIGN),
            (volume("0001", json!({ "spec": { "storageClassName": "other" } })), OTHER_CLASS),
            (capacity(json!({ "nodeTopology": null })), "the capacity is not one of this driver"),
            (event("claim", json!({ "reportingController": "kubelet" })), "not in the name of this driver"),
        ] {
            wait_until_denied(async || node.try_create(&object).await, why).await;
        }
        let labels = json!({ "metadata": { "labels": { "a": "b" } } });
        for (probe, why) in [(PROBE_CLAIM, "owners, finalizers"), (PROBE_SNAPSHOT, "not one of this driver")]
        {
            let probe: Value = serde_json::from_str(probe).expect("JSON");
            wait_until_denied(async || node.try_patch(&probe, labels.clone()).await, why).await;
        }
        node
    }

    fn api_of(&self, object: &Value) -> Api<DynamicObject> {
        api_of(&self.client, object)
    }

    /// Creates an object, without storing it.
    async fn try_create(&self, object: &Value) -> Result<(), String> {
        let parsed: DynamicObject = serde_json::from_value(object.clone()).expect("an object");
        let params = PostParams { dry_run: true, ..PostParams::default() };
        self.api_of(object).create(&params, &parsed).await.map(drop).map_err(|error| error.to_string())
    }

    async fn create(&self, object: &Value) {
        let parsed: DynamicObject = serde_json::from_value(object.clone()).expect("an object");
        self.api_of(object).create(&PostParams::default(), &parsed).await.expect("it is allowed");
    }

    /// Patches an object, without storing it.
    async fn try_patch(&self, object: &Value, patch: Value) -> Result<(), String> {
        let (name, params) = (object_name(object), PatchParams { dry_run: true, ..PatchParams::default() });
        let patched = self.api_of(object).patch(name, &params, &Patch::Merge(patch)).await;
        patched.map(drop).map_err(|error| error.to_string())
    }

    /// The same for its status.
    async fn try_patch_status(&self, object: &Value, status: Value) -> Result<(), String> {
        let (name, params) = (object_name(object), PatchParams { dry_run: true, ..PatchParams::default() });
        let patch = Patch::Merge(json!({ "status": status }));
        let patched = self.api_of(object).patch_status(name, &params, &patch).await;
        patched.map(drop).map_err(|error| error.to_string())
    }

    async fn try_delete(&self, object: &Value) -> Result<(), String> {
        let params = DeleteParams { dry_run: true, ..DeleteParams::default() };
        let deleted = self.api_of(object).delete(object_name(object), &params).await;
        deleted.map(drop).map_err(|error| error.to_string())
    }
}

/// Waits until the API server has observed a policy, and its parameters.
async fn wait_until_denied(tried: impl AsyncFn() -> Result<(), String>, why: &str) {
    let mut last: Result<(), String> = Ok(());
    let wait = async {
        while !last.as_ref().is_err_and(|error| error.contains(why)) {
            last = tried().await;
        }
    };
    let waited = tokio::time::timeout(TIMEOUT, wait).await;
    assert!(waited.is_ok(), "not in force: {why}: {last:?}");
}

fn api_of(client: &Client, object: &Value) -> Api<DynamicObject> {
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let (api_version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
    let (group, version) = api_version.rsplit_once('/').unwrap_or(("", &api_version));
    let plural = match kind.as_str() {
        "CSIStorageCapacity" => "csistoragecapacities".to_owned(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    let (group, version) = (group.to_owned(), version.to_owned());
    let resource = ApiResource { group, version, api_version, kind, plural };
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

fn object_name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().expect("a name")
}

#[track_caller]
fn assert_denied(tried: Result<(), String>, why: &str, what: &Value) {
    let error = tried.expect_err(&format!("{why}: {what}"));
    assert!(error.contains(why), "{why}: {what}: {error}");
}

#[track_caller]
fn assert_allowed(tried: Result<(), String>, what: &Value) {
    tried.unwrap_or_else(|error| panic!("{what}: {error}"));
}

const FOREIGN: &str = "the volume is not one of this driver on this node alone";
const OTHER_CLASS: &str = "the object names a storage class of another driver";

fn with(mut object: Value, change: Value) -> Value {
    merge_patch(&mut object, change);
    object
}

/// The UID with these last digits.
fn uid(digits: &str) -> String {
    format!("9f0e5d3c-1b2a-4c5d-8e6f-00000000{digits}")
}

/// A volume of `node-a` for the claim with this UID, as provisionerd creates it; then changed.
fn volume(digits: &str, change: Value) -> Value {
    let mut volume: Value = serde_json::from_str(VOLUME).expect("JSON");
    let key = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
    let id = format!("pvc-{}", uid(digits));
    let ours = json!({
        "metadata": { "name": id, "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER } },
        "spec": {
            "storageClassName": "nodekeel",
            "csi": { "driver": DRIVER, "volumeHandle": id },
            "claimRef": { "name": format!("claim-{digits}"), "uid": uid(digits) },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [
                { "matchExpressions": [{ "key": key, "operator": "In", "values": ["node-a"] }] },
            ] } },
        },
    });
    merge_patch(&mut volume, ours);
    with(volume, change)
}

/// The capacity of `node-a` for the class `nodekeel`, as provisionerd creates it; then changed.
fn capacity(change: Value) -> Value {
    let key = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
    let owner = json!({ "apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": uid("0000") });
    let object = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity",
        "metadata": { "name": "csisc-1", "namespace": "nodekeel", "ownerReferences": [owner], "labels": {
            "csi.storage.k8s.io/drivername": DRIVER, "csi.storage.k8s.io/managed-by": "node-a",
        } },
        "storageClassName": "nodekeel", "nodeTopology": { "matchLabels": { key: "node-a" } },
        "capacity": "1Gi", "maximumVolumeSize": "1Gi",
    });
    with(object, change)
}

/// An event of provisionerd on `node-a` about a claim; then changed.
fn event(claim: &str, change: Value) -> Value {
    let object = json!({
        "apiVersion": "events.k8s.io/v1", "kind": "Event",
        "metadata": { "name": format!("{claim}.1"), "namespace": "default" },
        "action": "Provision", "reason": "ProvisioningFailed", "type": "Warning", "note": "why",
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "regarding": {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": claim, "uid": uid("0001"),
        },
        "reportingController": DRIVER, "reportingInstance": "node-a",
    });
    with(object, change)
}

/// Creates a claim as its author does, and returns it as it was stored.
fn create_claim(kube: &Kube, name: &str, class: &str, change: Value) -> Value {
    let claim = claim_manifest(name, None, json!({ "spec": { "storageClassName": class } }));
    kube.create_objects(&with(claim, change).to_string()).expect("a claim")
}

/// A volume for a claim that exists.
fn volume_of(claim: &Value, change: Value) -> Value {
    let (name, uid) = (object_name(claim), claim["metadata"]["uid"].as_str().expect("a UID"));
    let id = format!("pvc-{uid}");
    let ours = json!({
        "metadata": { "name": id },
        "spec": { "csi": { "volumeHandle": id }, "claimRef": { "name": name, "uid": uid } },
    });
    with(volume("0000", ours), change)
}

#[test]
#[ignore = "needs kube"]
fn a_nodes_token_opens_no_secret_to_its_kubelet() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "secret-thief").await;
        // A claim of another driver is bound, and used by a pod on the node.
        let claim = create_claim(&kube, "used", "other", json!({ "spec": { "volumeName": "of-other" } }));
        let of_other = volume_of(&claim, json!({
            "metadata": { "name": "of-other" }, "spec": { "csi": { "driver": "other.example" } },
        }));
        kube.create_objects(&of_other.to_string()).expect("a volume");
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "victim", "namespace": "default" },
            "spec": {
                "nodeName": "node-a", "containers": [{ "name": "c", "image": "none" }],
                "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "used" } }],
            },
        });
        kube.create_objects(&pod.to_string()).expect("a pod");
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "jewels", "namespace": "kube-system" },
        });
        kube.create_objects(&secret.to_string()).expect("a Secret");
        let reference = json!({ "namespace": "kube-system", "name": "jewels" });
        for field in [
            "controllerExpandSecretRef", "controllerPublishSecretRef", "nodeExpandSecretRef", "nodePublishSecretRef",
            "nodeStageSecretRef",
        ] {
            let change = json!({ "spec": { "csi": { field: reference.clone() } } });
            for object in [volume("0002", change.clone()), volume_of(&claim, change)] {
                assert_denied(node.try_create(&object).await, "such as a reference to a Secret", &object);
            }
        }
        // The API server lets a volume get this one later.
        let own = volume("0003", json!({}));
        node.create(&own).await;
        let expand = json!({ "spec": { "csi": { "controllerExpandSecretRef": reference } } });
        assert_denied(node.try_patch(&own, expand).await, "only its capacity", &own);

        let read_secret = |kubelet: bool| {
            let mut kubectl = kube.kubectl_command();
            if kubelet {
                kubectl.args(["--as=system:node:node-a", "--as-group=system:nodes"]);
            }
            command_output(kubectl.args(["get", "secret", "jewels", "--namespace=kube-system"]))
        };
        let error = format!("{:#}", read_secret(true).expect_err("no volume names the Secret"));
        assert!(error.contains("no relationship found between node 'node-a' and this object"), "{error}");
        read_secret(false).expect("it exists");
        assert_denied(node.try_delete(&secret).await, "cannot delete resource \"secrets\"", &secret);
    });
}

#[test]
#[ignore = "needs kube"]
fn a_nodes_token_writes_no_field_of_a_volume_that_provisionerd_does_not_set() {
    const FIELD: &str = "the volume has a field that provisionerd does not set";
    const METADATA: &str = "labels, owners, annotations or finalizers that provisionerd does not set";
    const CLAIM: &str = "not for the claim that its name is of";
    const CHANGE: &str = "of a volume, only its capacity";
    const MARK: &str = "of a volume, only the annotations and the finalizer of this driver";
    let kube = shared_kube();
    let owner = json!([{ "apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": uid("dead") }]);
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "volume-thief").await;
        for (change, why) in [
            (json!({ "spec": { "csi": { "readOnly": true } } }), FIELD),
            (json!({ "spec": { "csi": { "volumeAttributes": { "server": "evil" } } } }), FIELD),
            (json!({ "spec": { "mountOptions": ["_netdev"] } }), FIELD),
            (json!({ "spec": { "mountOptions": ["noexec,bind"] } }), FIELD),
            (json!({ "metadata": { "labels": { "topology.kubernetes.io/zone": "z" } } }), METADATA),
            (json!({ "metadata": { "annotations": { "pv.kubernetes.io/migrated-to": "other.example" } } }), METADATA),
            (json!({ "metadata": { "annotations": { "pv.kubernetes.io/provisioned-by": "other.example" } } }), METADATA),
            (json!({ "metadata": { "finalizers": ["example.org/held"] } }), METADATA),
            (json!({ "metadata": { "ownerReferences": owner } }), METADATA),
            (json!({ "spec": { "csi": { "volumeHandle": format!("pvc-{}", uid("0009")) } } }), "are not one id"),
            (json!({ "metadata": { "name": "data" }, "spec": { "csi": { "volumeHandle": "data" } } }), "are not one id"),
            // A claim that does not exist yet, any claim of the class, another claim, and an object of another kind.
            (json!({ "spec": { "claimRef": { "uid": null } } }), CLAIM),
            (json!({ "spec": { "claimRef": null } }), CLAIM),
            (json!({ "spec": { "claimRef": { "uid": uid("0009") } } }), CLAIM),
            (json!({ "spec": { "claimRef": { "kind": "Pod" } } }), CLAIM),
            (json!({ "spec": { "claimRef": null, "persistentVolumeReclaimPolicy": "Retain", "storageClassName": "" } }), CLAIM),
            (json!({ "spec": { "storageClassName": "other" } }), OTHER_CLASS),
        ] {
            let object = volume("0004", change);
            assert_denied(node.try_create(&object).await, why, &object);
        }
        for change in [
            json!({}),
            json!({ "spec": { "mountOptions": ["noexec,nosuid", "ro"], "volumeAttributesClassName": "gold" } }),
            // What `import` and `orphans` create.
            json!({ "metadata": { "annotations": { "volumes.nodekeel/imported-from": "/srv" } } }),
            json!({ "metadata": { "finalizers": null }, "spec": { "claimRef": null, "persistentVolumeReclaimPolicy": "Retain" } }),
            json!({ "spec": { "storageClassName": "" } }),
        ] {
            let object = volume("0004", change);
            assert_allowed(node.try_create(&object).await, &object);
        }
        let own = volume("0004", json!({}));
        node.create(&own).await;
        for (patch, why) in [
            (json!({ "spec": { "claimRef": { "name": "another", "uid": uid("0009") } } }), CHANGE),
            (json!({ "spec": { "claimRef": null } }), CHANGE),
            (json!({ "spec": { "mountOptions": ["noexec"] } }), CHANGE),
            (json!({ "spec": { "storageClassName": "other" } }), CHANGE),
            (json!({ "metadata": { "labels": { "a": "b" } } }), MARK),
            (json!({ "metadata": { "ownerReferences": owner } }), MARK),
            (json!({ "metadata": { "annotations": { "pv.kubernetes.io/provisioned-by": null } } }), MARK),
            (json!({ "metadata": { "annotations": { "example.org/x": "y" } } }), MARK),
            (json!({ "metadata": { "finalizers": ["example.org/held"] } }), MARK),
            (json!({ "metadata": { "finalizers": null } }), MARK),
        ] {
            assert_denied(node.try_patch(&own, patch.clone()).await, why, &patch);
        }
        for patch in [
            json!({ "spec": { "capacity": { "storage": "100Mi" } } }),
            json!({ "spec": { "volumeAttributesClassName": "gold" } }),
            json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } }),
            json!({ "metadata": { "annotations": { "volumes.nodekeel/condition": "abnormal" } } }),
            json!({ "metadata": { "finalizers": ["kubernetes.io/pv-protection"] } }),
        ] {
            assert_allowed(node.try_patch(&own, patch.clone()).await, &patch);
        }
        let retained = volume("0005", json!({ "spec": { "persistentVolumeReclaimPolicy": "Retain" } }));
        node.create(&retained).await;
        let delete = json!({ "spec": { "persistentVolumeReclaimPolicy": "Delete" } });
        assert_denied(node.try_patch(&retained, delete.clone()).await, CHANGE, &delete);
        assert_allowed(node.try_delete(&own).await, &own);
    });
}

#[test]
#[ignore = "needs kube"]
fn a_nodes_token_changes_each_volume_that_provisionerd_regards_as_its_nodes() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "volume-owner").await;
        let key = DriverName::try_new(DRIVER).expect("a driver name").topology_key();
        let on = |nodes: &[&str]| json!({ "key": key, "operator": "In", "values": nodes });
        let zone = json!({ "key": "topology.kubernetes.io/zone", "operator": "In", "values": ["node-a"] });
        let term = |expressions: &[&Value]| json!({ "matchExpressions": expressions });
        let here = on(&["node-a"]);
        let field = json!({ "key": "metadata.name", "operator": "In", "values": ["node-a"] });
        for (digits, terms, is_own) in [
            ("0010", json!([term(&[&zone, &here])]), true),
            ("0011", json!([{ "matchExpressions": [here], "matchFields": [field] }]), true),
            ("0012", json!([term(&[&zone])]), false),
            ("0013", json!([term(&[&zone, &on(&["node-b"])])]), false),
            ("0014", json!([term(&[&zone, &here]), term(&[&on(&["node-b"])])]), false),
            ("0015", json!([term(&[&zone, &on(&["node-a", "node-b"])])]), false),
        ] {
            let object = volume(
                digits,
                json!({ "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": terms } } } }),
            );
            assert_denied(node.try_create(&object).await, FOREIGN, &object);
            kube.create_objects(&object.to_string()).expect("the operator's");
            let mark = json!({ "metadata": { "annotations": { "volumes.nodekeel/condition": "abnormal" } } });
            for tried in [node.try_patch(&object, mark).await, node.try_delete(&object).await] {
                match is_own {
                    true => assert_allowed(tried, &object),
                    false => assert_denied(tried, FOREIGN, &object),
                }
            }
        }
    });
}

#[test]
#[ignore = "needs kube"]
fn a_nodes_token_selects_its_node_only_for_claims_that_no_scheduler_places() {
    const ONLY_SCHEDULER: &str = "only the scheduler selects the node";
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "claim-thief").await;
        let select = |node: Option<&str>| json!({ "metadata": { "annotations": { SELECTED_NODE: node } } });
        let provisioner = json!({ "metadata": { "annotations": { STORAGE_PROVISIONER: DRIVER } } });
        let foreign = create_claim(&kube, "foreign", "other", json!({}));
        assert_denied(node.try_patch(&foreign, select(Some("node-a"))).await, "of another driver", &foreign);
        // Also if its author says that it is one of this driver.
        let forged = create_claim(&kube, "forged", "other", provisioner.clone());
        assert_denied(node.try_patch(&forged, select(Some("node-a"))).await, OTHER_CLASS, &forged);
        let waiting = create_claim(&kube, "waiting", "nodekeel", provisioner);
        assert_denied(node.try_patch(&waiting, select(Some("node-a"))).await, ONLY_SCHEDULER, &waiting);
        let now = create_claim(&kube, "now", "now", json!({}));
        let is_known = |claim: &Value| claim["metadata"]["annotations"][STORAGE_PROVISIONER] == DRIVER;
        kube.wait_for_object("pvc", "default/now", is_known).expect("the volume controller names the driver");
        assert_allowed(node.try_patch(&now, select(Some("node-a"))).await, &now);
        assert_denied(node.try_patch(&now, select(Some("node-b"))).await, "from none to this node", &now);
        let placed = create_claim(
            &kube,
            "placed",
            "nodekeel",
            json!({
                "metadata": { "annotations": { STORAGE_PROVISIONER: DRIVER, SELECTED_NODE: "node-a" } },
            }),
        );
        assert_allowed(node.try_patch(&placed, select(None)).await, &placed);
        assert_denied(node.try_delete(&placed).await, "cannot delete resource", &placed);

        // What it writes of a bound claim is what a resize changes.
        node.create(&volume_of(&placed, json!({}))).await;
        let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
        kube.wait_for_object("pvc", "default/placed", is_bound).expect("it is bound");
        let condition = |kind: &str| json!({ "conditions": [{ "type": kind, "status": "True" }] });
        for status in [
            condition("Resizing"),
            json!({ "capacity": { "storage": "2Mi" }, "allocatedResources": { "storage": "2Mi" } }),
        ] {
            assert_allowed(node.try_patch_status(&placed, status.clone()).await, &status);
        }
        for status in [condition("example.org/x"), json!({ "phase": "Lost" }), json!({ "accessModes": null })]
        {
            assert_denied(node.try_patch_status(&placed, status.clone()).await, "only what resizes", &status);
        }
    });
}

#[test]
#[ignore = "needs kube"]
fn a_nodes_token_offers_only_the_capacity_of_its_node_to_classes_of_its_driver() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "capacity-thief").await;
        let owner = |change: Value| {
            let owner = json!({ "apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": uid("0000") });
            json!({ "metadata": { "ownerReferences": [with(owner, change)] } })
        };
        for (change, why) in [
            (json!({ "storageClassName": "other" }), OTHER_CLASS),
            (
                json!({ "nodeTopology": { "matchLabels": { "topology.volumes.nodekeel/node": "node-b" } } }),
                "this node alone",
            ),
            (json!({ "metadata": { "labels": { "example.org/x": "y" } } }), "this node alone"),
            (json!({ "metadata": { "annotations": { "example.org/x": "y" } } }), "this node alone"),
            (json!({ "metadata": { "finalizers": ["example.org/held"] } }), "this node alone"),
            (owner(json!({ "name": "node-b" })), "this node alone"),
            (owner(json!({ "blockOwnerDeletion": true })), "this node alone"),
            (json!({ "metadata": { "namespace": "default" } }), "cannot create resource"),
        ] {
            let object = capacity(change);
            assert_denied(node.try_create(&object).await, why, &object);
        }
        // Without an owner, which would have to exist.
        let own = capacity(json!({ "metadata": { "ownerReferences": null } }));
        node.create(&own).await;
        assert_allowed(
            node.try_patch(&own, json!({ "capacity": "2Gi", "maximumVolumeSize": "2Gi" })).await,
            &own,
        );
        let finalizers = json!({ "metadata": { "finalizers": ["example.org/held"] } });
        assert_denied(node.try_patch(&own, finalizers).await, "this node alone", &own);
        assert_allowed(node.try_delete(&own).await, &own);
    });
}

#[test]
#[ignore = "needs kube"]
fn what_others_add_to_a_capacity_does_not_keep_its_node_from_updating_it() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "capacity-owner").await;
        let own = capacity(json!({ "metadata": { "name": "csisc-2", "ownerReferences": null } }));
        node.create(&own).await;
        // The garbage collector removes owners that do not exist.
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "tool", "namespace": "nodekeel" },
        });
        let owners = [
            kube.create_objects(&map.to_string()).expect("a ConfigMap"),
            kube.get_object("node", "node-a").expect("a node"),
        ];
        let [tool, of_node] = owners.map(|it| {
            let (name, uid) = (&it["metadata"]["name"], &it["metadata"]["uid"]);
            json!({ "apiVersion": "v1", "kind": it["kind"], "name": name, "uid": uid })
        });
        let foreign = json!({ "metadata": {
            "labels": { "example.org/x": "y" }, "annotations": { "example.org/x": "y" },
            "finalizers": ["example.org/held"], "ownerReferences": [tool, of_node],
        } });
        kube.patch_object("csistoragecapacity", "nodekeel/csisc-2", &foreign).expect("the tool's");
        for patch in [
            json!({ "capacity": "2Gi", "maximumVolumeSize": "2Gi" }),
            // As provisionerd writes it.
            json!({ "capacity": "2Gi", "metadata": { "ownerReferences": [of_node], "labels": own["metadata"]["labels"] } }),
        ] {
            assert_allowed(node.try_patch(&own, patch.clone()).await, &patch);
        }
        for metadata in [
            json!({ "labels": { "example.org/x": "z" } }),
            json!({ "labels": { "example.org/x": null } }),
            json!({ "labels": { "example.org/new": "y" } }),
            json!({ "labels": { "csi.storage.k8s.io/managed-by": "node-b" } }),
            json!({ "annotations": { "example.org/x": null } }),
            json!({ "annotations": { "example.org/new": "y" } }),
            json!({ "finalizers": null }),
            json!({ "finalizers": ["example.org/held", "example.org/new"] }),
            json!({ "ownerReferences": [with(tool.clone(), json!({ "name": "another" })), of_node] }),
            json!({ "ownerReferences": [tool, with(of_node.clone(), json!({ "blockOwnerDeletion": true }))] }),
        ] {
            let patch = json!({ "metadata": metadata });
            assert_denied(node.try_patch(&own, patch.clone()).await, "this node alone", &patch);
        }
        assert_allowed(node.try_delete(&own).await, &own);
    });
}

/// What a token may not change of an event, and may create.
async fn assert_own_events_only(principal: &Principal, reporter: &str) {
    const NAME: &str = "the event is not in the name of this driver";
    const ABOUT: &str = "the event is not about a claim";
    let own = |change: Value| event(reporter, with(json!({ "reportingInstance": reporter }), change));
    for (change, why) in [
        (json!({ "reportingController": "kubelet" }), NAME),
        (json!({ "reportingInstance": "node-b" }), NAME),
        (json!({ "regarding": { "kind": "Secret" } }), ABOUT),
        (json!({ "related": { "kind": "Pod", "name": "p" } }), ABOUT),
        (json!({ "metadata": { "labels": { "a": "b" } } }), ABOUT),
        (
            json!({ "metadata": { "namespace": "kube-system" }, "regarding": { "namespace": "kube-system" },
                    "reportingController": "kube-scheduler" }),
            NAME,
        ),
    ] {
        let object = own(change);
        assert_denied(principal.try_create(&object).await, why, &object);
    }
    let object = own(json!({}));
    principal.create(&object).await;
    for about in [
        json!({ "regarding": { "kind": "PersistentVolume", "namespace": null, "name": "pvc-1" } }),
        json!({ "regarding": { "kind": "VolumeSnapshotContent", "namespace": null, "name": "snapcontent-1" } }),
    ] {
        let object = with(own(about), json!({ "metadata": { "name": "another.1" } }));
        assert_allowed(principal.try_create(&object).await, &object);
    }
}

#[test]
#[ignore = "needs kube"]
fn a_nodes_token_writes_events_in_its_own_name_about_claims_volumes_and_snapshots() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "liar").await;
        assert_own_events_only(&node, "node-a").await;
        let of_pod = event("node-a", json!({ "regarding": { "kind": "Pod" } }));
        assert_denied(node.try_create(&of_pod).await, "about a claim", &of_pod);
        let series = json!({ "series": { "count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z" } });
        let own = event("node-a", json!({}));
        assert_allowed(node.try_patch(&own, series.clone()).await, &own);
        let labels = with(series.clone(), json!({ "metadata": { "labels": { "a": "b" } } }));
        assert_denied(node.try_patch(&own, labels.clone()).await, "only its series", &labels);
        let others = event("others", json!({ "reportingController": "kubelet" }));
        kube.create_objects(&others.to_string()).expect("an event");
        assert_denied(node.try_patch(&others, series).await, "not in the name of this driver", &others);
        assert_denied(node.try_delete(&own).await, "cannot delete resource", &own);
    });
}

#[test]
#[ignore = "needs kube"]
fn a_nodes_token_reports_only_a_snapshots_own_handle() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "snapshot-thief").await;
        let protection = "snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection";
        let content = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {
                "name": "content", "finalizers": [protection, "example.org/kept"],
                "labels": { "snapshot.storage.kubernetes.io/managed-by": "node-a" },
            },
            "spec": {
                "deletionPolicy": "Delete", "driver": DRIVER,
                "source": { "volumeHandle": format!("pvc-{}", uid("0001")) },
                "volumeSnapshotRef": { "name": "s", "namespace": "default", "uid": uid("0002") },
            },
        });
        kube.create_objects(&content.to_string()).expect("a content");
        let handle = |handle: String| json!({ "snapshotHandle": handle, "readyToUse": true });
        assert_allowed(node.try_patch_status(&content, handle(format!("snap-{}", uid("0002")))).await, &content);
        for status in [handle(format!("snap-{}", uid("0003"))), json!({ "volumeGroupSnapshotHandle": "g" })] {
            assert_denied(node.try_patch_status(&content, status.clone()).await, "its own handle", &status);
        }
        let finalizers = |list: &[&str]| json!({ "metadata": { "finalizers": list } });
        assert_allowed(node.try_patch(&content, finalizers(&["example.org/kept"])).await, &content);
        for patch in [
            finalizers(&[]),
            finalizers(&[protection, "example.org/kept", "example.org/held"]),
            json!({ "metadata": { "annotations": { "snapshot.storage.kubernetes.io/deletion-secret-name": "x" } } }),
        ] {
            assert_denied(node.try_patch(&content, patch.clone()).await, "only its status", &patch);
        }
    });
}

#[test]
#[ignore = "needs kube"]
fn an_agents_token_deselects_claims_of_its_driver_and_holds_its_lease_and_no_more() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let agent = Principal::of_pod(&kube, "provisionerd-agent", "node-b", "agent-1").await;
        const NOT_OWN: &str = "the Lease is not that of the agents, held by the pod of the token";
        let lease = |name: &str, holder: &str| {
            json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": { "name": name, "namespace": "nodekeel" }, "spec": { "holderIdentity": holder },
            })
        };
        wait_until_denied(async || agent.try_create(&lease("another", "agent-1")).await, NOT_OWN).await;
        let deselect = json!({ "metadata": { "annotations": { SELECTED_NODE: null } } });
        let selected = json!({ "metadata": { "annotations": { SELECTED_NODE: "node-a" } } });
        let foreign = create_claim(&kube, "agent-foreign", "other", selected.clone());
        // Two policies deny it, and the API server names one of them.
        wait_until_denied(async || agent.try_patch(&foreign, deselect.clone()).await, "driver").await;
        let ours = create_claim(&kube, "agent-ours", "nodekeel", selected);
        assert_allowed(agent.try_patch(&ours, deselect).await, &ours);

        let others = lease("provisionerd-agent", "agent-2");
        assert_denied(agent.try_create(&others).await, NOT_OWN, &others);
        let own = lease("provisionerd-agent", "agent-1");
        agent.create(&own).await;
        assert_allowed(agent.try_patch(&own, json!({ "spec": { "holderIdentity": null } })).await, &own);
        let held = json!({ "metadata": { "finalizers": ["example.org/held"] } });
        assert_denied(agent.try_patch(&own, held).await, "may not be set", &own);
        let liar = event("agent-1", json!({ "reportingInstance": "agent-2" }));
        wait_until_denied(async || agent.try_create(&liar).await, "not in the name of this driver").await;
        assert_own_events_only(&agent, "agent-1").await;
        let of_pod = json!({ "reportingInstance": "agent-1", "regarding": { "kind": "Pod" } });
        let of_pod = event("agent-pod", of_pod);
        assert_allowed(agent.try_create(&of_pod).await, &of_pod);
        for object in [volume("0006", json!({})), capacity(json!({}))] {
            assert_denied(agent.try_create(&object).await, "cannot create resource", &object);
        }
    });
}

#[test]
#[ignore = "needs kube"]
fn the_expressions_of_every_policy_pass_type_checking() {
    let kube = shared_kube();
    let policies = kube.list_objects("validatingadmissionpolicy").expect("a list");
    let names: Vec<_> = policies.iter().map(object_name).collect();
    accounts::assert_type_checked(&kube, &names);
}

/// The bound of what the policies can stop: SECURITY.md has it among its known limits. Kubernetes binds a claim to the volume
/// that names it, of whatever class, and a policy sees the volume alone.
#[test]
#[ignore = "needs kube"]
fn a_nodes_token_can_bind_a_claim_that_is_pending_now_to_its_node() {
    let kube = shared_kube();
    test_runtime().block_on(async {
        let node = Principal::of_node(&kube, "binder").await;
        let pending = create_claim(&kube, "pending", "other", json!({}));
        node.create(&volume_of(&pending, json!({}))).await;
        let is_bound = |claim: &Value| claim["status"]["phase"] == "Bound";
        kube.wait_for_object("pvc", "default/pending", is_bound).expect("it is bound");
    });
}
