//! The state of each image of the bundles.

use std::fs;
use std::time::Duration;

use nodekeel_containerd_svc::testing::StoreCall;
use nodekeel_containerd_svc::{ImageProof, ImageStage, ImageState, Preseed, ProofKind, ReadPace};

use crate::bundles::{BundleFixture, archive_of, k8s_namespace};

/// Bundle, name, stage and whether there is a problem.
fn list_states(bundles: &BundleFixture) -> Vec<(String, Option<String>, ImageStage, bool)> {
    let row = |state: ImageState| (state.bundle, state.name, state.stage, state.problem.is_some());
    bundles.preseed.image_states().into_iter().map(row).collect()
}

fn listed(bundle: &str, name: &str) -> (String, Option<String>, ImageStage, bool) {
    (bundle.to_owned(), Some(name.to_owned()), ImageStage::Listed, false)
}

#[tokio::test]
async fn a_state_says_what_the_store_has_and_is_taken_back_with_it() {
    let bundles = BundleFixture::new();
    assert_eq!(list_states(&bundles), []);
    bundles.put_image("a.tar", "localhost/a:1", b"a").put_image("b.tar", "localhost/b:1", b"b");
    bundles.put_bundle("c.tar", b"no archive").run_preseed().await;
    let (a, b) = (listed("a.tar", "localhost/a:1"), listed("b.tar", "localhost/b:1"));
    let invalid = ("c.tar".to_owned(), None, ImageStage::Wanted, true);
    assert_eq!(list_states(&bundles), [a.clone(), b.clone(), invalid.clone()]);
    let first = bundles.preseed.image_states().remove(0);
    let target = bundles.list_images().await.remove(0).target;
    assert_eq!(first.target, Some(target.digest));
    assert!(first.bytes > Some(target.size), "configuration and layer, too: {first:?}");
    bundles.run_preseed().await;
    assert_eq!(bundles.preseed.image_states().remove(0), first, "since the same time");
    // It can't be brought back, and the others are as they were.
    bundles.store.remove_image(&k8s_namespace(), "localhost/a:1");
    bundles.store.fail_call(StoreCall::PutImage, 0);
    bundles.run_preseed().await;
    let gone = ("a.tar".to_owned(), None, ImageStage::Wanted, true);
    assert_eq!(list_states(&bundles), [gone, b.clone(), invalid]);
    fs::remove_file(bundles.path("c.tar")).unwrap();
    bundles.run_preseed().await;
    assert_eq!(list_states(&bundles), [a, b]);
}

#[tokio::test]
async fn damaged_content_is_found_by_a_comparison_and_written_again_by_the_next_pass() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").put_image("b.tar", "localhost/b:1", b"b");
    bundles.run_preseed().await;
    let images: Vec<_> =
        bundles.list_images().await.into_iter().map(|image| (k8s_namespace(), image)).collect();
    let pace = ReadPace::new(None);
    for digest in bundles.store.content_digests(&k8s_namespace()) {
        bundles.store.damage_content(&k8s_namespace(), &digest);
        let (store, preseed) = (&bundles.store, &bundles.preseed);
        let mut proof = ImageProof::new(store, preseed, &images, ProofKind::Verify).await.unwrap();
        proof.run(store, preseed, &pace, |_| {}).await.unwrap();
        assert_eq!((proof.image_count(), proof.damaged().len()), (2, 1), "{digest}");
        let damaged = list_states(&bundles);
        assert_eq!(damaged.iter().filter(|(.., stage, _)| *stage == ImageStage::Damaged).count(), 1);
        bundles.run_preseed().await;
        let expected = [listed("a.tar", "localhost/a:1"), listed("b.tar", "localhost/b:1")];
        assert_eq!(list_states(&bundles), expected, "{digest}");
        let mut proof = ImageProof::new(store, preseed, &images, ProofKind::Verify).await.unwrap();
        proof.run(store, preseed, &pace, |_| {}).await.unwrap();
        assert_eq!((proof.damaged(), proof.done_bytes()), (&[][..], proof.total_bytes()), "{digest}");
    }
}

/// The names of the images that are known to be damaged.
async fn list_damaged(bundles: &BundleFixture, preseed: &Preseed) -> Vec<String> {
    let images = bundles.list_images().await;
    let known = ImageProof::list_recorded(&bundles.store, preseed, &k8s_namespace(), &images).await.unwrap();
    assert!(known.values().all(|reason| reason.contains("missing or damaged")), "{known:?}");
    let damaged = images.into_iter().filter(|image| known.contains_key(&image.target.digest));
    damaged.map(|image| image.name).collect()
}

#[tokio::test]
async fn damage_is_known_to_the_next_process_until_it_is_repaired_or_found_intact() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").run_preseed().await;
    let mut damages = bundles.store.content_digests(&k8s_namespace());
    bundles.put_image("b.tar", "localhost/b:1", b"b").put_image("c.tar", "localhost/c:1", b"c");
    bundles.run_preseed().await;
    // No bundle brings it any more, and the disk of the others is not there.
    fs::remove_file(bundles.path("b.tar")).unwrap();
    bundles.run_preseed().await;
    let away = bundles.directory.path().with_extension("away");
    fs::rename(bundles.directory.path(), &away).unwrap();
    let images = bundles.list_images().await;
    let prove = async |is_intact| {
        let images: Vec<_> = images.iter().map(|image| (k8s_namespace(), image.clone())).collect();
        let preseed = Preseed::new("/");
        let mut proof = ImageProof::new(&bundles.store, &preseed, &images, ProofKind::Verify).await.unwrap();
        proof.run(&bundles.store, &preseed, &ReadPace::new(None), |_| {}).await.unwrap();
        assert_eq!(proof.damaged().is_empty(), is_intact, "{:?}", proof.damaged());
    };
    prove(true).await;
    damages.push(images[1].target.digest);
    damages.iter().for_each(|digest| bundles.store.damage_content(&k8s_namespace(), digest));
    prove(false).await;
    let next = Preseed::new(bundles.directory.path());
    assert!(next.run(&bundles.store).await.is_err(), "it is not mounted");
    assert_eq!(list_damaged(&bundles, &next).await, ["localhost/a:1", "localhost/b:1"]);
    let without_bundle =
        || next.damaged_without_bundle().into_iter().map(|image| image.name).collect::<Vec<_>>();
    assert_eq!(without_bundle(), ["localhost/a:1", "localhost/b:1"]);
    fs::rename(&away, bundles.directory.path()).unwrap();
    next.run(&bundles.store).await.unwrap();
    assert_eq!(list_damaged(&bundles, &next).await, ["localhost/b:1"], "the other is repaired");
    assert_eq!(without_bundle(), ["localhost/b:1"]);
    // An operator writes it again.
    bundles.put_image("b.tar", "localhost/b:1", b"b");
    next.run(&bundles.store).await.unwrap();
    assert_eq!(list_damaged(&bundles, &next).await, [""; 0]);
    assert_eq!(without_bundle(), [""; 0]);
    prove(true).await;
    let labels = bundles.list_images().await.into_iter().flat_map(|image| image.labels.into_keys());
    assert_eq!(labels.filter(|label| label.contains("damage")).count(), 0, "what is intact has no record");
}

#[tokio::test]
async fn the_bytes_of_a_bundle_that_is_read_are_seen_while_it_is() {
    let bundles = BundleFixture::new();
    let archives =
        [archive_of("localhost/a:1", &[7; 9_000_000]), archive_of("localhost/b:1", &[8; 9_000_000])];
    bundles.put_bundle("a.tar", &archives[0].to_tar()).put_bundle("b.tar.gz", &archives[1].to_gzip());
    let sizes = ["a.tar", "b.tar.gz"].map(|file| fs::metadata(bundles.path(file)).unwrap().len());
    let (preseed, mut changes) = (bundles.preseed.clone(), bundles.preseed.watch_states());
    let watch = async {
        let mut seen = Vec::new();
        while changes.changed().await.is_ok() {
            let states = preseed.image_states();
            seen.extend(states.iter().filter_map(|state| Some((state.bundle.clone(), state.progress?))));
            if states.iter().all(|state| state.stage == ImageStage::Listed && state.progress.is_none()) {
                break;
            }
        }
        seen
    };
    let (report, seen) = tokio::join!(bundles.run_preseed(), watch);
    assert_eq!(report.bundle_counts().failed, 0, "{report:?}");
    for (bundle, size) in ["a.tar", "b.tar.gz"].into_iter().zip(sizes) {
        let of = seen.iter().filter(|(of, _)| of == bundle).map(|(_, progress)| *progress);
        let of: Vec<_> = of.collect();
        assert!(!of.is_empty() && of.is_sorted() && of.len() < 110, "{bundle}: {of:?}");
        assert!(of.iter().all(|(done, total)| *total == size && done <= total), "{bundle}: {of:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_comparison_reads_at_its_pace() {
    let (pace, start) = (ReadPace::new(Some(1000)), tokio::time::Instant::now());
    for _ in 0..3 {
        pace.spend(500).await;
    }
    assert_eq!((pace.bytes(), start.elapsed().as_millis()), (1500, 1500));
}

#[tokio::test(start_paused = true)]
async fn a_bundle_that_failed_is_tried_again_by_its_own_pause_and_the_others_are_not_read() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").put_image("b.tar", "localhost/b:1", b"b");
    bundles.store.fail_call(StoreCall::PutImage, 0);
    bundles.run_preseed().await;
    for (seconds, is_due) in [(0, false), (1, true), (1, false), (1, true)] {
        tokio::time::advance(Duration::from_secs(seconds)).await;
        bundles.store.fail_call(StoreCall::PutImage, 0);
        let (reads, imports) = (StoreCall::ReadContent, StoreCall::BeginImport);
        let before = [reads, imports].map(|call| bundles.store.call_count(call));
        let report = bundles.preseed.run_due(&bundles.store).await.unwrap();
        let after = [reads, imports].map(|call| bundles.store.call_count(call));
        assert_eq!((report.bundle_counts().failed, report.retryable_count()), (1, 1));
        assert_eq!(after[1] - before[1], usize::from(is_due));
        assert!(is_due || after == before, "nothing is read");
        let b = listed("b.tar", "localhost/b:1");
        assert_eq!(list_states(&bundles), [("a.tar".to_owned(), None, ImageStage::Wanted, true), b]);
    }
    // A new bundle does not wait, and neither does what is asked for.
    bundles.put_image("c.tar", "localhost/c:1", b"c");
    assert_eq!(bundles.preseed.run_due(&bundles.store).await.unwrap().bundle_counts().failed, 1);
    assert_eq!(list_states(&bundles)[2], listed("c.tar", "localhost/c:1"));
    assert_eq!(bundles.run_preseed().await.failures(), <[String; 0]>::default());
    assert_eq!(bundles.preseed.next_due(), None);
}
