//! Kills containerd while bundles are imported.

use std::time::Duration;

use nodekeel_supervisor::RunnableState;
use rstest::rstest;

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{PRESEED, Setup, noise_layer};

const BUNDLES: usize = 4;
const KILLS: u64 = 20;

/// Reference 13, `preseed: daemon dies mid-import`. The import resumes after each restart of the
/// daemon, which is killed a little later each time.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_daemon_killed_while_importing_has_every_image_in_the_end(
    #[values(Debian, Newest)] release: Release,
) {
    let mut setup = Setup::new(release);
    for number in 0..BUNDLES {
        let name = format!("localhost/killed-{number}:1");
        setup.put_image(&format!("{number}.tar"), &name, &noise_layer(8_000_000 + number));
    }
    setup.enable_preseed();
    let daemon = setup.start().await;
    for kills in 0..KILLS {
        let generation = kills + 1;
        daemon.wait_ready("root.containerd", generation).await;
        // The import may finish between two kills; that is allowed.
        let ready = daemon.wait_ready(PRESEED, generation);
        drop(tokio::time::timeout(Duration::from_millis(25 * kills), ready).await);
        daemon.kill();
        daemon.wait_ready("root.containerd", generation + 1).await;
        let preseed = daemon.status(PRESEED).unwrap();
        let failures = preseed.exits.iter().filter(|exit| exit.state == RunnableState::Dead);
        assert_eq!(failures.count(), 0, "only containerd fails: {preseed:#?}");
        for name in daemon.image_names().await {
            let checked = daemon.ctr(&["images", "check", &format!("name=={name}")]);
            assert!(checked.contains("complete (2/2)"), "after kill {generation}: {checked}");
        }
    }
    daemon.wait_ready(PRESEED, 1).await;
    assert_eq!(daemon.image_names().await.len(), BUNDLES);
    let checked = daemon.ctr(&["images", "check"]);
    assert_eq!(checked.matches("complete (2/2)").count(), BUNDLES, "{checked}");
    daemon.stop().await;
}

/// Otherwise a small disk has no space for the same bundle until the lease expires, after a day.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn what_a_killed_import_wrote_is_discarded_by_the_next_one(#[values(Debian, Newest)] release: Release) {
    let mut setup = Setup::new(release);
    setup.put_image("large.tar", "localhost/large:1", &noise_layer(100_000_000));
    setup.enable_preseed();
    let daemon = setup.start().await;
    // A lease of another program stays.
    daemon.ctr(&["leases", "create", "--id", "nodekeel-of-the-operator"]);
    testbed::wait_until(Duration::from_secs(60), "content in progress", || {
        anyhow::ensure!(daemon.ctr(&["content", "active"]).contains("nodekeel-"));
        Ok(())
    })
    .unwrap();
    daemon.kill();
    daemon.wait_ready(PRESEED, 2).await;
    assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]).trim(), "nodekeel-of-the-operator");
    assert!(!daemon.ctr(&["content", "active"]).contains("nodekeel-"), "nothing is half written");
    daemon.stop().await;
}
