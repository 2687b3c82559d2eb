//! A full disk.

use std::fs;
use std::process::Command;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{BundleOutcome, DiskReserve, ImageStoreError, ImportError};
use rstest::rstest;
use testbed::{command_output, tools};

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{Setup, create_layer, noise_layer};

/// Reference 13, `preseed: disk full on /data`.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn a_bundle_without_free_space_affects_no_other_and_is_imported_later(
    #[values(Debian, Newest)] release: Release,
) {
    let setup = Setup::new(release);
    let data = setup.path("data");
    fs::create_dir(&data).unwrap();
    let mount = |options: &str| {
        let mut mount = Command::new(tools::find_tool(tools::MOUNT).unwrap());
        command_output(mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&data)).unwrap();
    };
    mount("size=16m");
    for (name, bytes) in [("a", 1_000_000), ("big", 20_000_000), ("z", 8_000_000)] {
        setup.put_image(&format!("{name}.tar"), &format!("localhost/{name}:1"), &noise_layer(bytes));
    }
    let daemon = setup.start().await;
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
        assert_eq!(daemon.image_names().await, ["localhost/a:1", "localhost/z:1"]);
    }
    // A service keeps its reserve, and tries again until the disk has free space.
    let mut setup = Setup::in_directory(release, daemon.stop().await);
    let bundles = setup.enable_preseed();
    let daemon = setup.start().await;
    let problem = daemon.wait_problem(&bundles, "1 of 3 bundles are not imported").await;
    assert!(problem.contains("big.tar") && problem.contains("above the reserve of"), "{problem}");
    mount("remount,size=64m");
    daemon.wait_imported(&bundles).await;
    assert_eq!(daemon.ctr(&["images", "check"]).matches("complete (2/2)").count(), 3);
    daemon.stop().await;
}

/// Small archives with a layer that fills a disk once it is unpacked: with bytes, and with files.
#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn unpacking_stops_before_the_reserve_of_bytes_and_inodes(#[values(Debian, Newest)] release: Release) {
    let setup = Setup::new(release);
    let data = setup.path("data");
    fs::create_dir(&data).unwrap();
    let mut mount = Command::new(tools::find_tool(tools::MOUNT).unwrap());
    command_output(mount.args(["-t", "tmpfs", "-o", "size=48m,nr_inodes=2k", "tmpfs"]).arg(&data)).unwrap();
    let zeros = create_layer(&[("zeros", &vec![0; 100_000_000])]);
    let names: Vec<_> = (0..3000).map(|number| number.to_string()).collect();
    let files = create_layer(&names.iter().map(|name| (name.as_str(), &b""[..])).collect::<Vec<_>>());
    let small = create_layer(&[("small", &[0; 1_000_000])]);
    for (name, layer) in [("a-zeros", &zeros), ("b-files", &files), ("c-small", &small)] {
        let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_gzip_layers();
        let archive = archive.with_image(&[&format!("localhost/{name}:1")], layer);
        // The one can seek, and is judged before anything is written.
        match name {
            "a-zeros" => setup.put_bundle("a-zeros.tar", &archive.to_tar()),
            _ => setup.put_bundle(&format!("{name}.tar.gz"), &archive.to_gzip()),
        }
    }
    let daemon = setup.start().await;
    let images = daemon.images().await.with_disk(daemon.layout.root_dir(), DiskReserve::default());
    let report = daemon.preseed().with_unpacking(true).run(&images).await.unwrap();
    let failures = report.failures().join("\n");
    for part in ["a-zeros.tar", "bytes are needed", "b-files.tar.gz", "inodes are needed"] {
        assert!(failures.contains(part), "{failures}");
    }
    assert_eq!(daemon.image_names().await, ["localhost/c-small:1"]);
    assert_eq!(daemon.ctr(&["snapshots", "ls"]).lines().count(), 2, "a header and the small layer");
    let disk = rustix::fs::statvfs(&data).unwrap();
    let (bytes, inodes) = ([disk.f_bavail, disk.f_blocks], [disk.f_favail, disk.f_files]);
    assert!(bytes[0] * 5 >= bytes[1] && inodes[0] * 5 >= inodes[1], "{bytes:?} {inodes:?}");
    daemon.stop().await;
}
