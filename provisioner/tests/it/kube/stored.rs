//! The PersistentVolume of each kind of claim as the API server stores it, defaults filled in. `UPDATE=1` writes the files anew.

use std::fs;
use std::path::Path;

use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_provisioner::testing::objects::{DRIVER, NODE, claim, class, uid};
use nodekeel_provisioner::{DriverName, FINALIZER, SELECTED_NODE};
use serde_json::{Value, json};

use super::harness::{Scene, runtime, shared};
use crate::manifests::{Variant, variants};

const NAME: &str = "stored";

/// A volume as it is stored, with what differs from run to run replaced.
fn normalized(volume: &PersistentVolume, claim_uid: &str) -> String {
    let mut value = serde_json::to_value(volume).expect("JSON");
    for field in ["managedFields", "creationTimestamp", "resourceVersion", "uid"] {
        value["metadata"].as_object_mut().expect("an object").remove(field);
    }
    value["spec"]["claimRef"].as_object_mut().expect("an object").remove("resourceVersion");
    value["status"].as_object_mut().expect("an object").remove("lastPhaseTransitionTime");
    let text = serde_json::to_string_pretty(&value).expect("JSON") + "\n";
    text.replace(claim_uid, &uid(1))
}

async fn stored(scene: &Scene, variant: &Variant) -> String {
    let class_name = format!("{NAME}-{}", variant.name);
    let mut class = class(variant.class.clone());
    class.metadata.name = Some(class_name.clone());
    let class = serde_json::to_value(class).expect("JSON");
    scene.create(scene.classes(), class).await;

    let mut claim = serde_json::to_value(claim(1, variant.claim.clone())).expect("JSON");
    claim["metadata"] = json!({ "name": variant.name, "annotations": { SELECTED_NODE: NODE } });
    claim["spec"]["storageClassName"] = json!(class_name);
    claim["status"] = Value::Null;
    let claim = scene.create(scene.claims(), claim).await;
    let volume = scene.bound(variant.name).await;
    // The volume is bound a moment after its claim says so, or before.
    let is_bound = |volume: Option<&PersistentVolume>| {
        volume.and_then(|volume| volume.status.as_ref()?.phase.as_deref()) == Some("Bound")
    };
    let name = volume.metadata.name.expect("a name");
    let volume = super::harness::until(&scene.volumes(), &name, is_bound).await.expect("it is bound");
    normalized(&volume, claim.metadata.uid.as_deref().expect("a UID"))
}

#[test]
#[ignore = "needs kube"]
fn each_kind_of_claim_gets_the_volume_that_its_file_shows() {
    let (kube, runtime) = (shared(), runtime());
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/stored");
    runtime.block_on(async {
        let driver = DriverName::try_new(DRIVER).expect("a driver's name");
        let scene = Scene::with_driver(&kube, NAME, driver).await;
        for finalizer in [true, false] {
            let node = scene.provisioner_with(NODE, finalizer.then(|| FINALIZER.to_owned())).await;
            for variant in variants().iter().filter(|variant| variant.finalizer == finalizer) {
                let (path, stored) =
                    (dir.join(variant.name).with_extension("json"), stored(&scene, variant).await);
                if std::env::var_os("UPDATE").is_some() {
                    fs::create_dir_all(&dir).expect("a directory");
                    fs::write(&path, &stored).expect("write");
                }
                let golden = fs::read_to_string(&path).unwrap_or_default();
                assert_eq!(stored, golden, "{}; UPDATE=1 writes it anew", path.display());
            }
            node.stop().await;
        }
    });
}
