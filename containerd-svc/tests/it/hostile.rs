//! Archives that no tool creates.

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, fuzz_archive, fuzz_documents};
use nodekeel_containerd_svc::{
    ArchiveError, ArchivedImageError, ImportError, ImportLimits, Platform, Preseed,
};
use proptest::prelude::*;

use crate::bundles::{BundleFixture, count_outcomes};

const LAYER: &[u8] = b"a layer";

fn valid_archive(shape: BuiltArchiveFormat) -> ArchiveBuilder {
    ArchiveBuilder::new(shape).with_image(&["localhost/x:1"], LAYER)
}

fn image_error(error: ImportError) -> ArchivedImageError {
    match error {
        ImportError::Image { source, .. } => source,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_digest_mismatch_rejects_the_bundle() {
    for shape in [
        BuiltArchiveFormat::OciLayout,
        BuiltArchiveFormat::OciLayoutIndexLast,
        BuiltArchiveFormat::DockerArchive,
    ] {
        let error = image_error(
            BundleFixture::assert_rejected(&valid_archive(shape).with_damaged_content(LAYER).to_tar()).await,
        );
        assert!(matches!(error, ArchivedImageError::DigestMismatch { .. }), "{shape:?}: {error:?}");
    }
}

#[tokio::test]
async fn a_missing_layer_rejects_the_bundle() {
    for shape in [BuiltArchiveFormat::OciLayout, BuiltArchiveFormat::DockerArchive] {
        let error = image_error(
            BundleFixture::assert_rejected(&valid_archive(shape).without_content(LAYER).to_tar()).await,
        );
        assert!(matches!(error, ArchivedImageError::MissingContent { .. }), "{shape:?}: {error:?}");
    }
}

#[tokio::test]
async fn a_path_traversal_rejects_the_bundle() {
    for name in ["../../etc/passwd", "/etc/passwd", "blobs/../../x"] {
        let error = BundleFixture::assert_rejected(
            &valid_archive(BuiltArchiveFormat::OciLayout).with_file(name, b"evil").to_tar(),
        )
        .await;
        assert!(
            matches!(error, ImportError::Archive { source: ArchiveError::PathTraversal { .. }, .. }),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn an_image_for_another_platform_is_rejected_and_the_error_names_both() {
    let other = Platform { os: "linux".into(), architecture: "s390x".into(), variant: None };
    let alone =
        ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image_for(&other, &["localhost/x:1"], LAYER);
    let stated = alone.clone().with_stated_platform(&other);
    let indexed = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
        .with_image_for(&other, &[], LAYER)
        .with_stated_platform(&other)
        .wrap_in_index(&["localhost/x:1"]);
    let docker = ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive).with_image_for(
        &other,
        &["localhost/x:1"],
        LAYER,
    );
    for archive in [alone, stated, indexed, docker] {
        let text = image_error(BundleFixture::assert_rejected(&archive.to_tar()).await).to_string();
        assert!(
            text.contains("linux/s390x") && text.contains(&Platform::of_build_target().to_string()),
            "{text}"
        );
    }
}

#[tokio::test]
async fn two_images_with_one_name_are_rejected_and_one_image_twice_is_not() {
    for shape in [BuiltArchiveFormat::OciLayout, BuiltArchiveFormat::DockerArchive] {
        let error = image_error(
            BundleFixture::assert_rejected(
                &valid_archive(shape).with_image(&["localhost/x:1"], b"another").to_tar(),
            )
            .await,
        );
        assert!(matches!(error, ArchivedImageError::DuplicateName { .. }), "{error:?}");
        let bundles = BundleFixture::new();
        let twice = valid_archive(shape).with_image(&["localhost/x:1", "localhost/x:1"], LAYER);
        assert_eq!(
            count_outcomes(&bundles.put_bundle("x.tar", &twice.to_tar()).run_preseed().await),
            [1, 0, 0]
        );
    }
}

#[tokio::test]
async fn images_without_valid_names_are_rejected() {
    for shape in [BuiltArchiveFormat::OciLayout, BuiltArchiveFormat::DockerArchive] {
        let error = image_error(
            BundleFixture::assert_rejected(&ArchiveBuilder::new(shape).with_image(&[], LAYER).to_tar()).await,
        );
        assert!(matches!(error, ArchivedImageError::Unnamed), "{error:?}");
    }
    let error = image_error(
        BundleFixture::assert_rejected(
            &ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&["Not a name"], LAYER).to_tar(),
        )
        .await,
    );
    assert!(matches!(error, ArchivedImageError::InvalidName(_)), "{error:?}");
}

#[tokio::test]
async fn archives_without_images_are_rejected() {
    let empty = tar::Builder::new(Vec::new()).into_inner().unwrap();
    assert!(matches!(image_error(BundleFixture::assert_rejected(&empty).await), ArchivedImageError::NoIndex));
    for document in ["{", "[]", "{\"manifests\":7}", "null"] {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(document.len() as u64);
        tar.append_data(&mut header, "index.json", document.as_bytes()).unwrap();
        let error = image_error(BundleFixture::assert_rejected(&tar.into_inner().unwrap()).await);
        assert!(matches!(error, ArchivedImageError::InvalidDocument { .. }), "{document}: {error:?}");
    }
}

#[tokio::test]
async fn indexes_nested_beyond_the_limit_are_rejected() {
    let mut nested = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&[], LAYER);
    for _ in 0..10 {
        nested = nested.wrap_in_index(&[]);
    }
    let error =
        image_error(BundleFixture::assert_rejected(&nested.wrap_in_index(&["localhost/x:1"]).to_tar()).await);
    assert!(matches!(error, ArchivedImageError::Limit { .. }), "{error:?}");
}

#[tokio::test]
async fn a_decompression_bomb_is_rejected_at_the_limit() {
    let bundles = BundleFixture::new();
    let bomb = ArchiveBuilder::new(BuiltArchiveFormat::OciLayout)
        .with_image(&["localhost/x:1"], &vec![0; 2_000_000]);
    for (file, bytes) in
        [("a.tar.gz", bomb.to_gzip()), ("a.tar.zst", bomb.to_zstd()), ("a.tar", bomb.to_tar())]
    {
        let mut limits = ImportLimits::default();
        limits.archive_bytes = 1_000_000;
        let preseed = Preseed::new(bundles.directory.path()).with_limits(limits);
        bundles.put_bundle(file, &bytes);
        let report = preseed.run(&bundles.store).await.unwrap();
        assert_eq!(count_outcomes(&report)[0], 0, "{file}");
        assert!(format!("{report:?}").contains("Limit"), "{report:?}");
    }
    assert_eq!(bundles.store.written_bytes(), 0, "the limit applies before anything is written");
}

#[test]
fn generated_archives_pass_the_check_complete_cut_and_corrupted() {
    for shape in [
        BuiltArchiveFormat::OciLayout,
        BuiltArchiveFormat::OciLayoutIndexLast,
        BuiltArchiveFormat::DockerArchive,
    ] {
        let archive = valid_archive(shape);
        for bytes in [archive.to_tar(), archive.to_gzip(), archive.to_zstd()] {
            (0..bytes.len()).step_by(61).for_each(|length| fuzz_archive(&bytes[..length]));
            for at in (0..bytes.len()).step_by(53) {
                let mut scribbled = bytes.clone();
                scribbled[at] = scribbled[at].wrapping_add(1);
                fuzz_archive(&scribbled);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
        fuzz_archive(&bytes);
    }

    #[test]
    fn any_edit_of_an_archive_is_taken_or_refused(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20)) {
        let mut bytes = valid_archive(BuiltArchiveFormat::OciLayout).to_tar();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        fuzz_archive(&bytes);
    }

    #[test]
    fn any_text_is_a_document_or_none(text in "\\PC{0,200}", name in "[a-zA-Z0-9.:/@_-]{0,60}") {
        fuzz_documents(text.as_bytes());
        let index = serde_json::json!({"manifests": [{"digest": nodekeel_containerd_svc::Digest::of_content(b"").to_string(), "size": 0,
            "annotations": {"org.opencontainers.image.ref.name": name}}]});
        fuzz_documents(index.to_string().as_bytes());
    }
}
