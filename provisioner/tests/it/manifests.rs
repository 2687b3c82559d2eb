//! The complete PersistentVolume of each claim variant. `UPDATE=1` rewrites the golden files.

use std::fs;
use std::path::Path;

use nodekeel_provisioner::testing::objects::{NODE, sample_claim, sample_class, sample_identity, sample_uid};
use nodekeel_provisioner::{
    ClaimAction, ObservedClaim, ProvisionerIdentity, build_persistent_volume, plan_claim,
};
use serde_json::{Value, json};

pub(crate) struct ClaimVariant {
    pub(crate) name: &'static str,
    pub(crate) claim: Value,
    pub(crate) class: Value,
    pub(crate) finalizer: bool,
}

fn variant(name: &'static str, claim: Value, class: Value) -> ClaimVariant {
    ClaimVariant { name, claim, class, finalizer: true }
}

pub(crate) fn variants() -> Vec<ClaimVariant> {
    let plain = || json!({});
    vec![
        variant("plain", plain(), plain()),
        ClaimVariant { finalizer: false, ..variant("without-finalizer", plain(), plain()) },
        variant("read-write-once-pod", json!({ "spec": { "accessModes": ["ReadWriteOncePod"] } }), plain()),
        variant(
            "several-modes",
            json!({ "spec": { "accessModes": ["ReadOnlyMany", "ReadWriteOnce"] } }),
            plain(),
        ),
        variant("without-volume-mode", json!({ "spec": { "volumeMode": null } }), plain()),
        variant(
            "fraction-of-a-byte",
            json!({ "spec": { "resources": { "requests": { "storage": "1.5Ki" } } } }),
            plain(),
        ),
        variant(
            "decimal-size",
            json!({ "spec": { "resources": { "requests": { "storage": "1G" } } } }),
            plain(),
        ),
        variant("mount-options", plain(), json!({ "mountOptions": ["noexec", "nodev"] })),
        variant("retain", plain(), json!({ "reclaimPolicy": "Retain" })),
        variant("block", json!({ "spec": { "volumeMode": "Block" } }), json!({ "mountOptions": ["noexec"] })),
        variant("strict", plain(), json!({ "parameters": { "strict": "true" } })),
        variant(
            "strict-xfs",
            json!({ "spec": { "resources": { "requests": { "storage": "1Gi" } } } }),
            json!({ "parameters": { "strict": "true", "csi.storage.k8s.io/fstype": "xfs" } }),
        ),
        variant("class-of-defaults", plain(), json!({ "reclaimPolicy": null, "volumeBindingMode": null })),
    ]
}

fn build_manifest(variant: &ClaimVariant) -> String {
    let identity = sample_identity(NODE);
    let identity = ProvisionerIdentity {
        finalizer: identity.finalizer.clone().filter(|_| variant.finalizer),
        ..identity
    };
    let (claim, class) = (sample_claim(1, variant.claim.clone()), sample_class(variant.class.clone()));
    let seen = ObservedClaim { claim: &claim, class: Some(&class), volume: None, node_labels: None };
    let ClaimAction::Provision(spec) = plan_claim(&identity, seen) else {
        panic!("{} is not provisioned", variant.name)
    };
    let store = sample_uid(77).parse().expect("a UUID");
    serde_json::to_string_pretty(&build_persistent_volume(&identity, Some(&store), &spec)).expect("JSON")
        + "\n"
}

#[test]
fn each_claim_variant_gets_the_volume_of_its_golden_file() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/manifests");
    for variant in variants() {
        let (path, built) = (dir.join(variant.name).with_extension("json"), build_manifest(&variant));
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, &built).expect("write");
        }
        let golden = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(built, golden, "{}; UPDATE=1 rewrites it", path.display());
    }
}

#[test]
fn every_golden_file_has_a_claim_variant() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/manifests");
    let mut names: Vec<String> = variants().iter().map(|variant| format!("{}.json", variant.name)).collect();
    let entries = fs::read_dir(dir).expect("testdata").map(|entry| entry.expect("entry").file_name());
    let mut files: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    files.sort();
    assert_eq!(names, files);
}
