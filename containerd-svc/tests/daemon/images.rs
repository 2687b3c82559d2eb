//! The image store, and containers of its images.

use std::collections::BTreeSet;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, conformance};
use nodekeel_containerd_svc::{BundleOutcome, ImageStore as _};

use crate::harness::{Release, TestDaemon, busybox_layer, namespace, put_bundle};

crate::on_both!(
    containerd_images_meet_the_contract,
    a_container_runs_from_a_preseeded_image,
    an_unchanged_bundle_is_not_read_again_and_removed_content_is_restored,
    layers_are_unpacked_on_request,
);

async fn containerd_images_meet_the_contract(release: Release) {
    let daemon = TestDaemon::start(release).await;
    conformance(&daemon.images().await, &"conformance".parse().unwrap()).await;
    assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]), "", "no lease remains");
    daemon.stop().await;
}

fn busybox_archive(shape: BuiltArchiveFormat) -> ArchiveBuilder {
    ArchiveBuilder::new(shape).with_image(&["localhost/busybox:1"], &busybox_layer())
}

async fn a_container_runs_from_a_preseeded_image(release: Release) {
    for shape in [BuiltArchiveFormat::OciLayoutIndexLast, BuiltArchiveFormat::DockerArchive] {
        let daemon = TestDaemon::start(release).await;
        put_bundle(&daemon.scratch, "busybox.tar.zst", &busybox_archive(shape).to_zstd());
        daemon.preseed().run(&daemon.images().await).await.unwrap();
        let output = daemon.run_echo("localhost/busybox:1", "running");
        assert_eq!(output, "running\n", "{shape:?}");
        daemon.stop().await;
    }
}

async fn an_unchanged_bundle_is_not_read_again_and_removed_content_is_restored(release: Release) {
    let daemon = TestDaemon::start(release).await;
    put_bundle(&daemon.scratch, "busybox.tar", &busybox_archive(BuiltArchiveFormat::OciLayout).to_tar());
    let (preseed, images) = (daemon.preseed(), daemon.images().await);
    let mut outcomes = Vec::new();
    for pass in 0..4 {
        match pass {
            2 => drop(daemon.ctr(&["images", "rm", "--sync", "localhost/busybox:1"])),
            // Content removed without updating its image.
            3 => {
                let target = images.list_images(&namespace()).await.unwrap().remove(0).target.digest;
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

async fn layers_are_unpacked_on_request(release: Release) {
    let daemon = TestDaemon::start(release).await;
    put_bundle(
        &daemon.scratch,
        "busybox.tar.gz",
        &busybox_archive(BuiltArchiveFormat::DockerArchive).to_gzip(),
    );
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
