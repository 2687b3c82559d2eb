//! A disk with too little space.

use std::fs::File;
use std::time::UNIX_EPOCH;

use nodekeel_containerd_svc::testing::StoreCall;
use nodekeel_containerd_svc::{BundleOutcome, ImageStoreError, ImportError};

use crate::bundles::{BundleFixture, archive_of, count_outcomes};

/// A disk of which 8 MB may be used.
const DISK_BYTES: u64 = 10_000_000;
const RESERVE: u64 = DISK_BYTES / 5;

fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut next).flatten().take(bytes).collect()
}

/// Review D3.
#[tokio::test]
async fn a_bundle_that_does_not_fit_is_left_out_before_its_first_byte_and_named() {
    let small = archive_of("localhost/small:1", &noise(1_000_000)).to_tar();
    for layer in [noise(9_000_000), vec![7; 9_000_000]] {
        let large = archive_of("localhost/large:1", &layer);
        for (file, bytes) in
            [("a.tar", large.to_tar()), ("a.tar.gz", large.to_gzip()), ("a.tar.zst", large.to_zstd())]
        {
            let bundles = BundleFixture::new();
            bundles.store.set_disk_bytes(DISK_BYTES);
            let report = bundles.put_bundle(file, &bytes).run_preseed().await;
            assert_eq!((count_outcomes(&report), bundles.store.written_bytes()), ([0, 0, 1], 0), "{file}");
            let text = report.failures().join("\n");
            for part in [file, "bytes are needed", "8000000 are free above the reserve of 2000000"] {
                assert!(text.contains(part), "{text}");
            }
            assert!(matches!(
                &report.outcomes[0],
                BundleOutcome::Failed(error @ ImportError::Store { source: ImageStoreError::NoSpace { .. }, .. })
                    if error.is_retryable()
            ));
            let again = bundles.run_preseed().await.failures();
            assert_eq!(again, [text], "also where it is not measured again");
            let report = bundles.put_bundle("b.tar", &small).run_preseed().await;
            assert_eq!(count_outcomes(&report), [1, 0, 1], "the others are imported");
            let counts = report.bundle_counts();
            assert_eq!((counts.imported, counts.failed), (1, 1));
            bundles.store.set_disk_bytes(10 * DISK_BYTES);
            assert_eq!(count_outcomes(&bundles.run_preseed().await), [1, 1, 0], "{file}");
        }
    }
}

/// Review D3: whatever the order and the format, the reserve stays free.
#[tokio::test]
async fn the_reserve_stays_free_whatever_is_imported() {
    for is_compressed in [false, true] {
        let bundles = BundleFixture::new();
        bundles.store.set_disk_bytes(DISK_BYTES);
        for number in 0..12 {
            let name = format!("localhost/image-{number}:1");
            let archive = archive_of(&name, &vec![number; 300_000 * usize::from(number)]);
            let archive = archive.with_image(&[&format!("{name}-second")], &vec![number + 100; 400_000]);
            let bytes = if is_compressed { archive.to_zstd() } else { archive.to_tar() };
            let suffix = if is_compressed { "tar.zst" } else { "tar" };
            bundles.put_bundle(&format!("{number:02}.{suffix}"), &bytes);
        }
        for _ in 0..2 {
            let report = bundles.run_preseed().await;
            let used = bundles.store.content_bytes();
            assert!(used <= DISK_BYTES - RESERVE, "{used} used");
            assert!(used > (DISK_BYTES - RESERVE) * 8 / 10, "{used} used: what fits is imported");
            assert!(!report.failures().is_empty());
        }
    }
}

#[tokio::test]
async fn a_bundle_whose_content_exists_needs_no_space() {
    let bundles = BundleFixture::new();
    bundles.store.set_disk_bytes(DISK_BYTES);
    let archive = archive_of("localhost/large:1", &noise(7_500_000));
    for (file, bytes) in [("a.tar", archive.to_tar()), ("a.tar.zst", archive.to_zstd())] {
        assert_eq!(count_outcomes(&bundles.put_bundle(file, &bytes).run_preseed().await)[2], 0, "{file}");
        let written = bundles.store.call_count(StoreCall::Write);
        File::options().write(true).open(bundles.path(file)).unwrap().set_modified(UNIX_EPOCH).unwrap();
        let report = bundles.run_preseed().await;
        assert_eq!((count_outcomes(&report)[0], report.failures().len()), (1, 0), "{file}: {report:?}");
        assert_eq!(bundles.store.call_count(StoreCall::Write), written, "{file}");
    }
}
