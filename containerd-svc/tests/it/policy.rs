//! Images are listed only if the policy allows them.

use std::sync::Arc;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, StoreCall};
use nodekeel_containerd_svc::{AllowList, ImageStage, Preseed, PreseedReport};

use crate::bundles::{BundleFixture, archive_of, count_outcomes, k8s_namespace};

/// A new process whose list has these entries.
async fn run_with(bundles: &BundleFixture, allowed: &[String]) -> PreseedReport {
    let allowed = allowed.iter().map(|entry| entry.parse().unwrap());
    let policy = Arc::new(AllowList::new("images.allow", allowed));
    let preseed = Preseed::new(bundles.directory.path()).with_policy(policy);
    let report = preseed.run(&bundles.store).await.unwrap();
    for state in preseed.image_states() {
        let is_refused = state.problem.as_ref().is_some_and(|problem| problem.contains(" is not allowed: "));
        // A bundle of which nothing is allowed has no images with states of their own.
        assert_eq!(state.stage == ImageStage::Refused, is_refused && state.name.is_some(), "{state:?}");
    }
    report
}

/// The entries that the failures ask for.
fn asked_entries(report: &PreseedReport) -> Vec<String> {
    let entry = |failure: &String| {
        assert!(failure.contains(" is not allowed: ") && failure.contains("images.allow"), "{failure}");
        failure.split('"').nth(1).unwrap().to_owned()
    };
    report.failures().iter().map(entry).collect()
}

#[tokio::test]
async fn only_allowed_images_are_listed_and_a_refused_one_is_named_with_its_entry() {
    for (format, is_compressed) in [
        (BuiltArchiveFormat::OciLayout, false),
        (BuiltArchiveFormat::OciLayout, true),
        (BuiltArchiveFormat::DockerArchive, false),
    ] {
        let bundles = BundleFixture::new();
        let archive = ArchiveBuilder::new(format)
            .with_image(&["localhost/a:1"], b"first")
            .with_image(&["localhost/b:1"], b"other");
        let bytes = if is_compressed { archive.to_gzip() } else { archive.to_tar() };
        bundles.put_bundle("a.tar", &bytes);
        let report = run_with(&bundles, &[]).await;
        assert_eq!((count_outcomes(&report), bundles.list_images().await), ([0, 0, 1], vec![]));
        assert!(bundles.store.content_digests(&k8s_namespace()).is_empty(), "nothing of it is kept");
        // What the first failure asks for allows that image and no other; the mark says that there is more.
        let first = asked_entries(&report);
        let report = run_with(&bundles, &first).await;
        assert_eq!(bundles.image_names().await, ["localhost/a:1"]);
        let second = asked_entries(&report);
        assert!(second[0].starts_with("localhost/b@sha256:") && second.len() == 1, "{second:?}");
        let report = run_with(&bundles, &[first, second].concat()).await;
        assert_eq!(report.failures(), [""; 0]);
        assert_eq!(bundles.image_names().await, ["localhost/a:1", "localhost/b:1"]);
    }
}

#[tokio::test]
async fn an_image_that_is_not_allowed_any_more_has_failed_by_name_and_stays() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").put_image("b.tar", "localhost/b:1", b"b");
    bundles.run_preseed().await;
    let (before, sessions) = (bundles.list_images().await, bundles.store.call_count(StoreCall::BeginImport));
    let report = run_with(&bundles, &[format!("localhost/a@{}", before[0].target.digest)]).await;
    assert_eq!(asked_entries(&report), [format!("localhost/b@{}", before[1].target.digest)]);
    assert_eq!(bundles.list_images().await, before);
    assert_eq!(bundles.store.call_count(StoreCall::BeginImport), sessions, "no bundle is read again");
}

#[tokio::test]
async fn a_name_does_not_go_over_to_an_image_that_is_not_allowed() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/same:1", b"a");
    let second = archive_of("localhost/same:1", b"b").with_image(&["localhost/other:1"], b"b");
    bundles.put_bundle("b.tar", &second.to_tar()).run_preseed().await;
    let images = bundles.list_images().await;
    let first = images.iter().find(|image| image.name == "localhost/same:1").unwrap().target.clone();
    std::fs::remove_file(bundles.path("a.tar")).unwrap();
    let report = run_with(&bundles, &[first.digest.to_string()]).await;
    assert_eq!(report.changes.len(), 0, "{report:?}");
    let images = bundles.list_images().await;
    assert_eq!(images.iter().find(|image| image.name == "localhost/same:1").unwrap().target, first);
    // Once it is allowed, it does.
    let second = images.iter().find(|image| image.name == "localhost/other:1").unwrap().target.digest;
    assert_eq!(run_with(&bundles, &[second.to_string()]).await.changes.len(), 1);
}

#[tokio::test]
async fn a_bundle_with_a_refused_image_is_read_again_only_where_the_policy_has_changed() {
    let bundles = BundleFixture::new();
    let archive = archive_of("localhost/a:1", b"a").with_image(&["localhost/b:1"], b"b");
    bundles.put_bundle("a.tar.gz", &archive.to_gzip());
    let first = asked_entries(&run_with(&bundles, &[]).await);
    let second = asked_entries(&run_with(&bundles, &first).await);
    let sessions = bundles.store.call_count(StoreCall::BeginImport);
    for _ in 0..2 {
        assert_eq!(asked_entries(&run_with(&bundles, &first).await), second, "it is still named");
    }
    assert_eq!(bundles.store.call_count(StoreCall::BeginImport), sessions, "it is not read");
    assert_eq!(run_with(&bundles, &[first, second].concat()).await.failures(), [""; 0]);
    assert_eq!(bundles.image_names().await, ["localhost/a:1", "localhost/b:1"]);
}

#[tokio::test]
async fn a_bundle_of_which_all_images_are_refused_is_not_read_again_by_the_next_process() {
    let bundles = BundleFixture::new();
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("refused.json");
    let policy = |allowed: &[String]| {
        let allowed: Vec<_> = allowed.iter().map(|entry| entry.parse().unwrap()).collect();
        Arc::new(AllowList::new("images.allow", allowed))
    };
    let next = async |allowed: &[String]| {
        let preseed = Preseed::new(bundles.directory.path()).with_policy(policy(allowed));
        preseed.set_refusal_file(&file);
        let report = preseed.run(&bundles.store).await.unwrap();
        (report, bundles.store.call_count(StoreCall::BeginImport))
    };
    let refused = archive_of("localhost/a:1", b"a").with_image(&["localhost/b:1"], b"b");
    bundles.put_bundle("a.tar.gz", &refused.to_gzip());
    bundles.put_bundle("b.tar.gz", &archive_of("localhost/UPPER:1", b"c").to_gzip());
    bundles.put_bundle("c.tar.gz", b"no archive");
    let (first, read) = next(&[]).await;
    assert_eq!(first.failures().len(), 3, "{first:?}");
    for number in 1..3 {
        let (report, again) = next(&[]).await;
        assert_eq!(report.failures(), first.failures(), "they are still named, with their reasons");
        assert_eq!(again, read + number, "only what is no archive is read again");
    }
    // The policy allows one of its images now.
    let entry = first.failures()[0].split('"').nth(1).unwrap().to_owned();
    let (report, _) = next(&[entry]).await;
    assert_eq!(bundles.image_names().await, ["localhost/a:1"], "{report:?}");
    // A bundle that has changed is read.
    bundles.put_bundle("b.tar.gz", &archive_of("localhost/lower:1", b"c").to_gzip());
    let (report, _) = next(&[]).await;
    assert!(report.failures().iter().any(|failure| failure.contains("localhost/lower:1")), "{report:?}");
}
