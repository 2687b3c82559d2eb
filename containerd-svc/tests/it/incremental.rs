//! What a second pass does.

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, StoreCall};
use nodekeel_containerd_svc::{BundleOutcome, Platform};

use crate::bundles::{BundleFixture, count_outcomes, k8s_namespace};

fn archive_with_layer(layer: &[u8]) -> Vec<u8> {
    ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
        .with_image(&["localhost/a:1", "localhost/a:2"], layer)
        .to_tar()
}

#[tokio::test]
async fn an_unchanged_bundle_that_is_present_is_not_read_again() {
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", &archive_with_layer(b"1")).run_preseed().await;
    let sessions = bundles.store.call_count(StoreCall::BeginImport);
    for _ in 0..3 {
        assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 1, 0]);
    }
    assert_eq!(bundles.store.call_count(StoreCall::BeginImport), sessions);
}

#[tokio::test]
async fn a_changed_bundle_is_imported_again() {
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", &archive_with_layer(b"1")).run_preseed().await;
    let first = bundles.list_images().await;
    assert_eq!(
        count_outcomes(&bundles.put_bundle("a.tar", &archive_with_layer(b"2")).run_preseed().await),
        [1, 0, 0]
    );
    assert_ne!(bundles.list_images().await[0].target, first[0].target);
}

#[tokio::test]
async fn removed_images_and_content_are_restored() {
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", &archive_with_layer(b"1")).run_preseed().await;
    bundles.store.remove_image(&k8s_namespace(), "localhost/a:2");
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [1, 0, 0], "one of its images");
    for digest in bundles.store.content_digests(&k8s_namespace()) {
        bundles.store.lose_content(&k8s_namespace(), &digest);
        assert_eq!(
            count_outcomes(&bundles.run_preseed().await),
            [1, 0, 0],
            "content removed without updating its image"
        );
        assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 1, 0]);
    }
    assert_eq!(bundles.image_names().await, ["localhost/a:1", "localhost/a:2"]);
}

/// Reference 13, `preseed: tar truncated`: it is known to be invalid, and the others are imported.
#[tokio::test]
async fn an_invalid_bundle_is_read_once_until_it_changes() {
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", b"scribble").put_bundle("b.tar", &archive_with_layer(b"1"));
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [1, 0, 1]);
    let report = bundles.run_preseed().await;
    assert!(
        matches!(&report.outcomes[0], BundleOutcome::KnownInvalid { bundle, .. } if bundle.file == "a.tar"),
        "{report:?}"
    );
    assert_eq!(
        count_outcomes(&bundles.put_bundle("a.tar", &archive_with_layer(b"2")).run_preseed().await)[2],
        0
    );
}

#[tokio::test]
async fn content_that_two_bundles_share_is_written_once() {
    let layer = vec![1; 530_000];
    let bundles = BundleFixture::new();
    for name in ["a", "b"] {
        bundles.put_bundle(
            &format!("{name}.tar"),
            &ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[name], &layer).to_tar(),
        );
    }
    bundles.run_preseed().await;
    assert!(bundles.store.written_bytes() < 600_000, "{}", bundles.store.written_bytes());
    assert_eq!(bundles.image_names().await.len(), 2);
}

#[tokio::test]
async fn a_bundle_missing_content_is_imported_after_the_one_that_brings_it() {
    let layer = vec![7; 5_000];
    let archive = |name: &str| ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[name], &layer);
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", &archive("a").without_content(&layer).to_tar());
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 0, 1]);
    let sessions = bundles.store.call_count(StoreCall::BeginImport);
    assert!(matches!(bundles.run_preseed().await.outcomes[..], [BundleOutcome::KnownInvalid { .. }]));
    assert_eq!(
        bundles.store.call_count(StoreCall::BeginImport),
        sessions,
        "the invalid bundle is not read again"
    );
    assert_eq!(
        count_outcomes(&bundles.put_bundle("b.tar", &archive("b").to_tar()).run_preseed().await),
        [2, 0, 0]
    );
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 2, 0]);
    assert_eq!(bundles.image_names().await, ["docker.io/library/a:a", "docker.io/library/b:b"]);
}

/// An archive with an image for each of two platforms, and one that nothing refers to.
#[tokio::test]
async fn what_this_node_does_not_need_of_an_archive_that_can_seek_is_never_written() {
    let other = Platform { os: "linux".into(), architecture: "s390x".into(), variant: None };
    let layer = vec![7; 100_000];
    for format in [BuiltArchiveFormat::OciLayout, BuiltArchiveFormat::OciLayoutIndexLast] {
        let bundles = BundleFixture::new();
        let archive = ArchiveBuilder::new(format)
            .with_image_for(&other, &[], &vec![8; 3_000_000])
            .with_stated_platform(&other)
            .with_image(&[], &layer)
            .wrap_in_index(&["localhost/both:1"])
            .with_file("blobs/sha256/stray", &vec![9; 3_000_000]);
        assert_eq!(count_outcomes(&bundles.put_bundle("a.tar", &archive.to_tar()).run_preseed().await)[0], 1);
        let written = bundles.store.written_bytes();
        assert!(written < 110_000, "{written}");
        assert_eq!(bundles.store.content_bytes(), written, "all of it is kept");
    }
    for format in [BuiltArchiveFormat::OciLayout, BuiltArchiveFormat::DockerArchive] {
        let foreign = ArchiveBuilder::new(format).with_image_for(&other, &["localhost/other:1"], &layer);
        let bundles = BundleFixture::new();
        let report = bundles.put_bundle("a.tar", &foreign.to_tar()).run_preseed().await;
        assert!(report.failures()[0].contains("is for linux/s390x"), "{report:?}");
        assert_eq!(bundles.store.written_bytes(), 0, "{format:?}");
    }
}

/// A root file system, as `docker export` writes it.
#[tokio::test]
async fn an_archive_of_something_else_is_known_by_its_index_or_its_first_files() {
    let files = (0..1000).fold(ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive), |archive, number| {
        archive.with_file(&format!("usr/bin/{number}"), &[7; 10_000])
    });
    let root = files.to_tar();
    // Without the documents that the builder adds at its end.
    let root = [&root[..1000 * (512 + 10_240)], &[0; 1024]].concat();
    let bundles = BundleFixture::new();
    let report = bundles.put_bundle("a.tar", &root).run_preseed().await;
    assert!(report.failures()[0].contains("has neither index.json nor manifest.json"), "{report:?}");
    assert_eq!(bundles.store.written_bytes(), 0);
    let report = bundles.put_bundle("a.tar", &zstd::encode_all(&root[..], 1).unwrap()).run_preseed().await;
    assert!(report.failures()[0].contains("archive of other files than images, such as"), "{report:?}");
    assert!(bundles.store.written_bytes() < 64 * 10_000);
}
