//! A store that fails at any call, and bundles that are cut at any byte.

use std::time::Duration;

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, StoreCall};
use nodekeel_containerd_svc::{BundleOutcome, ImageStore as _};

use crate::bundles::{BundleFixture, count_outcomes, k8s_namespace};

const CALLS: [StoreCall; 7] = [
    StoreCall::BeginImport,
    StoreCall::OpenWriter,
    StoreCall::Write,
    StoreCall::Commit,
    StoreCall::LabelContent,
    StoreCall::PutImage,
    StoreCall::Finish,
];

/// An image in two chunks.
fn large_archive(name: &str) -> Vec<u8> {
    archive_of(name, &vec![name.as_bytes()[0]; 530_000])
}

fn small_archive(name: &str) -> Vec<u8> {
    archive_of(name, name.as_bytes())
}

fn archive_of(name: &str, layer: &[u8]) -> Vec<u8> {
    let names = [1, 2].map(|tag| format!("localhost/{name}:{tag}"));
    let names = [names[0].as_str(), names[1].as_str()];
    ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast).with_image(&names, layer).to_tar()
}

/// Whether every listed image is complete: all content that its labels refer to exists.
async fn are_images_complete(bundles: &BundleFixture) -> bool {
    let report = bundles.preseed.run(&bundles.store).await.unwrap();
    count_outcomes(&report)[2] == 0
}

#[tokio::test]
async fn a_store_failing_at_any_call_lists_no_incomplete_image_and_the_next_pass_repairs_it() {
    let mut points = 0;
    for call in CALLS {
        // Only a large blob has several write calls.
        let archives = ["a", "b"].map(if call == StoreCall::Write { large_archive } else { small_archive });
        for number in 0.. {
            let bundles = BundleFixture::new();
            bundles.put_bundle("a.tar", &archives[0]).put_bundle("b.tar", &archives[1]);
            bundles.store.fail_call(call, number);
            let report = bundles.run_preseed().await;
            let failed =
                report.outcomes.iter().filter(|outcome| matches!(outcome, BundleOutcome::Failed(_))).count();
            let reached = bundles.store.call_count(call) > number;
            // Garbage that a failed finish leaves is collected later, so that is not a failure.
            assert_eq!(
                failed,
                usize::from(reached && call != StoreCall::Finish),
                "{call:?} {number}: {report:?}"
            );
            assert_eq!(report.retryable_count(), failed);
            for image in bundles.list_images().await {
                let target =
                    bundles.store.content_size(&k8s_namespace(), &image.target.digest).await.unwrap();
                assert!(target.is_some(), "{call:?} {number}: {} is listed without its manifest", image.name);
            }
            assert!(are_images_complete(&bundles).await, "{call:?} {number}: the next pass repairs it");
            assert_eq!(
                bundles.image_names().await,
                ["localhost/a:1", "localhost/a:2", "localhost/b:1", "localhost/b:2"]
            );
            if !reached {
                break;
            }
            points += 1;
        }
    }
    println!("{points} points of failure");
    assert!(points >= 30);
}

#[tokio::test]
async fn a_truncated_bundle_is_rejected_and_the_complete_one_is_imported() {
    let archive = ArchiveBuilder::new(BuiltArchiveFormat::OciLayoutIndexLast)
        .with_image(&["localhost/cut:1"], &[3; 20_000]);
    for (file, complete) in
        [("cut.tar", archive.to_tar()), ("cut.tar.gz", archive.to_gzip()), ("cut.tar.zst", archive.to_zstd())]
    {
        // The second of the two blocks at the end of a plain tar is padding.
        let end = if file == "cut.tar" { complete.len() - 1024 } else { complete.len() };
        for point in 0..50 {
            let bundles = BundleFixture::new();
            bundles
                .put_bundle(file, &complete[..end * point / 50])
                .put_bundle("good.tar", &small_archive("good"));
            assert_eq!(count_outcomes(&bundles.run_preseed().await), [1, 0, 1], "{file} cut at {point}/50");
            assert_eq!(bundles.image_names().await, ["localhost/good:1", "localhost/good:2"]);
            if point % 10 == 0 {
                assert_eq!(
                    count_outcomes(&bundles.put_bundle(file, &complete).run_preseed().await),
                    [1, 1, 0]
                );
            }
        }
    }
}

#[tokio::test]
async fn a_flipped_bit_is_never_imported_as_another_image() {
    let archive =
        ArchiveBuilder::new(BuiltArchiveFormat::OciLayout).with_image(&["localhost/bit:1"], &[5; 2000]);
    let complete = archive.to_tar();
    let clean = BundleFixture::new();
    clean.put_bundle("bit.tar", &complete).run_preseed().await;
    let expected = clean.list_images().await.remove(0).target;
    for at in (0..complete.len()).step_by(97) {
        let mut flipped = complete.clone();
        flipped[at] ^= 4;
        let bundles = BundleFixture::new();
        bundles.put_bundle("bit.tar", &flipped).run_preseed().await;
        for image in bundles.list_images().await {
            assert_eq!(image.target, expected, "bit {at}");
        }
    }
}

#[tokio::test]
async fn an_abandoned_import_leaves_nothing_and_the_next_one_is_complete() {
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", &large_archive("a"));
    for _ in 0..20 {
        let pass = bundles.preseed.run(&bundles.store);
        // Polled once and then dropped.
        drop(tokio::time::timeout(Duration::ZERO, pass).await);
    }
    let report = bundles.run_preseed().await;
    assert_eq!(count_outcomes(&report)[2], 0, "{report:?}");
    assert_eq!(bundles.image_names().await, ["localhost/a:1", "localhost/a:2"]);
}

/// Reference 10, `cancellation during a blocking import`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_cancelled_while_its_store_stalls_is_released() {
    let bundles = BundleFixture::new();
    bundles.put_bundle("a.tar", &small_archive("a"));
    let stalled = bundles.store.stall_writes();
    tokio::select! {
        report = bundles.run_preseed() => panic!("{report:?}"),
        () = stalled.notified() => {}
    }
    // The reading thread owns the session and drops it.
    let ended = || {
        let sessions = bundles.store.session_count();
        anyhow::ensure!(sessions == 0, "{sessions} sessions");
        Ok(())
    };
    testbed::wait_until(Duration::from_secs(20), "the end of the session", ended).unwrap();
    assert_eq!(bundles.list_images().await, []);
}
