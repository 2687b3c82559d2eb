//! Archives that nobody's tool makes.

use nodekeel_containerd_svc::testing::{Archive, Shape, check_archive, check_documents};
use nodekeel_containerd_svc::{ImageError, ImportError, Limits, Platform, Preseed, StreamError};
use proptest::prelude::*;

use crate::bundles::{Bundles, counts};

const LAYER: &[u8] = b"a layer";

fn archive(shape: Shape) -> Archive {
    Archive::new(shape).image(&["localhost/x:1"], LAYER)
}

fn image(error: ImportError) -> ImageError {
    match error {
        ImportError::Image { source, .. } => source,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_wrong_digest_is_found() {
    for shape in [Shape::Layout, Shape::LayoutLast, Shape::Docker] {
        let error = image(Bundles::refused(&archive(shape).damaged(LAYER).tar()).await);
        assert!(matches!(error, ImageError::Digest { .. }), "{shape:?}: {error:?}");
    }
}

#[tokio::test]
async fn a_missing_layer_is_found() {
    for shape in [Shape::Layout, Shape::Docker] {
        let error = image(Bundles::refused(&archive(shape).without(LAYER).tar()).await);
        assert!(matches!(error, ImageError::Missing { .. }), "{shape:?}: {error:?}");
    }
}

#[tokio::test]
async fn a_name_that_leads_out_refuses_the_bundle() {
    for name in ["../../etc/passwd", "/etc/passwd", "blobs/../../x"] {
        let error = Bundles::refused(&archive(Shape::Layout).file(name, b"evil").tar()).await;
        assert!(matches!(error, ImportError::Stream { source: StreamError::Name { .. }, .. }), "{error:?}");
    }
}

#[tokio::test]
async fn an_image_for_another_machine_is_refused_with_both_platforms() {
    let other = Platform { os: "linux".into(), architecture: "s390x".into(), variant: None };
    let alone = Archive::new(Shape::Layout).image_for(&other, &["localhost/x:1"], LAYER);
    let stated = alone.clone().stated(&other);
    let indexed = Archive::new(Shape::Layout)
        .image_for(&other, &[], LAYER)
        .stated(&other)
        .into_index(&["localhost/x:1"]);
    let docker = Archive::new(Shape::Docker).image_for(&other, &["localhost/x:1"], LAYER);
    for archive in [alone, stated, indexed, docker] {
        let text = image(Bundles::refused(&archive.tar()).await).to_string();
        assert!(
            text.contains("linux/s390x") && text.contains(&Platform::of_this_machine().to_string()),
            "{text}"
        );
    }
}

#[tokio::test]
async fn different_images_of_one_name_are_refused_and_the_same_one_twice_is_not() {
    for shape in [Shape::Layout, Shape::Docker] {
        let error =
            image(Bundles::refused(&archive(shape).image(&["localhost/x:1"], b"another").tar()).await);
        assert!(matches!(error, ImageError::Duplicate { .. }), "{error:?}");
        let bundles = Bundles::new();
        let twice = archive(shape).image(&["localhost/x:1", "localhost/x:1"], LAYER);
        assert_eq!(counts(&bundles.put("x.tar", &twice.tar()).run().await), [1, 0, 0]);
    }
}

#[tokio::test]
async fn images_without_names_can_not_be_found() {
    for shape in [Shape::Layout, Shape::Docker] {
        let error = image(Bundles::refused(&Archive::new(shape).image(&[], LAYER).tar()).await);
        assert!(matches!(error, ImageError::Unnamed), "{error:?}");
    }
    let error =
        image(Bundles::refused(&Archive::new(Shape::Layout).image(&["Not a name"], LAYER).tar()).await);
    assert!(matches!(error, ImageError::Name(_)), "{error:?}");
}

#[tokio::test]
async fn what_is_no_archive_of_images_is_told() {
    let empty = tar::Builder::new(Vec::new()).into_inner().unwrap();
    assert!(matches!(image(Bundles::refused(&empty).await), ImageError::Empty));
    for document in ["{", "[]", "{\"manifests\":7}", "null", "{\"manifests\":[{\"digest\":\"sha256:0\"}]}"] {
        let mut tar = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(document.len() as u64);
        tar.append_data(&mut header, "index.json", document.as_bytes()).unwrap();
        let error = image(Bundles::refused(&tar.into_inner().unwrap()).await);
        assert!(matches!(error, ImageError::Document { .. }), "{document}: {error:?}");
    }
}

#[tokio::test]
async fn an_index_within_indexes_without_end_is_given_up() {
    let mut nested = Archive::new(Shape::Layout).image(&[], LAYER);
    for _ in 0..10 {
        nested = nested.into_index(&[]);
    }
    let error = image(Bundles::refused(&nested.into_index(&["localhost/x:1"]).tar()).await);
    assert!(matches!(error, ImageError::Limit { .. }), "{error:?}");
}

#[tokio::test]
async fn a_bomb_is_given_up_at_the_limit() {
    let bundles = Bundles::new();
    let bomb = Archive::new(Shape::Layout).image(&["localhost/x:1"], &vec![0; 2_000_000]);
    for (file, bytes) in [("a.tar.gz", bomb.gzip()), ("a.tar.zst", bomb.zstd()), ("a.tar", bomb.tar())] {
        let mut limits = Limits::default();
        limits.archive_bytes = 1_000_000;
        let preseed = Preseed::new(bundles.directory.path()).limits(limits);
        bundles.put(file, &bytes);
        let report = preseed.run(&bundles.store).await.unwrap();
        assert_eq!(counts(&report)[0], 0, "{file}");
        assert!(format!("{report:?}").contains("Limit"), "{report:?}");
    }
    assert_eq!(bundles.store.written(), 0, "it is seen before anything is written");
}

#[test]
fn archives_made_by_hand_pass_the_check_whole_cut_and_scribbled_on() {
    for shape in [Shape::Layout, Shape::LayoutLast, Shape::Docker] {
        let archive = archive(shape);
        for bytes in [archive.tar(), archive.gzip(), archive.zstd()] {
            (0..bytes.len()).step_by(61).for_each(|length| check_archive(&bytes[..length]));
            for at in (0..bytes.len()).step_by(53) {
                let mut scribbled = bytes.clone();
                scribbled[at] = scribbled[at].wrapping_add(1);
                check_archive(&scribbled);
            }
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
        check_archive(&bytes);
    }

    #[test]
    fn any_edit_of_an_archive_is_taken_or_refused(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20)) {
        let mut bytes = archive(Shape::Layout).tar();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        check_archive(&bytes);
    }

    #[test]
    fn any_text_is_a_document_or_none(text in "\\PC{0,200}", name in "[a-zA-Z0-9.:/@_-]{0,60}") {
        check_documents(text.as_bytes());
        let index = serde_json::json!({"manifests": [{"digest": nodekeel_containerd_svc::Digest::of(b"").to_string(), "size": 0,
            "annotations": {"org.opencontainers.image.ref.name": name}}]});
        check_documents(index.to_string().as_bytes());
    }
}
