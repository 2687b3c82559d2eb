//! Kills containerd while bundles are imported.

use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{ImageStore as _, Preseed};
use nodekeel_supervisor::RunnableState;
use testbed::ScratchDir;

use crate::harness::{Release, TestDaemon, bundle_dir, namespace, noise_layer, put_bundle};

crate::on_both!(
    a_daemon_killed_while_importing_has_every_image_in_the_end,
    what_a_killed_import_wrote_is_discarded_by_the_next_one,
);

const BUNDLES: usize = 4;
const KILLS: u64 = 20;

/// Reference 13, `preseed: daemon dies mid-import`. The import resumes after each restart of the
/// daemon, which is killed a little later each time.
async fn a_daemon_killed_while_importing_has_every_image_in_the_end(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    for number in 0..BUNDLES {
        let layer = noise_layer(8_000_000 + number);
        let name = format!("localhost/killed-{number}:1");
        put_bundle(
            &scratch,
            &format!("{number}.tar"),
            &ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
                .with_image(&[&name], &layer)
                .to_tar(),
        );
    }
    let directory = bundle_dir(&scratch);
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    let (mut kills, mut generation) = (0, 1);
    while kills < KILLS {
        daemon.wait_state("root.containerd", generation, RunnableState::Ready).await;
        // The import may finish between two kills; that is allowed.
        let ready = daemon.wait_state("root.containerd.preseed", generation, RunnableState::Ready);
        drop(tokio::time::timeout(Duration::from_millis(25 * kills), ready).await);
        daemon.kill();
        (kills, generation) = (kills + 1, generation + 1);
        daemon.wait_state("root.containerd", generation, RunnableState::Ready).await;
        let tree = daemon.supervisor.snapshot();
        let preseed = tree.iter().find(|node| *node.dn == *"root.containerd.preseed").unwrap();
        let failures = preseed.exits.iter().filter(|exit| exit.state == RunnableState::Dead);
        assert_eq!(failures.count(), 0, "only containerd fails: {preseed:#?}");
        for image in daemon.images().await.list_images(&namespace()).await.unwrap() {
            let checked = daemon.ctr(&["images", "check", &format!("name=={}", image.name)]);
            assert!(checked.contains("complete (2/2)"), "after kill {kills}: {checked}");
        }
    }
    daemon.wait_state("root.containerd.preseed", 1, RunnableState::Ready).await;
    let names: Vec<_> = daemon.images().await.list_images(&namespace()).await.unwrap();
    assert_eq!(names.len(), BUNDLES);
    let checked = daemon.ctr(&["images", "check"]);
    assert_eq!(checked.matches("complete (2/2)").count(), BUNDLES, "{checked}");
    println!("killed {kills} times");
    daemon.stop().await;
}

/// Otherwise a small disk has no space for the same bundle until the lease expires, after a day.
async fn what_a_killed_import_wrote_is_discarded_by_the_next_one(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
        .with_image(&["localhost/large:1"], &noise_layer(100_000_000));
    put_bundle(&scratch, "large.tar", &archive.to_tar());
    let directory = bundle_dir(&scratch);
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    // A lease of somebody else stays.
    daemon.ctr(&["leases", "create", "--id", "nodekeel-of-the-operator"]);
    testbed::wait_until(Duration::from_secs(60), "content in progress", || {
        anyhow::ensure!(daemon.ctr(&["content", "active"]).contains("nodekeel-"));
        Ok(())
    })
    .unwrap();
    daemon.kill();
    daemon.wait_state("root.containerd.preseed", 2, RunnableState::Ready).await;
    assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]).trim(), "nodekeel-of-the-operator");
    assert!(!daemon.ctr(&["content", "active"]).contains("nodekeel-"), "nothing is half written");
    daemon.stop().await;
}
