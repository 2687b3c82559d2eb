//! The store, and images that run.

use std::collections::BTreeSet;

use nodekeel_containerd_svc::testing::{Archive, Shape, conformance};
use nodekeel_containerd_svc::{ImageStore as _, Outcome};

use crate::harness::{Daemon, Release, busybox_layer, namespace, put};

crate::on_both!(
    it_keeps_the_contract,
    a_container_runs_from_a_preseeded_image,
    an_unchanged_bundle_is_not_read_again_and_what_is_removed_comes_back,
    layers_are_unpacked_where_that_is_wanted,
);

async fn it_keeps_the_contract(release: Release) {
    let daemon = Daemon::start(release).await;
    conformance(&daemon.images().await, &"conformance".parse().unwrap()).await;
    assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]), "", "no lease is left");
    daemon.stop().await;
}

fn busybox(shape: Shape) -> Archive {
    Archive::new(shape).image(&["localhost/busybox:1"], &busybox_layer())
}

async fn a_container_runs_from_a_preseeded_image(release: Release) {
    for shape in [Shape::LayoutLast, Shape::Docker] {
        let daemon = Daemon::start(release).await;
        put(&daemon.scratch, "busybox.tar.zst", &busybox(shape).zstd());
        daemon.preseed().run(&daemon.images().await).await.unwrap();
        let said = daemon.say("localhost/busybox:1", "it runs");
        assert_eq!(said, "it runs\n", "{shape:?}");
        daemon.stop().await;
    }
}

async fn an_unchanged_bundle_is_not_read_again_and_what_is_removed_comes_back(release: Release) {
    let daemon = Daemon::start(release).await;
    put(&daemon.scratch, "busybox.tar", &busybox(Shape::Layout).tar());
    let (preseed, images) = (daemon.preseed(), daemon.images().await);
    let mut outcomes = Vec::new();
    for round in 0..4 {
        match round {
            2 => drop(daemon.ctr(&["images", "rm", "--sync", "localhost/busybox:1"])),
            // Content behind containerd's back is content that is not there.
            3 => {
                let target = images.images(&namespace()).await.unwrap().remove(0).target.digest;
                drop(daemon.ctr(&["content", "rm", &target.to_string()]));
            }
            _ => {}
        }
        let report = preseed.run(&images).await.unwrap();
        outcomes.push(matches!(report.outcomes[0], Outcome::Imported { .. }));
        let checked = daemon.ctr(&["images", "check"]);
        assert!(checked.contains("complete (2/2)"), "{checked}");
    }
    assert_eq!(outcomes, [true, false, true, true]);
    daemon.stop().await;
}

async fn layers_are_unpacked_where_that_is_wanted(release: Release) {
    let daemon = Daemon::start(release).await;
    put(&daemon.scratch, "busybox.tar.gz", &busybox(Shape::Docker).gzip());
    let images = daemon.images().await;
    // Also where it is wanted only later.
    let mut read = Vec::new();
    for unpack in [false, true, true, false] {
        let report = daemon.preseed().unpack(unpack).run(&images).await.unwrap();
        read.push(matches!(report.outcomes[0], Outcome::Imported { .. }));
    }
    assert_eq!(read, [true, true, false, false]);
    // A garbage collection later, what was unpacked is still there.
    images.begin(&namespace()).await.unwrap().end().await.unwrap();
    let snapshots = daemon.ctr(&["snapshots", "ls"]);
    let committed: BTreeSet<_> = snapshots.lines().filter(|line| line.contains("Committed")).collect();
    assert_eq!(committed.len(), 1, "{snapshots}");
    let said = daemon.say("localhost/busybox:1", "it runs");
    assert_eq!(said, "it runs\n");
    daemon.stop().await;
}
