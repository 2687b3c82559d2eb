//! Archives of common tools, and invalid ones.

use std::path::{Path, PathBuf};
use std::process::Command;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{BundleOutcome, ImageStore as _, Platform};
use testbed::{command_output, tools};

use crate::harness::{Release, TestDaemon, bundle_dir, busybox_layer, namespace, noise_layer, put_bundle};

crate::on_both!(
    archives_of_every_tool_are_complete_and_run,
    invalid_bundles_are_reported_and_affect_no_other
);

fn copy_with_skopeo(from: &str, to: &str) {
    let mut command = Command::new(tools::find_tool(tools::SKOPEO).unwrap());
    command.args(["copy", "--insecure-policy", "--quiet", from, to]);
    command_output(&mut command).unwrap();
}

/// Creates an OCI layout with umoci, and its archive with tar.
fn build_with_umoci(scratch: &Path, archive: &Path) {
    let layout = scratch.join("layout");
    let image = format!("{}:1", layout.display());
    let umoci = |arguments: &[&str]| {
        command_output(Command::new(tools::find_tool(tools::UMOCI).unwrap()).args(arguments)).unwrap();
    };
    umoci(&["init", "--layout", layout.to_str().unwrap()]);
    umoci(&["new", "--image", &image]);
    let busybox = tools::find_tool(tools::BUSYBOX).unwrap();
    umoci(&["insert", "--image", &image, busybox.to_str().unwrap(), "/bin/busybox"]);
    let mut tar = Command::new("/bin/tar");
    command_output(tar.arg("-C").arg(&layout).arg("-cf").arg(archive).arg(".")).unwrap();
}

async fn archives_of_every_tool_are_complete_and_run(release: Release) {
    let daemon = TestDaemon::start(release).await;
    let layer = busybox_layer();
    put_bundle(
        &daemon.scratch,
        "hand.tar",
        &ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
            .with_image(&["localhost/hand:1"], &layer)
            .to_tar(),
    );
    let directory = bundle_dir(&daemon.scratch).join("k8s.io");
    let at = |file: &str| -> PathBuf { directory.join(file) };
    let from = format!("oci-archive:{}", at("hand.tar").display());
    copy_with_skopeo(
        &from,
        &format!("oci-archive:{}:localhost/skopeo-oci:1", at("skopeo-oci.tar").display()),
    );
    copy_with_skopeo(
        &from,
        &format!("docker-archive:{}:localhost/skopeo-docker:1", at("skopeo-docker.tar").display()),
    );
    build_with_umoci(daemon.scratch.path(), &at("umoci.tar"));
    for (shape, name) in
        [(BuiltArchiveFormat::OciLayoutIndexLast, "layout"), (BuiltArchiveFormat::DockerArchive, "docker")]
    {
        let named = |end: &str| {
            let image = format!("localhost/{name}-{end}:1");
            (format!("{name}.{end}"), ArchiveBuilder::new(shape).with_image(&[&image], &layer))
        };
        let (file, archive) = named("tgz");
        put_bundle(&daemon.scratch, &file, &archive.to_gzip());
        let (file, archive) = named("tar.zst");
        put_bundle(&daemon.scratch, &file, &archive.to_zstd());
    }
    let images = daemon.images().await;
    let report = daemon.preseed().run(&images).await.unwrap();
    assert!(
        report.outcomes.iter().all(|outcome| matches!(outcome, BundleOutcome::Imported { .. })),
        "{report:?}"
    );
    let names: Vec<_> =
        images.list_images(&namespace()).await.unwrap().into_iter().map(|image| image.name).collect();
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(names.contains(&"docker.io/library/umoci:1".to_owned()), "{names:?}");
    for name in names {
        let checked = daemon.ctr(&["images", "check", &format!("name=={name}")]);
        assert!(checked.contains(" complete ("), "{checked}");
        let output = daemon.run_echo(&name, "running");
        assert_eq!(output, "running\n", "{name}");
    }
    let again = daemon.preseed().run(&images).await.unwrap();
    assert!(
        again.outcomes.iter().all(|outcome| matches!(outcome, BundleOutcome::Unchanged { .. })),
        "{again:?}"
    );
    daemon.stop().await;
}

async fn invalid_bundles_are_reported_and_affect_no_other(release: Release) {
    let daemon = TestDaemon::start(release).await;
    let images = daemon.images().await;
    let layer = noise_layer(300_000);
    let archive =
        ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast).with_image(&["localhost/bad:1"], &layer);
    let complete = archive.to_tar();
    for point in 0..50 {
        put_bundle(
            &daemon.scratch,
            &format!("cut-{point:02}.tar"),
            &complete[..(complete.len() - 1024) * point / 50],
        );
    }
    let other = Platform { os: "linux".into(), architecture: "s390x".into(), variant: None };
    let bad = [
        ("digest.tar", archive.clone().with_damaged_content(&layer)),
        ("traversal.tar", archive.clone().with_file("../../../../tmp/nodekeel-evil", b"evil")),
        (
            "platform.tar",
            ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image_for(
                &other,
                &["localhost/bad:2"],
                &layer,
            ),
        ),
        ("twice.tar", archive.clone().with_image(&["localhost/bad:1"], b"another layer")),
        ("missing.tar", archive.clone().without_content(&layer)),
    ];
    for (file, archive) in &bad {
        put_bundle(&daemon.scratch, file, &archive.to_tar());
    }
    for good in ["a-good", "z-good"] {
        let name = format!("localhost/{good}:1");
        put_bundle(
            &daemon.scratch,
            &format!("{good}.tar"),
            &ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive)
                .with_image(&[&name], good.as_bytes())
                .to_tar(),
        );
    }
    let report = daemon.preseed().run(&images).await.unwrap();
    let failed = report.outcomes.iter().filter(|outcome| matches!(outcome, BundleOutcome::Failed(_))).count();
    assert_eq!((failed, report.outcomes.len()), (50 + bad.len(), 52 + bad.len()), "{report:?}");
    let mut names: Vec<_> =
        images.list_images(&namespace()).await.unwrap().into_iter().map(|image| image.name).collect();
    names.sort();
    assert_eq!(names, ["localhost/a-good:1", "localhost/z-good:1"], "no incomplete image is listed");
    assert_eq!(
        daemon.ctr(&["content", "ls", "--quiet"]).lines().count(),
        6,
        "nothing of the invalid bundles is kept"
    );
    assert!(!Path::new("/tmp/nodekeel-evil").exists());
    // The complete bundle is imported.
    put_bundle(&daemon.scratch, "cut-25.tar", &complete);
    daemon.preseed().run(&images).await.unwrap();
    assert!(daemon.ctr(&["images", "check", "name==localhost/bad:1"]).contains("complete (2/2)"));
    daemon.stop().await;
}
