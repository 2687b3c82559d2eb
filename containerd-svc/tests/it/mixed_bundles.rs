//! Bundles with a good image and content that this node can't use: the image is served, and the rest is named.

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, StoreCall};
use nodekeel_containerd_svc::{
    BundleOutcome, Digest, ImageStore as _, LeftOutImage, Platform, PreseedReport,
};
use serde_json::{Value, json};

use crate::bundles::{BundleFixture, count_outcomes, k8s_namespace};

const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

fn descriptor(media_type: &str, content: &[u8], name: &str) -> Value {
    json!({"mediaType": media_type, "digest": Digest::of_content(content).to_string(), "size": content.len(),
        "annotations": {"org.opencontainers.image.ref.name": name}})
}

/// An archive with `localhost/good:1`, and an entry for these bytes, which are in it.
fn with_entry(entry: Value, blobs: &[&[u8]]) -> ArchiveBuilder {
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast);
    let archive = archive.with_image(&["localhost/good:1"], b"good").with_index_entry(entry);
    blobs.iter().fold(archive, |archive, blob| {
        archive.with_file(&format!("blobs/sha256/{}", Digest::of_content(blob).to_hex()), blob)
    })
}

/// An archive with an image manifest that has a configuration and a layer of these types, beside a good image.
fn with_manifest(name: &str, config_type: &str, layer_type: &str) -> ArchiveBuilder {
    let (config, layer) = (br#"{"rootfs": {"diff_ids": null}}"#.as_slice(), b"{}".as_slice());
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": descriptor(config_type, config, ""),
        "layers": [descriptor(layer_type, layer, "")]});
    let manifest = manifest.to_string().into_bytes();
    with_entry(descriptor(MANIFEST, &manifest, name), &[&manifest, config, layer])
}

fn left_out(report: &PreseedReport) -> &[LeftOutImage] {
    match &report.outcomes[..] {
        [BundleOutcome::Imported { left_out, .. } | BundleOutcome::Unchanged { left_out, .. }] => left_out,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_is_no_image_for_this_node_is_named_beside_a_good_image_and_nothing_has_failed() {
    let index = json!({"schemaVersion": 2, "manifests": null}).to_string().into_bytes();
    let other = Platform { os: "linux".into(), architecture: "s390x".into(), variant: None };
    let foreign =
        ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&["localhost/good:1"], b"good");
    for (name, archive) in [
        (
            "localhost/chart:1",
            with_manifest("localhost/chart:1", "application/vnd.cncf.helm.config.v1+json", LAYER),
        ),
        ("localhost/sbom:1", with_manifest("localhost/sbom:1", CONFIG, "application/spdx+json")),
        (
            "localhost/good:sha256-00.sig",
            with_manifest(
                "localhost/good:sha256-00.sig",
                CONFIG,
                "application/vnd.dev.cosign.simplesigning.v1+json",
            ),
        ),
        (
            "localhost/wasm:1",
            with_manifest("localhost/wasm:1", CONFIG, "application/vnd.wasm.content.layer.v1+wasm"),
        ),
        ("localhost/untyped:1", with_manifest("localhost/untyped:1", "", LAYER)),
        ("unknown", with_entry(descriptor("application/x-unknown", b"?", "unknown"), &[])),
        (
            "localhost/index:1",
            with_entry(
                descriptor("application/vnd.oci.image.index.v1+json", &index, "localhost/index:1"),
                &[&index],
            ),
        ),
        ("localhost/other:1", foreign.with_image_for(&other, &["localhost/other:1"], b"other")),
    ] {
        let bundles = BundleFixture::new();
        let report = bundles.put_bundle("a.tar", &archive.to_tar()).run_preseed().await;
        assert_eq!(bundles.image_names().await, ["localhost/good:1"], "{name}");
        assert!(
            matches!(left_out(&report), [image] if image.name == name && image.is_foreign()),
            "{report:?}"
        );
        assert_eq!(report.failures(), [""; 0], "{name}");
        let sessions = bundles.store.call_count(StoreCall::BeginImport);
        assert_eq!(
            left_out(&bundles.run_preseed().await).len(),
            1,
            "{name} is known without reading it again"
        );
        assert_eq!(bundles.store.call_count(StoreCall::BeginImport), sessions);
    }
}

#[tokio::test]
async fn what_is_damaged_or_unusable_has_failed_by_name_beside_a_good_image() {
    let sha512 = json!({"mediaType": MANIFEST, "digest": format!("sha512:{}", "0".repeat(128)), "size": 1,
        "annotations": {"io.containerd.image.name": "localhost/bad:1"}});
    let manifest =
        |text: &str| with_entry(descriptor(MANIFEST, text.as_bytes(), "localhost/bad:1"), &[text.as_bytes()]);
    let good = || {
        ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast).with_image(&["localhost/good:1"], b"good")
    };
    let docker =
        ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive).with_image(&["localhost/good:1"], b"good");
    for (what, archive) in [
        ("SHA-256", with_entry(sha512, &[])),
        ("index.json: unsupported entry", with_entry(json!(7), &[])),
        ("can't parse", manifest("{")),
        ("can't parse", manifest(r#"{"config": null, "layers": null}"#)),
        ("is missing", with_entry(descriptor(MANIFEST, b"absent", "localhost/bad:1"), &[])),
        ("invalid image name", good().with_image(&["localhost/Bad:1"], b"bad")),
        ("is missing", good().with_image(&["localhost/bad:1"], b"bad").without_content(b"bad")),
        ("digest mismatch", good().with_image(&["localhost/bad:1"], b"bad").with_damaged_content(b"bad")),
        (
            "digest mismatch",
            docker.clone().with_image(&["localhost/bad:1"], b"bad").with_damaged_content(b"bad"),
        ),
        (
            "of the archive has the digest",
            good().with_image(&[&format!("localhost/bad@{}", Digest::of_content(b"another"))], b"bad"),
        ),
        ("is missing", docker.with_image(&["localhost/bad:1"], b"bad").without_content(b"bad")),
        (
            "different images",
            good().with_image(&["localhost/bad:1"], b"one").with_image(&["localhost/bad:1"], b"two"),
        ),
    ] {
        let bundles = BundleFixture::new();
        let report = bundles.put_bundle("a.tar", &archive.to_tar()).run_preseed().await;
        assert_eq!(bundles.image_names().await, ["localhost/good:1"], "{what}");
        let failures = report.failures();
        assert!(failures.len() == 1 && failures[0].contains(what), "{what}: {failures:?}");
        assert!(failures[0].contains("/k8s.io/a.tar without the image "), "{failures:?}");
        let sessions = bundles.store.call_count(StoreCall::BeginImport);
        assert_eq!(bundles.run_preseed().await.failures(), failures, "it is known without reading it again");
        assert_eq!(bundles.store.call_count(StoreCall::BeginImport), sessions);
        // A new process finds the same: the mark on the good image says that there is more.
        let report =
            nodekeel_containerd_svc::Preseed::new(bundles.directory.path()).run(&bundles.store).await;
        assert_eq!(report.unwrap().failures(), failures);
    }
}

#[tokio::test]
async fn an_image_without_layers_may_have_null_for_a_list() {
    let config = br#"{"rootfs": {"type": "layers", "diff_ids": null}}"#.as_slice();
    let manifest = json!({"schemaVersion": 2, "config": descriptor(CONFIG, config, ""), "layers": null});
    let manifest = manifest.to_string().into_bytes();
    let archive = with_entry(descriptor(MANIFEST, &manifest, "localhost/empty:1"), &[&manifest, config]);
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", &archive.to_tar()).run_preseed().await;
    assert_eq!(bundles.image_names().await, ["localhost/empty:1", "localhost/good:1"]);
}

#[tokio::test]
async fn an_image_that_lacks_content_is_imported_once_another_bundle_brings_it() {
    let archive =
        |name: &str| ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[name], b"shared");
    let bundles = BundleFixture::new();
    let lacking =
        archive("localhost/a:1").without_content(b"shared").with_image(&["localhost/good:1"], b"good");
    let report = bundles.put_bundle("a.tar", &lacking.to_tar()).run_preseed().await;
    assert_eq!((count_outcomes(&report), report.failures().len()), ([1, 0, 0], 1), "{report:?}");
    bundles.put_bundle("b.tar", &archive("localhost/b:1").to_tar());
    let report = bundles.run_preseed().await;
    assert_eq!(report.failures(), [""; 0], "{report:?}");
    assert_eq!(bundles.image_names().await, ["localhost/a:1", "localhost/b:1", "localhost/good:1"]);
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 2, 0]);
}

#[tokio::test]
async fn a_namespace_whose_images_cannot_be_listed_fails_alone_and_keeps_its_images() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a");
    std::fs::create_dir(bundles.directory.path().join("bulk")).unwrap();
    std::fs::copy(bundles.path("a.tar"), bundles.directory.path().join("bulk/b.tar")).unwrap();
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [2, 0, 0]);
    let before = bundles.list_images().await;
    // The namespaces are listed in the order of their names: "bulk" is first.
    for (number, failed) in [(0, "bulk"), (1, "k8s.io")] {
        bundles.store.fail_call(StoreCall::ListImages, number);
        let report = bundles.run_preseed().await;
        assert_eq!(count_outcomes(&report), [0, 1, 1], "{report:?}");
        assert!(report.failures()[0].contains(failed), "{report:?}");
        assert_eq!(report.changes, []);
        assert_eq!(bundles.store.list_images(&k8s_namespace()).await.unwrap(), before);
    }
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 2, 0]);
}
