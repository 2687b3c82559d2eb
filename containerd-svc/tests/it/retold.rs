//! What a second round does.

use nodekeel_containerd_svc::testing::{Archive, Call, Shape};
use nodekeel_containerd_svc::{ImageStore as _, Outcome};

use crate::bundles::{Bundles, counts, k8s};

fn archive(layer: &[u8]) -> Vec<u8> {
    Archive::new(Shape::LayoutLast).image(&["localhost/a:1", "localhost/a:2"], layer).tar()
}

#[tokio::test]
async fn an_unchanged_bundle_that_is_present_is_not_read_again() {
    let bundles = Bundles::new();
    bundles.put("a.tar", &archive(b"1")).run().await;
    let begun = bundles.store.calls(Call::Begin);
    for _ in 0..3 {
        assert_eq!(counts(&bundles.run().await), [0, 1, 0]);
    }
    assert_eq!(bundles.store.calls(Call::Begin), begun);
}

#[tokio::test]
async fn a_changed_bundle_is_read() {
    let bundles = Bundles::new();
    bundles.put("a.tar", &archive(b"1")).run().await;
    let first = bundles.store.images(&k8s()).await.unwrap();
    assert_eq!(counts(&bundles.put("a.tar", &archive(b"2")).run().await), [1, 0, 0]);
    assert_ne!(bundles.store.images(&k8s()).await.unwrap()[0].target, first[0].target);
}

#[tokio::test]
async fn what_is_gone_is_brought_back() {
    let bundles = Bundles::new();
    bundles.put("a.tar", &archive(b"1")).run().await;
    bundles.store.remove(&k8s(), "localhost/a:2");
    assert_eq!(counts(&bundles.run().await), [1, 0, 0], "one of its images");
    for digest in bundles.store.content(&k8s()) {
        bundles.store.lose(&k8s(), &digest);
        assert_eq!(counts(&bundles.run().await), [1, 0, 0], "content behind everybody's back");
        assert_eq!(counts(&bundles.run().await), [0, 1, 0]);
    }
    assert_eq!(bundles.names().await, ["localhost/a:1", "localhost/a:2"]);
}

/// Reference 13, `preseed: tar truncated`: it is known to be bad, and the others go on.
#[tokio::test]
async fn what_is_bad_is_read_once_and_again_when_it_has_changed() {
    let bundles = Bundles::new();
    bundles.put("a.tar", b"scribble").put("b.tar", &archive(b"1"));
    assert_eq!(counts(&bundles.run().await), [1, 0, 1]);
    let report = bundles.run().await;
    assert!(
        matches!(&report.outcomes[0], Outcome::KnownBad { bundle } if bundle.file == "a.tar"),
        "{report:?}"
    );
    assert_eq!(counts(&bundles.put("a.tar", &archive(b"2")).run().await)[2], 0);
}

#[tokio::test]
async fn content_that_two_bundles_share_is_written_once() {
    let layer = vec![1; 530_000];
    let bundles = Bundles::new();
    for name in ["a", "b"] {
        bundles.put(&format!("{name}.tar"), &Archive::new(Shape::Layout).image(&[name], &layer).tar());
    }
    bundles.run().await;
    assert!(bundles.store.written() < 600_000, "{}", bundles.store.written());
    assert_eq!(bundles.names().await.len(), 2);
}

#[tokio::test]
async fn a_bundle_that_lacks_what_another_brings_is_imported_after_that_one() {
    let layer = vec![7; 5_000];
    let whole = |name: &str| Archive::new(Shape::Layout).image(&[name], &layer);
    let bundles = Bundles::new();
    bundles.put("a.tar", &whole("a").without(&layer).tar());
    assert_eq!(counts(&bundles.run().await), [0, 0, 1]);
    let begun = bundles.store.calls(Call::Begin);
    assert!(matches!(bundles.run().await.outcomes[..], [Outcome::KnownBad { .. }]));
    assert_eq!(bundles.store.calls(Call::Begin), begun, "it is not read in vain");
    assert_eq!(counts(&bundles.put("b.tar", &whole("b").tar()).run().await), [2, 0, 0]);
    assert_eq!(counts(&bundles.run().await), [0, 2, 0]);
    assert_eq!(bundles.names().await, ["docker.io/library/a:a", "docker.io/library/b:b"]);
}
