//! Bundles whose content is written at once.

use nodekeel_containerd_svc::{Digest, Preseed};

use crate::bundles::{BundleFixture, archive_of, count_outcomes};

/// A disk of which 8 MB may be used.
const DISK_BYTES: u64 = 10_000_000;

fn digest_of(layer: &[u8]) -> Digest {
    Digest::of_content(layer)
}

/// Each layer is committed after that of the next bundle, so that the first bundle is complete last; or the other way round.
async fn names_and_owners(
    layers: &[Vec<u8>],
    is_reversed: bool,
    unpack: bool,
) -> (Vec<(String, Digest)>, Vec<String>) {
    let mut bundles = BundleFixture::new();
    bundles.preseed = Preseed::new(bundles.directory.path()).with_unpacking(unpack);
    // On a disk that the store does not know they would be read one after another.
    bundles.store.set_disk_bytes(DISK_BYTES);
    for (number, layer) in layers.iter().enumerate() {
        let names = ["localhost/same:1".to_owned(), format!("localhost/own-{number}:1")];
        let archive = archive_of(&names[1], layer).with_image(&[&names[0]], layer);
        bundles.put_bundle(&format!("{number}.tar"), &archive.to_tar());
    }
    for pair in layers.windows(2) {
        let (first, second) = (digest_of(&pair[0]), digest_of(&pair[1]));
        let (waits, waited) = if is_reversed { (first, second) } else { (second, first) };
        bundles.store.commit_after(waits, waited);
    }
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [layers.len(), 0, 0]);
    let images = bundles.list_images().await.into_iter().map(|image| (image.name, image.target.digest));
    let states = bundles.preseed.image_states().into_iter();
    let owners = states.filter(|state| state.name.as_deref() == Some("localhost/same:1"));
    (images.collect(), owners.map(|state| state.bundle).collect())
}

#[tokio::test]
async fn the_first_bundle_keeps_a_name_whichever_is_written_first() {
    let layers: Vec<_> = (0..4).map(|number| vec![number; 1000]).collect();
    let forward = names_and_owners(&layers, false, false).await;
    for (is_reversed, unpack) in [(true, false), (false, true), (true, true)] {
        assert_eq!(names_and_owners(&layers, is_reversed, unpack).await, forward);
    }
    assert_eq!((forward.0.len(), &forward.1[..]), (5, &["0.tar".to_owned()][..]));
}

#[tokio::test]
async fn the_reserve_holds_for_all_imports_together() {
    let bundles = BundleFixture::new();
    bundles.store.set_disk_bytes(DISK_BYTES);
    let layers: Vec<_> = (0..4).map(|number| vec![number; 3_000_000]).collect();
    for (number, layer) in layers.iter().enumerate() {
        bundles.put_image(&format!("{number}.tar"), &format!("localhost/{number}:1"), layer);
    }
    // The first two are written at once, and nothing of them counts as used before both are.
    bundles.store.commit_after(digest_of(&layers[0]), digest_of(&layers[1]));
    let report = bundles.run_preseed().await;
    assert_eq!(count_outcomes(&report), [2, 0, 2], "{report:?}");
    assert_eq!(bundles.image_names().await, ["localhost/0:1", "localhost/1:1"]);
    assert!(bundles.store.content_bytes() <= DISK_BYTES * 8 / 10);
    let failures = report.failures().join("\n");
    assert!(failures.contains("2.tar") && failures.contains("3.tar"), "{failures}");
    // What was written and is still claimed counts once.
    bundles.store.set_disk_bytes(DISK_BYTES * 10 / 5);
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [2, 2, 0]);
}

#[tokio::test]
async fn content_that_several_bundles_have_is_written_once() {
    let bundles = BundleFixture::new();
    bundles.store.set_disk_bytes(DISK_BYTES);
    let base = vec![7; 500_000];
    for number in 0..4 {
        let name = format!("localhost/{number}:1");
        let archive = archive_of(&name, &base).with_image(&[&format!("{name}-own")], &[number; 1000]);
        bundles.put_bundle(&format!("{number}.tar"), &archive.to_tar());
    }
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [4, 0, 0]);
    let (written, kept) = (bundles.store.written_bytes(), bundles.store.content_bytes());
    assert!(written < kept + 100_000, "{written} bytes written, {kept} kept");
}
