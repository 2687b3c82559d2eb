//! Which files of a directory are imported.

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{ImageStore as _, Platform, PreseedError};

use crate::bundles::{BundleFixture, count_outcomes, k8s_namespace};

fn other_platform() -> Platform {
    Platform { os: "linux".into(), architecture: "s390x".into(), variant: None }
}

#[tokio::test]
async fn every_format_and_compression_gives_the_same_images() {
    for shape in [
        BuiltArchiveFormat::OciLayout,
        BuiltArchiveFormat::OciLayoutIndexLast,
        BuiltArchiveFormat::DockerArchive,
    ] {
        let archive =
            ArchiveBuilder::new(shape).with_image(&["localhost/a:1", "localhost/a:2"], &[7; 530_000]);
        for (file, bytes) in
            [("a.tar", archive.to_tar()), ("a.tar.gz", archive.to_gzip()), ("a.tzst", archive.to_zstd())]
        {
            let bundles = BundleFixture::new();
            let report = bundles.put_bundle(file, &bytes).run_preseed().await;
            assert_eq!(count_outcomes(&report), [1, 0, 0], "{shape:?} {file}: {report:?}");
            assert_eq!(bundles.image_names().await, ["localhost/a:1", "localhost/a:2"]);
            assert_eq!(
                bundles.store.content_digests(&k8s_namespace()).len(),
                3,
                "manifest, configuration, layer"
            );
        }
    }
}

#[tokio::test]
async fn a_stream_of_several_gzip_members_is_one_archive() {
    let tar = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
        .with_image(&["localhost/a:1"], &[7; 100_000])
        .to_tar();
    let member = |bytes: &[u8]| {
        use std::io::Write as _;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let bundles = BundleFixture::new();
    let report = bundles
        .put_bundle("a.tar.gz", &[member(&tar[..50_000]), member(&tar[50_000..])].concat())
        .run_preseed()
        .await;
    assert_eq!(count_outcomes(&report), [1, 0, 0], "{report:?}");
}

#[tokio::test]
async fn a_missing_directory_is_an_error_that_names_it_and_an_empty_one_is_reported() {
    let bundles = BundleFixture::new();
    let report = bundles.run_preseed().await;
    assert_eq!((count_outcomes(&report), report.is_empty), ([0, 0, 0], true));
    let missing = nodekeel_containerd_svc::Preseed::new("/nowhere/at/all").with_directory("/elsewhere");
    let error = missing.run(&bundles.store).await.unwrap_err();
    assert!(error.to_string().contains(", nor in /elsewhere ("), "each is named: {error}");
    let PreseedError::ListBundles { first, .. } = error else { panic!("another error") };
    assert!(first.is_not_found() && first.to_string().contains("/nowhere/at/all"), "{first}");
    // A directory of no bundles.
    std::fs::create_dir(bundles.directory.path().join("k8s.io")).unwrap();
    assert!(!bundles.run_preseed().await.is_empty);
}

#[tokio::test]
async fn an_invalid_bundle_affects_no_other_and_other_files_are_skipped() {
    let bundles = BundleFixture::new();
    let good = |name| {
        ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[name], name.as_bytes()).to_tar()
    };
    bundles
        .put_bundle("a.tar", &good("localhost/a:1"))
        .put_bundle("b.tar", b"scribble")
        .put_bundle("c.tar", &good("localhost/c:1"));
    bundles.put_bundle("README", b"read me");
    std::fs::write(bundles.directory.path().join("top.tar"), "x").unwrap();
    std::fs::create_dir(bundles.directory.path().join("empty")).unwrap();
    let report = bundles.run_preseed().await;
    assert_eq!(count_outcomes(&report), [2, 0, 1]);
    assert_eq!(report.skipped.len(), 2);
    assert_eq!(report.retryable_count(), 0, "an invalid file is not retryable");
    assert_eq!(bundles.image_names().await, ["localhost/a:1", "localhost/c:1"]);
}

#[tokio::test]
#[ignore = "needs plain user: root reads everything"]
async fn an_unreadable_bundle_or_directory_is_a_retryable_failure() {
    use std::os::unix::fs::PermissionsExt as _;
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", b"x").put_image("b.tar", "localhost/b:1", b"b");
    std::fs::set_permissions(bundles.path("a.tar"), std::fs::Permissions::from_mode(0o000)).unwrap();
    let locked = bundles.directory.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o000)).unwrap();
    let report = bundles.run_preseed().await;
    assert_eq!((count_outcomes(&report), report.retryable_count()), ([1, 0, 2], 2));
}

#[tokio::test]
async fn content_for_other_platforms_may_be_missing() {
    let (native, foreign) = (b"own layer".as_slice(), b"foreign layer".as_slice());
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
        .with_image(&[], native)
        .with_stated_platform(&Platform::of_build_target())
        .with_image_for(&other_platform(), &[], foreign)
        .with_stated_platform(&other_platform())
        .wrap_in_index(&["localhost/many:1"]);
    for archive in [archive.clone(), archive.without_content(foreign)] {
        let bundles = BundleFixture::new();
        let report = bundles.put_bundle("many.tar", &archive.to_tar()).run_preseed().await;
        assert_eq!(count_outcomes(&report), [1, 0, 0], "{report:?}");
        assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 1, 0], "no content is missing");
    }
}

#[tokio::test]
async fn an_image_name_for_several_platforms_resolves_to_the_nodes_platform() {
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
        .with_image(&["localhost/x:1"], b"own")
        .with_image_for(&other_platform(), &["localhost/x:1"], b"foreign");
    let bundles = BundleFixture::new();
    let report = bundles.put_bundle("x.tar", &archive.to_tar()).run_preseed().await;
    assert_eq!(count_outcomes(&report), [1, 0, 0], "{report:?}");
    let alone = BundleFixture::new();
    alone.put_image("x.tar", "localhost/x:1", b"own").run_preseed().await;
    let target = |bundles: &BundleFixture| {
        let store = bundles.store.clone();
        async move { store.list_images(&k8s_namespace()).await.unwrap().remove(0).target }
    };
    assert_eq!(target(&bundles).await, target(&alone).await);
}

#[tokio::test]
async fn a_bare_tag_belongs_to_the_files_repository() {
    let bundles = BundleFixture::new();
    bundles.put_image("pause.tar", "3.10", b"x").run_preseed().await;
    assert_eq!(bundles.image_names().await, ["docker.io/library/pause:3.10"]);
}

#[tokio::test]
async fn links_in_a_docker_archive_lead_to_layers() {
    let layer = b"shared layer".as_slice();
    let bundles = BundleFixture::new();
    bundles.put_bundle("linked.tar", &linked_archive(layer, "../one/layer.tar"));
    let report = bundles.run_preseed().await;
    assert_eq!(count_outcomes(&report), [1, 0, 0], "{report:?}");
    let error = BundleFixture::assert_rejected(&linked_archive(layer, "../../../one/layer.tar")).await;
    assert!(format!("{error:?}").contains("Missing"), "{error:?}");
}

/// A docker-archive of one image with two equal layers, of which the second is a link.
fn linked_archive(layer: &[u8], to: &str) -> Vec<u8> {
    let diff = nodekeel_containerd_svc::Digest::of_content(layer).to_string();
    let config = serde_json::json!({"os": "linux", "architecture": Platform::of_build_target().architecture,
        "rootfs": {"type": "layers", "diff_ids": [diff, diff]}});
    let saved = serde_json::json!([{"Config": "config.json", "RepoTags": ["linked:1"], "Layers": ["one/layer.tar", "two/layer.tar"]}]);
    let mut tar = tar::Builder::new(Vec::new());
    let files = [
        ("one/layer.tar", layer.to_vec()),
        ("config.json", config.to_string().into_bytes()),
        ("manifest.json", saved.to_string().into_bytes()),
    ];
    for (name, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, content.as_slice()).unwrap();
    }
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    tar.append_link(&mut header, "two/layer.tar", to).unwrap();
    tar.into_inner().unwrap()
}
