//! A store that fails at any call, and bundles that are cut anywhere.

use nodekeel_containerd_svc::testing::{Archive, Call, Shape};
use nodekeel_containerd_svc::{ImageStore as _, Outcome};

use crate::bundles::{Bundles, counts, k8s};

const CALLS: [Call; 7] =
    [Call::Begin, Call::Blob, Call::Write, Call::Commit, Call::Label, Call::List, Call::End];

/// An image in two chunks.
fn large(name: &str) -> Vec<u8> {
    of(name, &vec![name.as_bytes()[0]; 530_000])
}

fn good(name: &str) -> Vec<u8> {
    of(name, name.as_bytes())
}

fn of(name: &str, layer: &[u8]) -> Vec<u8> {
    let names = [1, 2].map(|tag| format!("localhost/{name}:{tag}"));
    let names = [names[0].as_str(), names[1].as_str()];
    Archive::new(Shape::LayoutLast).image(&names, layer).tar()
}

/// Whether every listed image is whole: everything that its labels lead to is there.
async fn all_whole(bundles: &Bundles) -> bool {
    let report = bundles.preseed.run(&bundles.store).await.unwrap();
    counts(&report)[2] == 0
}

#[tokio::test]
async fn a_store_that_fails_at_any_call_lists_nothing_half_and_the_next_round_mends_it() {
    let mut points = 0;
    for call in CALLS {
        // Only for what happens within a blob it must be large.
        let archives = ["a", "b"].map(if call == Call::Write { large } else { good });
        for number in 0.. {
            let bundles = Bundles::new();
            bundles.put("a.tar", &archives[0]).put("b.tar", &archives[1]);
            bundles.store.fail(call, number);
            let report = bundles.run().await;
            let failed =
                report.outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Failed(_))).count();
            let reached = bundles.store.calls(call) > number;
            // What the end of an import can't collect is collected later: that is no failure.
            assert_eq!(failed, usize::from(reached && call != Call::End), "{call:?} {number}: {report:?}");
            assert_eq!(report.retryable(), failed);
            for image in bundles.store.images(&k8s()).await.unwrap() {
                let target = bundles.store.size(&k8s(), &image.target.digest).await.unwrap();
                assert!(target.is_some(), "{call:?} {number}: {} is listed without its manifest", image.name);
            }
            assert!(all_whole(&bundles).await, "{call:?} {number}: the next round mends it");
            assert_eq!(
                bundles.names().await,
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
async fn a_bundle_that_is_cut_anywhere_is_refused_and_the_whole_one_mends_it() {
    let archive = Archive::new(Shape::LayoutLast).image(&["localhost/cut:1"], &[3; 20_000]);
    for (file, whole) in
        [("cut.tar", archive.tar()), ("cut.tar.gz", archive.gzip()), ("cut.tar.zst", archive.zstd())]
    {
        // Of a plain tar, one of the two blocks at its end is padding.
        let end = if file == "cut.tar" { whole.len() - 1024 } else { whole.len() };
        for point in 0..50 {
            let bundles = Bundles::new();
            bundles.put(file, &whole[..end * point / 50]).put("good.tar", &good("good"));
            assert_eq!(counts(&bundles.run().await), [1, 0, 1], "{file} cut at {point}/50");
            assert_eq!(bundles.names().await, ["localhost/good:1", "localhost/good:2"]);
            if point % 10 == 0 {
                assert_eq!(counts(&bundles.put(file, &whole).run().await), [1, 1, 0]);
            }
        }
    }
}

#[tokio::test]
async fn one_flipped_bit_anywhere_is_never_imported_as_something_else() {
    let archive = Archive::new(Shape::Layout).image(&["localhost/bit:1"], &[5; 2000]);
    let whole = archive.tar();
    let clean = Bundles::new();
    clean.put("bit.tar", &whole).run().await;
    let expected = clean.store.images(&k8s()).await.unwrap().remove(0).target;
    for at in (0..whole.len()).step_by(97) {
        let mut flipped = whole.clone();
        flipped[at] ^= 4;
        let bundles = Bundles::new();
        bundles.put("bit.tar", &flipped).run().await;
        for image in bundles.store.images(&k8s()).await.unwrap() {
            assert_eq!(image.target, expected, "bit {at}");
        }
    }
}

#[tokio::test]
async fn an_import_that_is_given_up_leaves_nothing_and_the_next_one_is_whole() {
    let bundles = Bundles::new();
    bundles.put("a.tar", &large("a"));
    for _ in 0..20 {
        let round = bundles.preseed.run(&bundles.store);
        // Polled once: it has begun, and is dropped.
        drop(tokio::time::timeout(std::time::Duration::ZERO, round).await);
    }
    let report = bundles.run().await;
    assert_eq!(counts(&report)[2], 0, "{report:?}");
    assert_eq!(bundles.names().await, ["localhost/a:1", "localhost/a:2"]);
}
