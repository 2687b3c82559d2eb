//! The second version of a bundle, and bundles that are gone.

use std::fs;

use nodekeel_containerd_svc::{BundleOutcome, Image};
use rstest::rstest;

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{Setup, busybox_layer, noise_layer};

fn is_pinned(images: &[Image], name: &str) -> bool {
    let image = images.iter().find(|image| image.name == name).expect("it stays listed");
    let marks = image.labels.keys().filter(|key| key.starts_with("nodekeel.preseed/")).count();
    let pinned = image.labels.get("io.cri-containerd.pinned").map(String::as_str);
    assert_eq!(pinned.is_some(), marks > 0, "{image:?}");
    pinned == Some("pinned")
}

/// Review D1.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_second_version_is_imported_once_and_the_first_is_unpinned(
    #[values(Debian, Newest)] release: Release,
) {
    let daemon = Setup::new(release).start().await;
    let (preseed, store) = (daemon.preseed(), daemon.images().await);
    daemon.put_image("app.tar", "localhost/app:v1", &noise_layer(1000));
    preseed.run(&store).await.unwrap();
    daemon.ctr(&["images", "label", "localhost/app:v1", "mine=kept"]);
    let mut outcomes = Vec::new();
    for pass in 0..4 {
        if pass == 0 {
            daemon.put_image("app.tar", "localhost/app:v2", &noise_layer(2000));
        }
        let report = preseed.run(&store).await.unwrap();
        outcomes.push(matches!(report.outcomes[..], [BundleOutcome::Imported { .. }]));
    }
    assert_eq!(outcomes, [true, false, false, false], "imported once");
    let images = daemon.list_images().await;
    assert_eq!(
        [is_pinned(&images, "localhost/app:v1"), is_pinned(&images, "localhost/app:v2")],
        [false, true]
    );
    fs::remove_file(daemon.bundle_path("app.tar")).unwrap();
    preseed.run(&store).await.unwrap();
    let images = daemon.list_images().await;
    assert!(!is_pinned(&images, "localhost/app:v1") && !is_pinned(&images, "localhost/app:v2"));
    assert_eq!(images[0].labels.get("mine").map(String::as_str), Some("kept"), "{images:?}");
    assert_eq!(daemon.ctr(&["images", "check"]).matches("complete (2/2)").count(), 2, "nothing is removed");
    assert_eq!(daemon.ctr(&["leases", "ls", "--quiet"]), "", "no lease remains");
    daemon.stop().await;
}

/// Review D2.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_name_goes_to_the_bundle_that_remains_and_a_container_runs_it(
    #[values(Debian, Newest)] release: Release,
) {
    const NAME: &str = "localhost/same:1";
    let daemon = Setup::new(release).start().await;
    let (preseed, store) = (daemon.preseed(), daemon.images().await);
    daemon.put_image("a-old.tar", NAME, &noise_layer(1000));
    daemon.put_image("b-new.tar", NAME, &busybox_layer());
    preseed.run(&store).await.unwrap();
    let first = daemon.list_images().await;
    preseed.run(&store).await.unwrap();
    assert_eq!(daemon.list_images().await, first);
    fs::remove_file(daemon.bundle_path("a-old.tar")).unwrap();
    preseed.run(&store).await.unwrap();
    assert_eq!(daemon.run_echo(NAME, "new"), "new\n");
    let images = daemon.list_images().await;
    assert!(is_pinned(&images, NAME), "{images:?}");
    daemon.stop().await;
}
