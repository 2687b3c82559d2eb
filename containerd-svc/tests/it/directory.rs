//! What is imported of a directory, and what is not.

use nodekeel_containerd_svc::testing::{Archive, Shape};
use nodekeel_containerd_svc::{ImageStore as _, Platform};

use crate::bundles::{Bundles, counts, k8s};

fn other() -> Platform {
    Platform { os: "linux".into(), architecture: "s390x".into(), variant: None }
}

#[tokio::test]
async fn every_shape_and_compression_gives_the_same_images() {
    for shape in [Shape::Layout, Shape::LayoutLast, Shape::Docker] {
        let archive = Archive::new(shape).image(&["localhost/a:1", "localhost/a:2"], &[7; 530_000]);
        for (file, bytes) in
            [("a.tar", archive.tar()), ("a.tar.gz", archive.gzip()), ("a.tzst", archive.zstd())]
        {
            let bundles = Bundles::new();
            let report = bundles.put(file, &bytes).run().await;
            assert_eq!(counts(&report), [1, 0, 0], "{shape:?} {file}: {report:?}");
            assert_eq!(bundles.names().await, ["localhost/a:1", "localhost/a:2"]);
            assert_eq!(bundles.store.content(&k8s()).len(), 3, "manifest, configuration, layer");
        }
    }
}

#[tokio::test]
async fn several_archives_in_one_stream_of_gzip_members_are_one() {
    let tar = Archive::new(Shape::Layout).image(&["localhost/a:1"], &[7; 100_000]).tar();
    let member = |bytes: &[u8]| {
        use std::io::Write as _;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let bundles = Bundles::new();
    let report =
        bundles.put("a.tar.gz", &[member(&tar[..50_000]), member(&tar[50_000..])].concat()).run().await;
    assert_eq!(counts(&report), [1, 0, 0], "{report:?}");
}

#[tokio::test]
async fn no_directory_means_nothing_to_do() {
    let bundles = Bundles::new();
    assert_eq!(counts(&bundles.run().await), [0, 0, 0]);
    let gone = nodekeel_containerd_svc::Preseed::new("/nowhere/at/all");
    assert_eq!(counts(&gone.run(&bundles.store).await.unwrap()), [0, 0, 0]);
}

#[tokio::test]
async fn a_bad_bundle_touches_no_other_and_strays_are_left_alone() {
    let bundles = Bundles::new();
    let good = |name| Archive::new(Shape::Layout).image(&[name], name.as_bytes()).tar();
    bundles
        .put("a.tar", &good("localhost/a:1"))
        .put("b.tar", b"scribble")
        .put("c.tar", &good("localhost/c:1"));
    bundles.put("README", b"read me");
    std::fs::write(bundles.directory.path().join("top.tar"), "x").unwrap();
    std::fs::create_dir(bundles.directory.path().join("empty")).unwrap();
    let report = bundles.run().await;
    assert_eq!(counts(&report), [2, 0, 1]);
    assert_eq!(report.strays.len(), 2);
    assert_eq!(report.retryable(), 0, "a bad file stays bad");
    assert_eq!(bundles.names().await, ["localhost/a:1", "localhost/c:1"]);
}

#[tokio::test]
#[ignore = "needs plain user: root reads everything"]
async fn an_unreadable_bundle_or_directory_is_told_and_may_be_tried_again() {
    use std::os::unix::fs::PermissionsExt as _;
    let bundles = Bundles::new();
    bundles
        .put("a.tar", b"x")
        .put("b.tar", &Archive::new(Shape::Layout).image(&["localhost/b:1"], b"b").tar());
    std::fs::set_permissions(bundles.path("a.tar"), std::fs::Permissions::from_mode(0o000)).unwrap();
    let locked = bundles.directory.path().join("locked");
    std::fs::create_dir(&locked).unwrap();
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o000)).unwrap();
    let report = bundles.run().await;
    assert_eq!((counts(&report), report.retryable()), ([1, 0, 2], 2));
}

#[tokio::test]
async fn what_is_for_other_platforms_may_be_missing() {
    let (own, foreign) = (b"own layer".as_slice(), b"foreign layer".as_slice());
    let archive = Archive::new(Shape::LayoutLast)
        .image(&[], own)
        .stated(&Platform::of_this_machine())
        .image_for(&other(), &[], foreign)
        .stated(&other())
        .into_index(&["localhost/many:1"]);
    for archive in [archive.clone(), archive.without(foreign)] {
        let bundles = Bundles::new();
        let report = bundles.put("many.tar", &archive.tar()).run().await;
        assert_eq!(counts(&report), [1, 0, 0], "{report:?}");
        assert_eq!(counts(&bundles.run().await), [0, 1, 0], "nothing of it is missed");
    }
}

#[tokio::test]
async fn of_one_name_for_several_platforms_the_nodes_own_is_taken() {
    let archive = Archive::new(Shape::Layout).image(&["localhost/x:1"], b"own").image_for(
        &other(),
        &["localhost/x:1"],
        b"foreign",
    );
    let bundles = Bundles::new();
    let report = bundles.put("x.tar", &archive.tar()).run().await;
    assert_eq!(counts(&report), [1, 0, 0], "{report:?}");
    let alone = Bundles::new();
    alone.put("x.tar", &Archive::new(Shape::Layout).image(&["localhost/x:1"], b"own").tar()).run().await;
    let target = |bundles: &Bundles| {
        let store = bundles.store.clone();
        async move { store.images(&k8s()).await.unwrap().remove(0).target }
    };
    assert_eq!(target(&bundles).await, target(&alone).await);
}

#[tokio::test]
async fn a_mere_tag_is_one_of_the_file() {
    let bundles = Bundles::new();
    bundles.put("pause.tar", &Archive::new(Shape::Layout).image(&["3.10"], b"x").tar()).run().await;
    assert_eq!(bundles.names().await, ["docker.io/library/pause:3.10"]);
}

#[tokio::test]
async fn of_two_bundles_with_one_name_the_first_has_it_and_neither_is_read_again() {
    let bundles = Bundles::new();
    for (file, layer) in [("a.tar", b"a"), ("b.tar", b"b")] {
        bundles.put(
            file,
            &Archive::new(Shape::Layout)
                .image(&["localhost/x:1", file.trim_end_matches(".tar")], layer)
                .tar(),
        );
    }
    assert_eq!(counts(&bundles.run().await), [2, 0, 0]);
    let first = bundles.store.images(&k8s()).await.unwrap();
    let target = |name: &str| first.iter().find(|image| image.name == name).unwrap().target.digest;
    assert_eq!(target("localhost/x:1"), target("docker.io/library/a:a"));
    assert_eq!(counts(&bundles.run().await), [0, 2, 0]);
    assert_eq!(bundles.store.images(&k8s()).await.unwrap(), first);
}

#[tokio::test]
async fn links_in_a_docker_archive_lead_to_layers() {
    let layer = b"shared layer".as_slice();
    let bundles = Bundles::new();
    bundles.put("linked.tar", &linked(layer, "../one/layer.tar"));
    let report = bundles.run().await;
    assert_eq!(counts(&report), [1, 0, 0], "{report:?}");
    let error = Bundles::refused(&linked(layer, "../../../one/layer.tar")).await;
    assert!(format!("{error:?}").contains("Missing"), "{error:?}");
}

/// A docker-archive of one image with two equal layers, of which the second is a link.
fn linked(layer: &[u8], to: &str) -> Vec<u8> {
    let diff = nodekeel_containerd_svc::Digest::of(layer).to_string();
    let config = serde_json::json!({"os": "linux", "architecture": Platform::of_this_machine().architecture,
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
