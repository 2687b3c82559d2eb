//! Archives of common tools, and invalid ones.

use std::path::Path;
use std::process::Command;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{BundleOutcome, Platform};
use rstest::rstest;
use testbed::{command_output, tools};

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{Setup, busybox_layer, noise_layer};

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn archives_of_every_tool_are_complete_and_run(#[values(Debian, Newest)] release: Release) {
    let daemon = Setup::new(release).start().await;
    let layer = busybox_layer();
    let hand = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&["localhost/hand:1"], &layer);
    daemon.put_bundle("hand.tar", &hand.to_tar());
    let from = format!("oci-archive:{}", daemon.bundle_path("hand.tar").display());
    for format in ["oci", "docker"] {
        let to = daemon.bundle_path(&format!("skopeo-{format}.tar"));
        let to = format!("{format}-archive:{}:localhost/skopeo-{format}:1", to.display());
        let mut skopeo = Command::new(tools::find_tool(tools::SKOPEO).unwrap());
        command_output(skopeo.args(["copy", "--insecure-policy", "--quiet", &from, &to])).unwrap();
    }
    // An OCI layout of umoci, and its archive of tar.
    let layout = daemon.path("layout");
    let image = format!("{}:1", layout.display());
    let umoci = |arguments: &[&str]| {
        command_output(Command::new(tools::find_tool(tools::UMOCI).unwrap()).args(arguments)).unwrap();
    };
    umoci(&["init", "--layout", layout.to_str().unwrap()]);
    umoci(&["new", "--image", &image]);
    let busybox = tools::find_tool(tools::BUSYBOX).unwrap();
    umoci(&["insert", "--image", &image, busybox.to_str().unwrap(), "/bin/busybox"]);
    let mut tar = Command::new("/bin/tar");
    tar.arg("-C").arg(&layout).arg("-cf").arg(daemon.bundle_path("umoci.tar"));
    command_output(tar.arg(".")).unwrap();
    for (shape, name) in
        [(BuiltArchiveFormat::OciLayoutIndexLast, "layout"), (BuiltArchiveFormat::DockerArchive, "docker")]
    {
        let archive = |end: &str| {
            ArchiveBuilder::new(shape).with_image(&[&format!("localhost/{name}-{end}:1")], &layer)
        };
        daemon.put_bundle(&format!("{name}.tgz"), &archive("tgz").to_gzip());
        daemon.put_bundle(&format!("{name}.tar.zst"), &archive("tar.zst").to_zstd());
    }
    let report = daemon.import_bundles().await;
    let is_imported = |outcome: &BundleOutcome| matches!(outcome, BundleOutcome::Imported { .. });
    assert!(report.outcomes.iter().all(is_imported), "{report:?}");
    let names = daemon.image_names().await;
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(names.contains(&"docker.io/library/umoci:1".to_owned()), "{names:?}");
    for name in names {
        let checked = daemon.ctr(&["images", "check", &format!("name=={name}")]);
        assert!(checked.contains(" complete ("), "{checked}");
        assert_eq!(daemon.run_echo(&name, "running"), "running\n", "{name}");
    }
    let again = daemon.import_bundles().await;
    let is_unchanged = |outcome: &BundleOutcome| matches!(outcome, BundleOutcome::Unchanged { .. });
    assert!(again.outcomes.iter().all(is_unchanged), "{again:?}");
    daemon.stop().await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn invalid_bundles_are_reported_and_affect_no_other(#[values(Debian, Newest)] release: Release) {
    let daemon = Setup::new(release).start().await;
    let layer = noise_layer(300_000);
    let archive =
        ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast).with_image(&["localhost/bad:1"], &layer);
    let complete = archive.to_tar();
    for point in 0..50 {
        let cut = &complete[..(complete.len() - 1024) * point / 50];
        daemon.put_bundle(&format!("cut-{point:02}.tar"), cut);
    }
    let other = Platform { os: "linux".into(), architecture: "s390x".into(), variant: None };
    let foreign = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout);
    let bad = [
        ("digest.tar", archive.clone().with_damaged_content(&layer)),
        ("traversal.tar", archive.clone().with_file("../../../../tmp/nodekeel-evil", b"evil")),
        ("platform.tar", foreign.with_image_for(&other, &["localhost/bad:2"], &layer)),
        ("twice.tar", archive.clone().with_image(&["localhost/bad:1"], b"another layer")),
        ("missing.tar", archive.clone().without_content(&layer)),
    ];
    for (file, archive) in &bad {
        daemon.put_bundle(file, &archive.to_tar());
    }
    for good in ["a-good", "z-good"] {
        let archive = ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive)
            .with_image(&[&format!("localhost/{good}:1")], good.as_bytes());
        daemon.put_bundle(&format!("{good}.tar"), &archive.to_tar());
    }
    let report = daemon.import_bundles().await;
    let failed = report.outcomes.iter().filter(|outcome| matches!(outcome, BundleOutcome::Failed(_))).count();
    assert_eq!((failed, report.outcomes.len()), (50 + bad.len(), 52 + bad.len()), "{report:?}");
    let names = daemon.image_names().await;
    assert_eq!(names, ["localhost/a-good:1", "localhost/z-good:1"], "no incomplete image is listed");
    let content = daemon.ctr(&["content", "ls", "--quiet"]);
    assert_eq!(content.lines().count(), 6, "nothing of the invalid bundles is kept");
    assert!(!Path::new("/tmp/nodekeel-evil").exists());
    // The complete bundle is imported.
    daemon.put_bundle("cut-25.tar", &complete);
    daemon.import_bundles().await;
    assert!(daemon.ctr(&["images", "check", "name==localhost/bad:1"]).contains("complete (2/2)"));
    daemon.stop().await;
}
