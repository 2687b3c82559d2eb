//! The image store, and containers of its images.

use std::collections::BTreeSet;
use std::fs;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, conformance};
use nodekeel_containerd_svc::{
    BundleOutcome, ConfigVersion, Digest, ImageStore as _, ImportLimits, IncomingBlob, import_archive,
};
use rstest::rstest;

use crate::cri::{CriClient, POD_IMAGE};
use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{PRESEED, Setup, busybox_layer, create_layer, namespace, noise_layer, pod_image};

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn containerd_images_meet_the_contract(#[values(Debian, Newest)] release: Release) {
    let daemon = Setup::new(release).start().await;
    conformance(&daemon.images().await, &"conformance".parse().unwrap()).await;
    assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]), "", "no lease remains");
    daemon.stop().await;
}

fn busybox_archive(shape: BuiltArchiveFormat) -> ArchiveBuilder {
    ArchiveBuilder::new(shape).with_image(&["localhost/busybox:1"], &busybox_layer())
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_container_runs_from_a_preseeded_image(#[values(Debian, Newest)] release: Release) {
    for shape in [BuiltArchiveFormat::OciLayoutIndexLast, BuiltArchiveFormat::DockerArchive] {
        let daemon = Setup::new(release).start().await;
        daemon.put_bundle("busybox.tar.zst", &busybox_archive(shape).to_zstd());
        daemon.import_bundles().await;
        let output = daemon.run_echo("localhost/busybox:1", "running");
        assert_eq!(output, "running\n", "{shape:?}");
        daemon.stop().await;
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn an_unchanged_bundle_is_not_read_again_and_removed_content_is_restored(
    #[values(Debian, Newest)] release: Release,
) {
    let daemon = Setup::new(release).start().await;
    daemon.put_bundle("busybox.tar", &busybox_archive(BuiltArchiveFormat::OciLayout).to_tar());
    let (preseed, images) = (daemon.preseed(), daemon.images().await);
    let mut outcomes = Vec::new();
    for pass in 0..4 {
        match pass {
            2 => drop(daemon.ctr(&["images", "rm", "--sync", "localhost/busybox:1"])),
            // Content removed without updating its image.
            3 => {
                let target = daemon.list_images().await.remove(0).target.digest;
                drop(daemon.ctr(&["content", "rm", &target.to_string()]));
            }
            _ => {}
        }
        let report = preseed.run(&images).await.unwrap();
        outcomes.push(matches!(report.outcomes[0], BundleOutcome::Imported { .. }));
        let checked = daemon.ctr(&["images", "check"]);
        assert!(checked.contains("complete (2/2)"), "{checked}");
    }
    assert_eq!(outcomes, [true, false, true, true]);
    daemon.stop().await;
}

/// As a power cut leaves them: containerd's database has what its disk has not.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn files_of_content_that_are_deleted_or_truncated_are_written_again(
    #[values(Debian, Newest)] release: Release,
) {
    let daemon = Setup::new(release).start().await;
    daemon.put_bundle("busybox.tar", &busybox_archive(BuiltArchiveFormat::OciLayout).to_tar());
    // Another namespace has the same content, and a database row for each file of it.
    let other = daemon.path("preseed/other");
    fs::create_dir_all(&other).unwrap();
    fs::copy(daemon.bundle_path("busybox.tar"), other.join("busybox.tar")).unwrap();
    let (preseed, images) = (daemon.preseed(), daemon.images().await);
    preseed.run(&images).await.unwrap();
    let blobs = daemon.layout.root_dir().join("io.containerd.content.v1.content/blobs/sha256");
    let mut damaged = 0;
    for number in 0..3 {
        for damage in ["deleted", "truncated", "emptied", "flipped"] {
            let mut files: Vec<_> =
                fs::read_dir(&blobs).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.sort();
            assert_eq!(files.len(), 3, "manifest, configuration, layer");
            let (file, mut content) = (&files[number], fs::read(&files[number]).unwrap());
            // Only documents are read on each pass, so that only there a flipped bit is seen.
            if damage == "flipped" && content.len() > 10_000 {
                continue;
            }
            fs::remove_file(file).unwrap();
            match damage {
                "truncated" => fs::write(file, &content[..content.len() / 2]).unwrap(),
                "emptied" => fs::write(file, b"").unwrap(),
                "flipped" => {
                    content[20] ^= 1;
                    fs::write(file, &content).unwrap();
                    content[20] ^= 1;
                }
                _ => {}
            }
            let report = preseed.run(&images).await.unwrap();
            assert!(report.failures().is_empty(), "{damage} {file:?}: {report:?}");
            assert_eq!(fs::read(file).unwrap(), content, "{damage} {file:?}");
            damaged += 1;
            let again = preseed.run(&images).await.unwrap();
            let is_unchanged = |outcome: &BundleOutcome| matches!(outcome, BundleOutcome::Unchanged { .. });
            assert!(again.outcomes.iter().all(is_unchanged), "{damage} {file:?}: {again:?}");
        }
    }
    assert_eq!(damaged, 11);
    // An import on request compares large layers, too.
    daemon.put_image("large.tar", "localhost/large:1", &noise_layer(5_000_000));
    preseed.run(&images).await.unwrap();
    let largest = |file: &std::path::PathBuf| fs::metadata(file).unwrap().len();
    let files = fs::read_dir(&blobs).unwrap().map(|entry| entry.unwrap().path());
    let layer = files.max_by_key(largest).unwrap();
    let content = fs::read(&layer).unwrap();
    let mut flipped = content.clone();
    flipped[100_000] ^= 1;
    fs::remove_file(&layer).unwrap();
    fs::write(&layer, flipped).unwrap();
    let bundle = daemon.bundle_path("large.tar");
    let file = fs::File::open(&bundle).unwrap();
    import_archive(
        &images.clone().with_layer_verification(),
        &namespace(),
        &bundle,
        file,
        &ImportLimits::default(),
        None,
    )
    .await
    .unwrap();
    assert!(fs::read(&layer).unwrap() == content, "the layer is written again");
    assert_eq!(daemon.run_echo("localhost/busybox:1", "running"), "running\n");
    assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]), "", "no lease remains");
    daemon.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn layers_are_unpacked_on_request(#[values(Debian, Newest)] release: Release) {
    let daemon = Setup::new(release).start().await;
    daemon.put_bundle("busybox.tar.gz", &busybox_archive(BuiltArchiveFormat::DockerArchive).to_gzip());
    let images = daemon.images().await;
    // Also if unpacking is enabled later.
    let mut read = Vec::new();
    for unpack in [false, true, true, false] {
        let report = daemon.preseed().with_unpacking(unpack).run(&images).await.unwrap();
        read.push(matches!(report.outcomes[0], BundleOutcome::Imported { .. }));
    }
    assert_eq!(read, [true, true, false, false]);
    // Snapshots survive a garbage collection.
    images.begin_import(&namespace()).await.unwrap().finish().await.unwrap();
    let snapshots = daemon.ctr(&["snapshots", "ls"]);
    let committed: BTreeSet<_> = snapshots.lines().filter(|line| line.contains("Committed")).collect();
    assert_eq!(committed.len(), 1, "{snapshots}");
    let output = daemon.run_echo("localhost/busybox:1", "running");
    assert_eq!(output, "running\n");
    daemon.stop().await;
}

/// An operator deletes images through the CRI, and through containerd's API.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_deleted_image_is_imported_again_at_once_and_then_at_most_once_in_ten_minutes(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    setup.put_bundle("pod.tar", &pod_image().to_tar());
    setup.enable_cri(ConfigVersion::default(), setup.cri());
    setup.enable_preseed();
    let daemon = setup.start().await;
    daemon.wait_ready(PRESEED, 1).await;
    CriClient::connect(&daemon.layout.socket_path()).await.remove_image(POD_IMAGE).await;
    // Waits until the image is there.
    CriClient::connect(&daemon.layout.socket_path()).await;
    daemon.wait_ready(PRESEED, 1).await;
    drop(daemon.ctr(&["images", "rm", "--sync", POD_IMAGE]));
    daemon.wait_preseed_pauses(POD_IMAGE).await;
    assert!(!daemon.ctr(&["images", "ls", "--quiet"]).contains(POD_IMAGE));
    // An operator does not wait for that.
    let archive = daemon.path("by-hand.tar");
    fs::write(&archive, pod_image().to_tar()).unwrap();
    drop(daemon.ctr(&["images", "import", archive.to_str().unwrap()]));
    daemon.wait_ready(PRESEED, 1).await;
    assert!(daemon.ctr(&["images", "ls", "--quiet"]).contains(POD_IMAGE));
    daemon.stop().await;
}

/// A docker-archive has no digests in its names: that its layer exists is known once it is written.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn an_import_keeps_a_layer_that_it_shares_with_an_image_that_is_deleted(
    #[values(Debian, Newest)] release: Release,
) {
    let daemon = Setup::new(release).start().await;
    let layer = create_layer(&[("file", b"shared")]);
    daemon.put_image("a.tar", "localhost/a:1", &layer);
    let (store, digest) = (daemon.images().await, Digest::of_content(&layer));
    daemon.preseed().run(&store).await.unwrap();
    let mut session = store.begin_import(&namespace()).await.unwrap();
    let blob = IncomingBlob { digest: None, size: layer.len() as u64, file: "layer.tar".into() };
    let mut writer = session.open_writer(&blob).await.unwrap().unwrap();
    writer.write(layer.into()).await.unwrap();
    writer.commit(&digest).await.unwrap();
    // Garbage is collected before this returns.
    daemon.ctr(&["images", "rm", "--sync", "localhost/a:1"]);
    assert!(store.content_size(&namespace(), &digest).await.unwrap().is_some(), "the session keeps it");
    session.finish().await.unwrap();
    assert_eq!(store.content_size(&namespace(), &digest).await.unwrap(), None, "no image has it");
    daemon.stop().await;
}

/// A kubelet without a network asks for the name of the pod, with the digest that it pins.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn the_cri_knows_a_preseeded_image_by_its_digest(
    #[values(Debian, Newest)] release: Release,
    #[values(false, true)] is_enabled: bool,
) {
    let mut setup = Setup::new(release);
    setup.put_bundle("pod.tar", &pod_image().to_tar());
    setup.enable_cri(ConfigVersion::default(), setup.cri());
    setup.containerd.preseed = Some(setup.preseed().with_digest_names(is_enabled));
    let daemon = setup.start().await;
    daemon.wait_ready(PRESEED, 1).await;
    let cri = CriClient::connect(&daemon.layout.socket_path()).await;
    let images = daemon.list_images().await;
    let image = images.iter().find(|image| image.name == POD_IMAGE).unwrap();
    let (repository, _) = POD_IMAGE.rsplit_once(':').unwrap();
    let digest = image.target.digest;
    for name in [format!("{repository}@{digest}"), format!("{POD_IMAGE}@{digest}")] {
        assert_eq!(cri.knows_image(&name).await, is_enabled, "{name}");
    }
    let report = daemon.preseed().with_digest_names(is_enabled).run(&daemon.images().await).await.unwrap();
    assert!(matches!(report.outcomes[0], BundleOutcome::Unchanged { .. }), "{report:?}");
    daemon.stop().await;
}
