//! A full disk.

use std::fs;
use std::process::Command;
use std::sync::Arc;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{BundleOutcome, ImageStore as _, ImageStoreError, ImportError, Preseed};
use testbed::{ScratchDir, command_output, tools};

use crate::harness::{Release, TestDaemon, bundle_dir, namespace, noise_layer, put_bundle, wait_node};

crate::on_both!(a_bundle_without_free_space_affects_no_other_and_is_imported_later);

/// Reference 13, `preseed: disk full on /data`.
async fn a_bundle_without_free_space_affects_no_other_and_is_imported_later(release: Release) {
    let scratch = Arc::new(ScratchDir::new().unwrap());
    let data = scratch.path().join("data");
    fs::create_dir(&data).unwrap();
    let mount = |options: &str| {
        let mut mount = Command::new(tools::find_tool(tools::MOUNT).unwrap());
        command_output(mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&data)).unwrap();
    };
    mount("size=16m");
    for (file, bytes) in [("a", 1_000_000), ("big", 20_000_000), ("z", 8_000_000)] {
        let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
            .with_image(&[&format!("localhost/{file}:1")], &noise_layer(bytes));
        put_bundle(&scratch, &format!("{file}.tar"), &archive.to_tar());
    }
    let daemon = TestDaemon::start_with(release, scratch, |_| {}).await;
    let (preseed, images) = (daemon.preseed(), daemon.images().await);
    for _ in 0..3 {
        let report = preseed.run(&images).await.unwrap();
        assert_eq!(report.retryable_count(), 1);
        let error = report.outcomes.iter().find_map(|outcome| match outcome {
            BundleOutcome::Failed(error) => Some(error),
            _ => None,
        });
        let error = error.unwrap();
        assert!(error.to_string().contains("big.tar"), "{error}");
        assert!(
            matches!(error, ImportError::Store { source: ImageStoreError::NoSpace { .. }, .. }),
            "{error:?}"
        );
        let names: Vec<_> =
            images.list_images(&namespace()).await.unwrap().into_iter().map(|image| image.name).collect();
        assert_eq!(names, ["localhost/a:1", "localhost/z:1"]);
    }
    // A service keeps its reserve, and tries again until the disk has free space.
    let bundles = Preseed::new(bundle_dir(&daemon.scratch));
    let scratch = daemon.stop().await;
    let daemon = TestDaemon::start_with(release, scratch, |containerd| {
        containerd.preseed = Some(bundles.clone());
    })
    .await;
    let preseed = "root.containerd.preseed";
    let node = wait_node(&daemon.supervisor, preseed, |node| node.failures >= 2).await.unwrap();
    let exit = node.exits[0].exit.to_string();
    assert!(exit.contains("1 of 3 bundles are not imported") && exit.contains("big.tar"), "{exit}");
    assert!(exit.contains("above the reserve of"), "{exit}");
    mount("remount,size=64m");
    daemon.wait_imported(&bundles).await;
    assert_eq!(daemon.ctr(&["images", "check"]).matches("complete (2/2)").count(), 3);
    daemon.stop().await;
}
