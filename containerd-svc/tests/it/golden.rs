//! Files and labels written by release 0.1.0 are those of this release; `testdata/golden/README.md` lists them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use nodekeel_containerd_svc::{
    Bundle, BundleAction, BundleDirectory, BundleFingerprint, CgroupDriver, ConfigVersion,
    ContainerdSettings, CriSettings, Descriptor, Digest, DirectoryLayout, Image, ImportReason,
    OomScorePolicy, Preseed, RunscSettings, RuntimeHandler, WantedBundles, plan_preseed,
};

use crate::bundles::{BundleFixture, k8s_namespace};

fn golden_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/golden").join(name)
}

/// A rendered configuration without its comments, which may be reworded.
fn without_comments(text: &str) -> String {
    text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect()
}

#[test]
fn the_configuration_for_containerd_and_gvisor_is_that_of_the_first_release() {
    let layout = DirectoryLayout::new("/var/lib/nodekeel/containerd", "/run/nodekeel/containerd").unwrap();
    let runsc = RunscSettings { platform: "kvm".into(), debug: true };
    let plain = CriSettings { oom_score: OomScorePolicy::Free, ..CriSettings::default() };
    let full = CriSettings {
        default_runtime: RuntimeHandler::Runsc,
        runsc: Some(runsc.clone()),
        cgroups: CgroupDriver::Systemd,
        oom_score: OomScorePolicy::Restricted,
        sandbox_image: Some("registry.example/pause:3.10".into()),
        cni_bin: "/usr/lib/cni".into(),
        cni_conf: "/etc/cni/other".into(),
        registries: None,
    };
    let assert_golden = |name: &str, rendered: &str| {
        let golden = fs::read_to_string(golden_path(name)).unwrap();
        assert_eq!(without_comments(rendered), without_comments(&golden), "{name}");
    };
    for (version, name) in [(ConfigVersion::V2, "v2"), (ConfigVersion::V3, "v3")] {
        for (cri, kind) in [(None, "no-cri"), (Some(&plain), "cri"), (Some(&full), "cri-full")] {
            let settings = ContainerdSettings {
                version: Some(version),
                cri: cri.cloned(),
                ..ContainerdSettings::default()
            };
            assert_golden(&format!("config-{name}-{kind}.toml"), &settings.render_toml(&layout));
        }
    }
    assert_golden("runsc.toml", &runsc.render_toml(&layout));
}

/// The images that the first release has listed after it had imported `a.tar.gz`, `packed` or `unpacked`.
fn golden_images(kind: &str) -> Vec<Image> {
    let table = fs::read_to_string(golden_path("images.tsv")).unwrap();
    let mut images: Vec<Image> = Vec::new();
    for row in table.lines() {
        match &row.split('\t').collect::<Vec<_>>()[..] {
            [of, ..] if *of != kind => {}
            [_, name, media_type, digest, size] => images.push(Image {
                name: (*name).to_owned(),
                target: Descriptor {
                    media_type: (*media_type).to_owned(),
                    digest: digest.parse().unwrap(),
                    size: size.parse().unwrap(),
                },
                labels: Default::default(),
            }),
            [_, _, key, value] => {
                images.last_mut().unwrap().labels.insert((*key).to_owned(), (*value).to_owned());
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(images.len(), 2, "{table}");
    images
}

#[test]
fn an_image_preseeded_by_the_first_release_is_not_imported_again() {
    for (kind, is_unpacked) in [("packed", false), ("unpacked", true)] {
        let images = golden_images(kind);
        let label = &images[0].labels["nodekeel.preseed/a.tar.gz"];
        let (fingerprint, _) = label.split_once(' ').unwrap();
        let fingerprint: Digest = format!("sha256:{fingerprint}").parse().unwrap();
        let plan = |fingerprint, unpack| {
            let bundle = Bundle {
                namespace: k8s_namespace(),
                directory: BundleDirectory::default(),
                file: "a.tar.gz".to_owned(),
                fingerprint: BundleFingerprint(fingerprint),
            };
            let listed = [(k8s_namespace(), 0)].into();
            let wanted = WantedBundles { bundles: vec![bundle], listed, ..WantedBundles::default() };
            let planned = plan_preseed(&wanted, &[(k8s_namespace(), images.clone())].into(), unpack);
            assert_eq!(planned.images, [], "its images stay as they are");
            planned.bundles.into_iter().map(|(_, action)| action).next().unwrap()
        };
        assert_eq!(plan(fingerprint, is_unpacked), BundleAction::Verify(images.clone()), "{kind}");
        let other = images[0].target.digest;
        assert_eq!(plan(other, is_unpacked), BundleAction::Import(ImportReason::Changed), "{kind}");
        if !is_unpacked {
            assert!(matches!(plan(fingerprint, true), BundleAction::Import(_)), "it is not unpacked");
        }
    }
}

#[tokio::test]
async fn a_bundle_is_listed_with_the_labels_of_the_first_release_and_names_in_its_marks() {
    for (kind, unpack) in [("packed", false), ("unpacked", true)] {
        let mut bundles = BundleFixture::new();
        bundles.preseed = Preseed::new(bundles.directory.path()).with_unpacking(unpack);
        bundles.put_bundle("a.tar.gz", &fs::read(golden_path("a.tar.gz")).unwrap());
        let file = fs::File::options().write(true).open(bundles.path("a.tar.gz")).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::new(1_793_491_200, 5)).unwrap();
        bundles.run_preseed().await;
        let mut listed = bundles.list_images().await;
        for Image { name, labels, .. } in &mut listed {
            let mark = labels.get_mut("nodekeel.preseed/a.tar.gz").unwrap();
            let unnamed = mark.replacen(&format!(" image={name}"), "", 1);
            assert_ne!(*mark, unnamed, "{kind}");
            *mark = unnamed;
        }
        assert_eq!(listed, golden_images(kind), "{kind}");
    }
}
