//! The PersistentVolume of each kind of claim, in full. `UPDATE=1` writes the files anew.

use std::fs;
use std::path::Path;

use nodekeel_provisioner::testing::objects::{NODE, claim, class, identity};
use nodekeel_provisioner::{ClaimAction, Identity, SeenClaim, manifest, plan_claim};
use serde_json::{Value, json};

pub(crate) struct Variant {
    pub(crate) name: &'static str,
    pub(crate) claim: Value,
    pub(crate) class: Value,
    pub(crate) finalizer: bool,
}

fn variant(name: &'static str, claim: Value, class: Value) -> Variant {
    Variant { name, claim, class, finalizer: true }
}

pub(crate) fn variants() -> Vec<Variant> {
    let plain = || json!({});
    vec![
        variant("plain", plain(), plain()),
        Variant { finalizer: false, ..variant("without-finalizer", plain(), plain()) },
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
        variant("mount-options", plain(), json!({ "mountOptions": ["noatime", "nodev"] })),
        variant("retain", plain(), json!({ "reclaimPolicy": "Retain" })),
        variant("class-of-defaults", plain(), json!({ "reclaimPolicy": null, "volumeBindingMode": null })),
    ]
}

fn built(variant: &Variant) -> String {
    let me = identity(NODE);
    let me = Identity { finalizer: me.finalizer.clone().filter(|_| variant.finalizer), ..me };
    let (claim, class) = (claim(1, variant.claim.clone()), class(variant.class.clone()));
    let seen = SeenClaim { claim: &claim, class: Some(&class), volume: None };
    let ClaimAction::Provision(spec) = plan_claim(&me, seen) else {
        panic!("{} is not provisioned", variant.name)
    };
    serde_json::to_string_pretty(&manifest(&me, &spec)).expect("JSON") + "\n"
}

#[test]
fn each_kind_of_claim_gets_the_volume_that_its_file_shows() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/manifests");
    for variant in variants() {
        let (path, built) = (dir.join(variant.name).with_extension("json"), built(&variant));
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, &built).expect("write");
        }
        let golden = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(built, golden, "{}; UPDATE=1 writes it anew", path.display());
    }
}

#[test]
fn every_file_has_its_variant() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/manifests");
    let mut names: Vec<String> = variants().iter().map(|variant| format!("{}.json", variant.name)).collect();
    let entries = fs::read_dir(dir).expect("testdata").map(|entry| entry.expect("entry").file_name());
    let mut files: Vec<String> = entries.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    files.sort();
    assert_eq!(names, files);
}
