//! A disk that is full.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use nodekeel_containerd_svc::testing::{Archive, Shape};
use nodekeel_containerd_svc::{ImageStore as _, ImportError, Outcome, Preseed, StoreError};
use nodekeel_supervisor::State;
use testbed::{Scratch, output, tools};

use crate::harness::{Daemon, Release, bundles, namespace, noise_layer, put, until};

crate::on_both!(what_has_no_room_is_told_and_touches_no_other_and_with_room_it_is_imported);

/// Reference 13, `preseed: disk full on /data`.
async fn what_has_no_room_is_told_and_touches_no_other_and_with_room_it_is_imported(release: Release) {
    let scratch = Arc::new(Scratch::new().unwrap());
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    let mount = |options: &str| {
        let mut mount = Command::new(tools::find(tools::MOUNT).unwrap());
        output(mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&data)).unwrap();
    };
    mount("size=16m");
    for (file, bytes) in [("a", 1_000_000), ("big", 20_000_000), ("z", 8_000_000)] {
        let archive =
            Archive::new(Shape::LayoutLast).image(&[&format!("localhost/{file}:1")], &noise_layer(bytes));
        put(&scratch, &format!("{file}.tar"), &archive.tar());
    }
    let daemon = Daemon::start_with(release, scratch, |_| {}).await;
    let (preseed, images) = (daemon.preseed(), daemon.images().await);
    for _ in 0..3 {
        let report = preseed.run(&images).await.unwrap();
        assert_eq!(report.retryable(), 1);
        let error = report.outcomes.iter().find_map(|outcome| match outcome {
            Outcome::Failed(error) => Some(error),
            _ => None,
        });
        let error = error.unwrap();
        assert!(error.to_string().contains("big.tar"), "{error}");
        assert!(matches!(error, ImportError::Store { source: StoreError::Full { .. }, .. }), "{error:?}");
        let names: Vec<_> =
            images.images(&namespace()).await.unwrap().into_iter().map(|image| image.name).collect();
        assert_eq!(names, ["localhost/a:1", "localhost/z:1"]);
    }
    // A service tries again until there is room.
    let directory = bundles(&daemon.scratch);
    let scratch = daemon.stop().await;
    let daemon = Daemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(Preseed::new(directory));
    })
    .await;
    let preseed = "root.containerd.preseed";
    let node = until(&daemon.supervisor, preseed, |node| node.failures >= 2).await.unwrap();
    let told = node.exits[0].exit.to_string();
    assert!(told.contains("1 bundles are to be tried again"), "{told}");
    mount("remount,size=64m");
    daemon.until(preseed, 3, State::Done).await;
    assert_eq!(daemon.ctr(&["images", "check"]).matches("complete (2/2)").count(), 3);
    daemon.stop().await;
}
