//! A table of archives, as tools write them: each is taken, skipped by name, or refused by name.

use std::fs;
use std::path::Path;
use std::process::Command;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat};
use nodekeel_containerd_svc::{BundleOutcome, Digest, Image, Platform};
use rstest::rstest;
use serde_json::{Value, json};
use testbed::command_output;
use testbed::tools::{self, Tool};

use crate::harness::Release::{self, Debian, Newest};
use crate::harness::{Setup, TestDaemon, create_layer};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// What becomes of an archive.
#[derive(Debug)]
enum Expected {
    /// These images are listed, and each of these is named as none for this node.
    Taken(&'static [&'static str], &'static [&'static str]),
    /// These images are listed, and one more is refused with this text.
    Partly(&'static [&'static str], &'static str),
    /// Nothing is listed, with this text.
    Refused(&'static str),
}

use Expected::{Partly, Refused, Taken};

/// The archives, and what becomes of them.
const TABLE: &[(&str, Expected)] = &[
    // Tools of Debian.
    ("skopeo-oci.tar", Taken(&["docker.io/library/tool-oci:1"], &[])),
    (
        "skopeo-docker.tar",
        Taken(&["docker.io/library/tool-docker:1", "docker.io/library/tool-docker:2"], &[]),
    ),
    ("skopeo-zstd-layers.tar", Taken(&["localhost/zstd-layers:1"], &[])),
    ("skopeo-unnamed.tar", Refused("no image in the image archive has a name")),
    ("umoci.tar", Taken(&["docker.io/library/umoci:1"], &[])),
    ("buildah-oci.tar", Taken(&["localhost/buildah-oci:1"], &[])),
    ("buildah-docker.tar", Taken(&["localhost/buildah-docker:1"], &[])),
    ("ctr-export.tar", Taken(&["localhost/exported:1"], &[])),
    // Packing, as k3s and RKE2 do it.
    ("k3s.tar.zst", Taken(&["docker.io/rancher/long:1"], &[])),
    ("rke2.tar.zst", Taken(&["docker.io/rancher/long:1"], &[])),
    ("packed.tar.gz", Taken(&["docker.io/rancher/long:1"], &[])),
    ("packed.tgz", Taken(&["docker.io/rancher/long:1"], &[])),
    ("packed.tar", Refused("xz")),
    // `docker save` of today, which writes an index, too, and before.
    ("docker-save-25.tar", Taken(&["docker.io/library/saved:25"], &[])),
    ("docker-save-24.tar", Taken(&["docker.io/library/saved:24"], &[])),
    // Layouts with more than images.
    ("attestations.tar", Taken(&["localhost/attested:1"], &[])),
    ("referrer.tar", Taken(&["localhost/referred:1"], &[])),
    ("artifact-type.tar", Taken(&["localhost/beside:1"], &["localhost/sbom:1"])),
    ("chart-beside.tar", Taken(&["localhost/beside:1"], &["localhost/chart:1"])),
    ("signature-beside.tar", Taken(&["localhost/beside:1"], &["localhost/beside:sha256-00.sig"])),
    ("artifact-alone.tar", Refused("no image that containerd runs")),
    ("chart-alone.tar", Refused("no image that containerd runs")),
    ("helm-package.tgz", Refused("archive of other files than images")),
    ("root-file-system.tar", Refused("no images")),
    // Names.
    ("digest.tar", Taken(&["localhost/digest@DIGEST"], &[])),
    ("tag-and-digest.tar", Taken(&["localhost/digest@DIGEST"], &[])),
    ("other-digest.tar", Partly(&["localhost/beside:1"], "localhost/other@sha256:")),
    ("upper-case.tar", Partly(&["localhost/beside:1"], "invalid image name")),
];

fn layer(content: &str) -> Vec<u8> {
    create_layer(&[("file", content.as_bytes())])
}

fn layout() -> ArchiveBuilder {
    ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({"mediaType": media_type, "digest": Digest::of_content(content).to_string(), "size": content.len()})
}

/// An archive with a manifest that has these fields and no name, or this one.
fn with_artifact(archive: ArchiveBuilder, name: Option<&str>, more: Value) -> ArchiveBuilder {
    let empty = b"{}".as_slice();
    let mut manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
        "config": descriptor("application/vnd.oci.empty.v1+json", empty),
        "layers": [descriptor("application/spdx+json", empty)]});
    manifest.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let manifest = manifest.to_string().into_bytes();
    let mut entry = descriptor(MANIFEST, &manifest);
    if let Some(artifact_type) = more.get("artifactType") {
        entry["artifactType"] = artifact_type.clone();
    }
    if let Some(name) = name {
        entry["annotations"] = json!({"org.opencontainers.image.ref.name": name});
    }
    let blob = |content: &[u8]| format!("blobs/sha256/{}", Digest::of_content(content).to_hex());
    archive.with_index_entry(entry).with_file(&blob(&manifest), &manifest).with_file(&blob(empty), empty)
}

/// An image beside which others are left out.
fn beside() -> ArchiveBuilder {
    layout().with_image(&["localhost/beside:1"], &layer("beside"))
}

/// The digest of the manifest of the only image in an archive.
fn target_of(archive: &ArchiveBuilder) -> String {
    let tar = archive.to_tar();
    let mut archive = tar::Archive::new(&tar[..]);
    let mut entries = archive.entries().unwrap().map(Result::unwrap);
    let index = entries.find(|entry| entry.path().unwrap() == Path::new("index.json")).unwrap();
    let index: Value = serde_json::from_reader(index).unwrap();
    index["manifests"][0]["digest"].as_str().unwrap().to_owned()
}

fn run(tool: Tool, arguments: &[&str]) -> String {
    command_output(Command::new(tools::find_tool(tool).unwrap()).args(arguments)).unwrap()
}

fn shell(line: &str) {
    command_output(Command::new("/bin/sh").args(["-ec", line])).unwrap();
}

fn put_tool_archives(daemon: &TestDaemon) {
    let at = |file: &str| daemon.bundle_path(file).display().to_string();
    let hand = daemon.path("hand.tar").display().to_string();
    fs::write(&hand, layout().with_image(&["localhost/hand:1"], &layer("hand")).to_tar()).unwrap();
    let skopeo = |to: &str, more: &[&str]| {
        let from = format!("oci-archive:{hand}");
        run(tools::SKOPEO, &[&["copy", "--insecure-policy", "--quiet"], more, &[&from, to]].concat());
    };
    skopeo(&format!("oci-archive:{}:docker.io/tool-oci:1", at("skopeo-oci.tar")), &[]);
    skopeo(
        &format!("docker-archive:{}:tool-docker:1", at("skopeo-docker.tar")),
        &["--additional-tag", "docker.io/library/tool-docker:2"],
    );
    skopeo(
        &format!("oci-archive:{}:localhost/zstd-layers:1", at("skopeo-zstd-layers.tar")),
        &["--dest-compress", "--dest-compress-format", "zstd"],
    );
    skopeo(&format!("oci-archive:{}", at("skopeo-unnamed.tar")), &[]);

    let umoci = daemon.path("umoci").display().to_string();
    let image = format!("{umoci}:1");
    run(tools::UMOCI, &["init", "--layout", &umoci]);
    run(tools::UMOCI, &["new", "--image", &image]);
    let file = daemon.path("file").display().to_string();
    fs::write(&file, "umoci").unwrap();
    run(tools::UMOCI, &["insert", "--image", &image, &file, "/file"]);
    shell(&format!("tar -C {umoci} -cf {} .", at("umoci.tar")));

    let store = daemon.path("buildah").display().to_string();
    let buildah = |arguments: &[&str]| {
        let (root, state) = (format!("{store}/root"), format!("{store}/run"));
        let global = ["--root", &root, "--runroot", &state, "--storage-driver", "vfs"];
        run(tools::BUILDAH, &[&global[..], arguments].concat())
    };
    let container = buildah(&["from", "scratch"]).trim().to_owned();
    buildah(&["copy", &container, &file, "/file"]);
    for (format, name) in [("oci", "buildah-oci"), ("docker", "buildah-docker")] {
        let image = format!("localhost/{name}:1");
        buildah(&["commit", "--format", format, &container, &image]);
        let to = format!("{format}-archive:{}:{image}", at(&format!("{name}.tar")));
        buildah(&["push", &image, &to]);
    }

    let exported = daemon.path("exported.tar").display().to_string();
    fs::write(&exported, layout().with_image(&["localhost/exported:1"], &layer("exported")).to_tar())
        .unwrap();
    daemon.ctr(&["images", "import", &exported]);
    // Without it, ctr 2.x may exit before the end of the file.
    let local: &[&str] = if daemon.release == Newest { &["--local"] } else { &[] };
    let to = at("ctr-export.tar");
    let export = [&["images", "export"], local, &[&to, "localhost/exported:1"]].concat();
    daemon.ctr(&export);
    daemon.ctr(&["images", "rm", "--sync", "localhost/exported:1"]);

    // More than the windows of both, and read from a pipe: else the window is that of the file.
    let long = daemon.path("long.tar").display().to_string();
    let docker = ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive);
    fs::write(
        &long,
        docker.with_image(&["rancher/long:1"], &crate::harness::noise_layer(1_000_000)).to_tar(),
    )
    .unwrap();
    let zstd = tools::find_tool(tools::ZSTD).unwrap().display().to_string();
    shell(&format!("cat {long} | {zstd} -q -T0 --long=27 -c >{}", at("k3s.tar.zst")));
    shell(&format!("cat {long} | {zstd} -q -T0 -16 --long=25 -c >{}", at("rke2.tar.zst")));
    shell(&format!("gzip -c {long} >{0} && cp {0} {1}", at("packed.tar.gz"), at("packed.tgz")));
    // The content decides, and not the suffix.
    shell(&format!("xz -0 -c {long} >{}", at("packed.tar")));
    let root = daemon.path("rootfs").display().to_string();
    shell(&format!(
        "mkdir -p {root}/etc && for i in $(seq 100); do echo $i >{root}/etc/$i; done && tar -C {root} -cf {} .",
        at("root-file-system.tar")
    ));
    let chart = daemon.path("chart").display().to_string();
    shell(&format!(
        "mkdir -p {chart}/app/templates && for i in $(seq 100); do echo $i >{chart}/app/templates/$i.yaml; done && \
         tar -C {chart} -czf {} app",
        at("helm-package.tgz")
    ));
}

fn put_built_archives(daemon: &TestDaemon) {
    let named = |name: &str, content: &str| layout().with_image(&[name], &layer(content));
    // The manifest.json of an archive that has an index, too.
    let saved = json!([{"Config": "blobs/sha256/00", "RepoTags": ["saved:25"], "Layers": []}]).to_string();
    let docker = ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive);
    let in_toto = json!({"config": descriptor(CONFIG, b"{}"),
        "layers": [descriptor("application/vnd.in-toto+json", b"{}")]});
    let attested =
        layout().with_image(&[], &layer("attested")).with_stated_platform(&Platform::of_build_target());
    let unknown = Platform { os: "unknown".into(), architecture: "unknown".into(), variant: None };
    let attested = with_artifact(attested, None, in_toto).with_stated_platform(&unknown);
    let attested = attested.wrap_in_index(&["localhost/attested:1"]);
    let sbom = json!({"artifactType": "application/spdx+json"});
    let chart = json!({"config": descriptor("application/vnd.cncf.helm.config.v1+json", b"{}"),
        "layers": [descriptor("application/vnd.cncf.helm.chart.content.v1.tar+gzip", b"{}")]});
    let signature = json!({"config": descriptor(CONFIG, b"{}"),
        "layers": [descriptor("application/vnd.dev.cosign.simplesigning.v1+json", b"{}")]});
    let referred = named("localhost/referred:1", "referred");
    let subject = json!({"artifactType": "application/spdx+json",
        "subject": {"mediaType": MANIFEST, "digest": target_of(&referred), "size": 1}});
    let digest = target_of(&named("localhost/digest:1", "digest"));
    let other = Digest::of_content(b"another");
    for (file, archive) in [
        (
            "docker-save-25.tar",
            named("docker.io/library/saved:25", "25").with_file("manifest.json", saved.as_bytes()),
        ),
        (
            "docker-save-24.tar",
            docker
                .with_image(&["saved:24"], &layer("24"))
                .with_file("00/VERSION", b"1.0")
                .with_file("00/json", b"{}"),
        ),
        ("attestations.tar", attested),
        ("referrer.tar", with_artifact(referred, None, subject)),
        ("artifact-type.tar", with_artifact(beside(), Some("localhost/sbom:1"), sbom.clone())),
        ("chart-beside.tar", with_artifact(beside(), Some("localhost/chart:1"), chart.clone())),
        ("signature-beside.tar", with_artifact(beside(), Some("localhost/beside:sha256-00.sig"), signature)),
        ("artifact-alone.tar", with_artifact(layout(), Some("localhost/sbom:1"), sbom)),
        ("chart-alone.tar", with_artifact(layout(), Some("localhost/chart:1"), chart)),
        ("digest.tar", named(&format!("localhost/digest@{digest}"), "digest")),
        ("tag-and-digest.tar", named(&format!("localhost/digest:1@{digest}"), "digest")),
        ("other-digest.tar", beside().with_image(&[&format!("localhost/other@{other}")], &layer("other"))),
        ("upper-case.tar", beside().with_image(&["localhost/Upper:1"], &layer("upper"))),
    ] {
        daemon.put_bundle(file, &archive.to_tar());
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs go, containerd, runc, skopeo, umoci, busybox and root"]
async fn each_archive_of_the_table_is_taken_skipped_by_name_or_refused_by_name(
    #[values(Debian, Newest)] release: Release,
) {
    let daemon = Setup::new(release).start().await;
    fs::create_dir_all(daemon.path("preseed/k8s.io")).unwrap();
    put_tool_archives(&daemon);
    put_built_archives(&daemon);
    let kept = daemon.path("preseed/k8s.io");
    let all = daemon.path("all");
    fs::rename(&kept, &all).unwrap();
    let mut wrong = Vec::new();
    for (file, expected) in TABLE {
        // Each alone: archives of one image would share it.
        fs::create_dir_all(&kept).unwrap();
        fs::rename(all.join(file), kept.join(file)).unwrap();
        let report = daemon.import_bundles().await;
        let outcome = report.outcomes.first().unwrap();
        let listed: Vec<_> = daemon
            .list_images()
            .await
            .iter()
            .filter(|image| is_brought(image))
            .map(|image| image.name.clone())
            .collect();
        if !is_expected(expected, outcome, &listed, &report.failures()) {
            wrong.push(format!("{file}: expected {expected:?}, and {listed:?} are listed: {outcome:?}"));
        }
        println!("{file}: {}", describe(outcome));
        fs::remove_dir_all(&kept).unwrap();
        // What it has brought is unpinned, and not that of the next one.
        fs::create_dir_all(&kept).unwrap();
        daemon.import_bundles().await;
        for name in listed {
            daemon.ctr(&["images", "rm", "--sync", &name]);
        }
    }
    let left: Vec<_> = fs::read_dir(&all).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, [""; 0], "each is in the table");
    assert!(wrong.is_empty(), "{wrong:#?}");
    daemon.stop().await;
}

fn is_brought(image: &Image) -> bool {
    image.labels.keys().any(|key| key.starts_with("nodekeel.preseed/"))
}

fn is_expected(expected: &Expected, outcome: &BundleOutcome, listed: &[String], failures: &[String]) -> bool {
    let has_listed = |names: &[&str]| {
        let is_same = |(name, listed): (&&str, &String)| match name.strip_suffix("DIGEST") {
            Some(start) => listed.starts_with(start) && listed.contains("@sha256:"),
            None => listed == name,
        };
        names.len() == listed.len() && names.iter().zip(listed).all(is_same)
    };
    match (expected, outcome) {
        (Taken(names, skipped), BundleOutcome::Imported { left_out, .. }) => {
            let named: Vec<_> =
                left_out.iter().filter(|image| image.is_foreign()).map(|image| &image.name[..]).collect();
            has_listed(names) && named == *skipped && failures.is_empty()
        }
        (Partly(names, text), BundleOutcome::Imported { .. }) => {
            has_listed(names) && matches!(failures, [failure] if failure.contains(text))
        }
        (Refused(text), BundleOutcome::Failed(error)) => {
            listed.is_empty()
                && !error.is_retryable()
                && matches!(failures, [failure] if failure.contains(text))
        }
        _ => false,
    }
}

fn describe(outcome: &BundleOutcome) -> String {
    match outcome {
        BundleOutcome::Imported { images, left_out, .. } => {
            let left_out: Vec<_> = left_out.iter().map(ToString::to_string).collect();
            format!("taken: {images:?}, left out: {left_out:?}")
        }
        other => format!("{other:?}"),
    }
}
