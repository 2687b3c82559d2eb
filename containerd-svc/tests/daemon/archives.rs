//! Archives by the tools that people have, and bad ones.

use std::path::{Path, PathBuf};
use std::process::Command;

use nodekeel_containerd_svc::testing::{Archive, Shape};
use nodekeel_containerd_svc::{ImageStore as _, Outcome, Platform};
use testbed::{output, tools};

use crate::harness::{Daemon, Release, bundles, busybox_layer, namespace, noise_layer, put};

crate::on_both!(archives_of_every_tool_are_whole_and_run, bad_bundles_are_told_and_touch_no_other);

fn skopeo(from: &str, to: &str) {
    let mut command = Command::new(tools::find(tools::SKOPEO).unwrap());
    command.args(["copy", "--insecure-policy", "--quiet", from, to]);
    output(&mut command).unwrap();
}

/// A layout by umoci, and its archive by tar.
fn umoci(scratch: &Path, archive: &Path) {
    let layout = scratch.join("layout");
    let image = format!("{}:1", layout.display());
    let umoci = |arguments: &[&str]| {
        output(Command::new(tools::find(tools::UMOCI).unwrap()).args(arguments)).unwrap();
    };
    umoci(&["init", "--layout", layout.to_str().unwrap()]);
    umoci(&["new", "--image", &image]);
    let busybox = tools::find(tools::BUSYBOX).unwrap();
    umoci(&["insert", "--image", &image, busybox.to_str().unwrap(), "/bin/busybox"]);
    let mut tar = Command::new("/bin/tar");
    output(tar.arg("-C").arg(&layout).arg("-cf").arg(archive).arg(".")).unwrap();
}

async fn archives_of_every_tool_are_whole_and_run(release: Release) {
    let daemon = Daemon::start(release).await;
    let layer = busybox_layer();
    put(&daemon.scratch, "hand.tar", &Archive::new(Shape::Layout).image(&["localhost/hand:1"], &layer).tar());
    let directory = bundles(&daemon.scratch).join("k8s.io");
    let at = |file: &str| -> PathBuf { directory.join(file) };
    let from = format!("oci-archive:{}", at("hand.tar").display());
    skopeo(&from, &format!("oci-archive:{}:localhost/skopeo-oci:1", at("skopeo-oci.tar").display()));
    skopeo(&from, &format!("docker-archive:{}:localhost/skopeo-docker:1", at("skopeo-docker.tar").display()));
    umoci(daemon.scratch.path(), &at("umoci.tar"));
    for (shape, name) in [(Shape::LayoutLast, "layout"), (Shape::Docker, "docker")] {
        let named = |end: &str| {
            let image = format!("localhost/{name}-{end}:1");
            (format!("{name}.{end}"), Archive::new(shape).image(&[&image], &layer))
        };
        let (file, archive) = named("tgz");
        put(&daemon.scratch, &file, &archive.gzip());
        let (file, archive) = named("tar.zst");
        put(&daemon.scratch, &file, &archive.zstd());
    }
    let images = daemon.images().await;
    let report = daemon.preseed().run(&images).await.unwrap();
    assert!(report.outcomes.iter().all(|outcome| matches!(outcome, Outcome::Imported { .. })), "{report:?}");
    let names: Vec<_> =
        images.images(&namespace()).await.unwrap().into_iter().map(|image| image.name).collect();
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(names.contains(&"docker.io/library/umoci:1".to_owned()), "{names:?}");
    for name in names {
        let checked = daemon.ctr(&["images", "check", &format!("name=={name}")]);
        assert!(checked.contains(" complete ("), "{checked}");
        let said = daemon.say(&name, "it runs");
        assert_eq!(said, "it runs\n", "{name}");
    }
    let again = daemon.preseed().run(&images).await.unwrap();
    assert!(again.outcomes.iter().all(|outcome| matches!(outcome, Outcome::Unchanged { .. })), "{again:?}");
    daemon.stop().await;
}

async fn bad_bundles_are_told_and_touch_no_other(release: Release) {
    let daemon = Daemon::start(release).await;
    let images = daemon.images().await;
    let layer = noise_layer(300_000);
    let archive = Archive::new(Shape::LayoutLast).image(&["localhost/bad:1"], &layer);
    let whole = archive.tar();
    for point in 0..50 {
        put(&daemon.scratch, &format!("cut-{point:02}.tar"), &whole[..(whole.len() - 1024) * point / 50]);
    }
    let other = Platform { os: "linux".into(), architecture: "s390x".into(), variant: None };
    let bad = [
        ("digest.tar", archive.clone().damaged(&layer)),
        ("traversal.tar", archive.clone().file("../../../../tmp/nodekeel-evil", b"evil")),
        ("platform.tar", Archive::new(Shape::Layout).image_for(&other, &["localhost/bad:2"], &layer)),
        ("twice.tar", archive.clone().image(&["localhost/bad:1"], b"another layer")),
        ("missing.tar", archive.clone().without(&layer)),
    ];
    for (file, archive) in &bad {
        put(&daemon.scratch, file, &archive.tar());
    }
    for good in ["a-good", "z-good"] {
        let name = format!("localhost/{good}:1");
        put(
            &daemon.scratch,
            &format!("{good}.tar"),
            &Archive::new(Shape::Docker).image(&[&name], good.as_bytes()).tar(),
        );
    }
    let report = daemon.preseed().run(&images).await.unwrap();
    let failed = report.outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Failed(_))).count();
    assert_eq!((failed, report.outcomes.len()), (50 + bad.len(), 52 + bad.len()), "{report:?}");
    let mut names: Vec<_> =
        images.images(&namespace()).await.unwrap().into_iter().map(|image| image.name).collect();
    names.sort();
    assert_eq!(names, ["localhost/a-good:1", "localhost/z-good:1"], "nothing is listed half");
    assert_eq!(
        daemon.ctr(&["content", "ls", "--quiet"]).lines().count(),
        6,
        "nothing of the bad ones is kept"
    );
    assert!(!Path::new("/tmp/nodekeel-evil").exists());
    // The whole one mends it.
    put(&daemon.scratch, "cut-25.tar", &whole);
    daemon.preseed().run(&images).await.unwrap();
    assert!(daemon.ctr(&["images", "check", "name==localhost/bad:1"]).contains("complete (2/2)"));
    daemon.stop().await;
}
