//! The PersistentVolume of each claim variant as the API server stores it, with defaults. `UPDATE=1` rewrites
//! the golden files.

use std::fs;
use std::path::Path;

use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_provisioner::testing::objects::{DRIVER, NODE, sample_claim, sample_class, sample_uid};
use nodekeel_provisioner::{DriverName, FINALIZER, SELECTED_NODE};
use serde_json::{Value, json};

use super::harness::{TestCluster, shared_control_plane, test_runtime};
use crate::manifests::{ClaimVariant, variants};

const NAME: &str = "stored";

/// A stored volume, without the fields that differ between runs, and with a fixed store.
fn normalize_volume(volume: &PersistentVolume, claim_uid: &str) -> String {
    let mut value = serde_json::to_value(volume).expect("JSON");
    for field in ["managedFields", "creationTimestamp", "resourceVersion", "uid"] {
        value["metadata"].as_object_mut().expect("an object").remove(field);
    }
    value["spec"]["claimRef"].as_object_mut().expect("an object").remove("resourceVersion");
    value["spec"]["csi"]["volumeAttributes"]["store"] = json!(sample_uid(77));
    value["status"].as_object_mut().expect("an object").remove("lastPhaseTransitionTime");
    let text = serde_json::to_string_pretty(&value).expect("JSON") + "\n";
    text.replace(claim_uid, &sample_uid(1))
}

async fn store_variant(cluster: &TestCluster, variant: &ClaimVariant) -> String {
    let class_name = format!("{NAME}-{}", variant.name);
    let mut class = sample_class(variant.class.clone());
    class.metadata.name = Some(class_name.clone());
    let class = serde_json::to_value(class).expect("JSON");
    cluster.create_object(cluster.classes(), class).await;

    let mut claim = serde_json::to_value(sample_claim(1, variant.claim.clone())).expect("JSON");
    claim["metadata"] = json!({ "name": variant.name, "annotations": { SELECTED_NODE: NODE } });
    claim["spec"]["storageClassName"] = json!(class_name);
    claim["status"] = Value::Null;
    let claim = cluster.create_object(cluster.claims(), claim).await;
    let volume = cluster.wait_bound(variant.name).await;
    // The volume's phase changes shortly before or after its claim's.
    let is_bound = |volume: Option<&PersistentVolume>| {
        volume.and_then(|volume| volume.status.as_ref()?.phase.as_deref()) == Some("Bound")
    };
    let name = volume.metadata.name.expect("a name");
    let volume = super::harness::wait_for_object(&cluster.volumes(), &name, is_bound).await.expect("bound");
    normalize_volume(&volume, claim.metadata.uid.as_deref().expect("a UID"))
}

#[test]
#[ignore = "needs kube"]
fn each_claim_variant_gets_the_volume_of_its_golden_file() {
    let (kube, runtime) = (shared_control_plane(), test_runtime());
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/stored");
    runtime.block_on(async {
        let driver = DriverName::try_new(DRIVER).expect("a driver name");
        let cluster = TestCluster::with_driver(&kube, NAME, driver).await;
        let mut base = tempfile::tempdir().expect("a directory");
        for finalizer in [true, false] {
            let finalizer_name = finalizer.then(|| FINALIZER.to_owned());
            let node = cluster.start_provisioner_in(NODE, finalizer_name, base).await;
            for variant in variants().iter().filter(|variant| variant.finalizer == finalizer) {
                let (path, stored) =
                    (dir.join(variant.name).with_extension("json"), store_variant(&cluster, variant).await);
                if std::env::var_os("UPDATE").is_some() {
                    fs::create_dir_all(&dir).expect("a directory");
                    fs::write(&path, &stored).expect("write");
                }
                let golden = fs::read_to_string(&path).unwrap_or_default();
                assert_eq!(stored, golden, "{}; UPDATE=1 rewrites it", path.display());
            }
            base = node.stop().await;
        }
    });
}
