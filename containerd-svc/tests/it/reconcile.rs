//! The second version of everything: bundles that change their names, share them, or are gone.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::{Duration, UNIX_EPOCH};

use nodekeel_containerd_svc::testing::{ArchiveBuilder, BuiltArchiveFormat, MemStore, StoreCall};
use nodekeel_containerd_svc::{Digest, Image, ImageStore as _, ImportLimits, Preseed};

use crate::bundles::{BundleFixture, archive_of, count_outcomes, k8s_namespace};

/// The listed images, and whether each is pinned and has a mark.
async fn list_pins(bundles: &BundleFixture) -> Vec<(String, bool, bool)> {
    let images = bundles.list_images().await;
    let is_marked = |image: &Image| image.labels.keys().any(|key| key.starts_with("nodekeel.preseed/"));
    let pin = |image: Image| {
        (image.name.clone(), image.labels.contains_key("io.cri-containerd.pinned"), is_marked(&image))
    };
    images.into_iter().map(pin).collect()
}

async fn target_of(bundles: &BundleFixture, name: &str) -> Digest {
    let images = bundles.list_images().await;
    images.iter().find(|image| image.name == name).unwrap().target.digest
}

/// A directory that is gone, or replaced by a link, was not listed; an empty one has no bundles.
#[tokio::test]
async fn images_of_an_absent_directory_keep_their_pins_and_those_of_an_empty_namespace_are_unpinned() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").run_preseed().await;
    let directory = bundles.directory.path();
    let aside = directory.with_extension("aside");
    fs::rename(directory, &aside).unwrap();
    bundles.preseed.run(&bundles.store).await.unwrap_err();
    assert_eq!(
        list_pins(&bundles).await,
        [("localhost/a:1".to_owned(), true, true)],
        "absent is not deleted"
    );
    fs::rename(&aside, directory).unwrap();
    fs::create_dir(directory.join("other")).unwrap();
    let namespace = directory.join("k8s.io");
    fs::rename(&namespace, directory.join(".aside")).unwrap();
    let pinned = [("localhost/a:1".to_owned(), true, true)];
    bundles.run_preseed().await;
    assert_eq!(list_pins(&bundles).await, pinned, "a namespace that is gone");
    symlink(".aside", &namespace).unwrap();
    bundles.run_preseed().await;
    assert_eq!(list_pins(&bundles).await, pinned, "a namespace that is a link");
    fs::remove_file(&namespace).unwrap();
    fs::create_dir(&namespace).unwrap();
    bundles.run_preseed().await;
    assert_eq!(list_pins(&bundles).await, [("localhost/a:1".to_owned(), false, false)]);
}

/// The mount point of a disk that is not mounted is empty.
#[tokio::test]
async fn images_of_an_empty_directory_keep_their_pins() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").run_preseed().await;
    fs::remove_dir_all(bundles.directory.path().join("k8s.io")).unwrap();
    bundles.run_preseed().await;
    let pinned = [("localhost/a:1".to_owned(), true, true)];
    assert_eq!(list_pins(&bundles).await, pinned, "absent is not deleted");
}

/// Gives an image another name with all of its labels, as `ctr images tag --force` does.
async fn copy_image(bundles: &BundleFixture, name: &str, copy: &str) {
    let images = bundles.list_images().await;
    let mut image = images.into_iter().find(|image| image.name == name).unwrap();
    image.name = copy.to_owned();
    bundles.store.remove_image(&k8s_namespace(), copy);
    let mut session = bundles.store.begin_import(&k8s_namespace()).await.unwrap();
    session.put_image(&image).await.unwrap();
    session.finish().await.unwrap();
}

#[tokio::test]
async fn an_image_that_was_tagged_and_then_removed_is_listed_again() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").run_preseed().await;
    let target = target_of(&bundles, "localhost/a:1").await;
    copy_image(&bundles, "localhost/a:1", "localhost/mine:1").await;
    bundles.store.remove_image(&k8s_namespace(), "localhost/a:1");
    let outcomes =
        [count_outcomes(&bundles.run_preseed().await), count_outcomes(&bundles.run_preseed().await)];
    assert_eq!(outcomes, [[1, 0, 0], [0, 1, 0]]);
    assert_eq!(target_of(&bundles, "localhost/a:1").await, target);
    let pins = [("localhost/a:1", true), ("localhost/mine:1", false)];
    assert_eq!(list_pins(&bundles).await, pins.map(|(name, is)| (name.to_owned(), is, is)));
}

#[tokio::test]
async fn a_copy_of_an_image_loses_mark_and_pin_and_its_bundle_is_not_read_again() {
    let bundles = BundleFixture::new();
    let archive = archive_of("localhost/a:1", b"a").with_image(&["localhost/a:2"], b"b");
    bundles.put_bundle("a.tar", &archive.to_tar()).run_preseed().await;
    copy_image(&bundles, "localhost/a:1", "localhost/mine:1").await;
    let outcomes =
        [count_outcomes(&bundles.run_preseed().await), count_outcomes(&bundles.run_preseed().await)];
    assert_eq!(outcomes, [[0, 1, 0]; 2]);
    let pins = [("localhost/a:1", true), ("localhost/a:2", true), ("localhost/mine:1", false)];
    assert_eq!(list_pins(&bundles).await, pins.map(|(name, is)| (name.to_owned(), is, is)));
}

/// Review D2.
#[tokio::test]
async fn a_name_that_was_tagged_with_the_image_of_another_bundle_goes_back_to_its_own() {
    for [from, to] in [["localhost/a:1", "localhost/b:1"], ["localhost/b:1", "localhost/a:1"]] {
        let bundles = BundleFixture::new();
        bundles.put_image("a.tar", "localhost/a:1", b"a");
        bundles.put_image("b.tar", "localhost/b:1", b"b");
        bundles.run_preseed().await;
        let targets = [target_of(&bundles, from).await, target_of(&bundles, to).await];
        copy_image(&bundles, from, to).await;
        assert_eq!(target_of(&bundles, to).await, targets[0]);
        bundles.run_preseed().await;
        assert_eq!([target_of(&bundles, from).await, target_of(&bundles, to).await], targets, "{to}");
        assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 2, 0], "{to}");
        let pinned = ["localhost/a:1", "localhost/b:1"].map(|name| (name.to_owned(), true, true));
        assert_eq!(list_pins(&bundles).await, pinned);
    }
}

#[tokio::test]
async fn an_image_keeps_its_pin_while_its_bundle_is_invalid() {
    let bundles = BundleFixture::new();
    bundles.put_image("a.tar", "localhost/a:1", b"a").run_preseed().await;
    for _ in 0..2 {
        bundles.put_bundle("a.tar", b"scribble").run_preseed().await;
        assert_eq!(list_pins(&bundles).await, [("localhost/a:1".to_owned(), true, true)]);
    }
}

#[tokio::test]
async fn a_name_that_was_moved_is_pointed_back_without_reading_its_bundle() {
    let bundles = BundleFixture::new();
    let archive = archive_of("localhost/a:1", b"a").with_image(&["localhost/b:1"], b"b");
    bundles.put_bundle("a.tar", &archive.to_tar()).run_preseed().await;
    bundles.put_image("c.tar", "localhost/c:1", b"a").run_preseed().await;
    let [a, b] = [target_of(&bundles, "localhost/a:1").await, target_of(&bundles, "localhost/b:1").await];
    let mut images = bundles.list_images().await;
    images[0].target = images[1].target.clone();
    let mut session = bundles.store.begin_import(&k8s_namespace()).await.unwrap();
    session.put_image(&images[0]).await.unwrap();
    session.finish().await.unwrap();
    assert_eq!(target_of(&bundles, "localhost/a:1").await, b);
    let written = bundles.store.call_count(StoreCall::Write);
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 2, 0]);
    assert_eq!(bundles.store.call_count(StoreCall::Write), written);
    assert_eq!(target_of(&bundles, "localhost/a:1").await, a);
}

/// Replaces a file by one of equal size, with the same modification time.
fn replace_with_equal_size_and_time(bundles: &BundleFixture, file: &str, bytes: &[u8]) {
    if let Ok(before) = fs::metadata(bundles.path(file)) {
        assert_eq!(before.len(), bytes.len() as u64);
    }
    bundles.put_bundle(file, bytes);
    fs::File::options().write(true).open(bundles.path(file)).unwrap().set_modified(UNIX_EPOCH).unwrap();
}

/// A docker-archive whose small files are in its middle.
fn docker_archive(layer: u8) -> Vec<u8> {
    let noise = vec![7; 300_000];
    ArchiveBuilder::new(BuiltArchiveFormat::DockerArchive)
        .with_file("first", &noise)
        .with_image(&["localhost/app:1"], &vec![layer; 100_000])
        .to_tar()
}

/// Moves the documents of a docker-archive in front of 300 kB of other content.
fn documents_in_the_middle(tar: &[u8]) -> Vec<u8> {
    let mut archive = tar::Archive::new(tar);
    let mut files: Vec<(String, Vec<u8>)> = archive
        .entries()
        .unwrap()
        .map(|entry| {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut content).unwrap();
            (entry.path().unwrap().display().to_string(), content)
        })
        .collect();
    files.push(("last".to_owned(), vec![7; 300_000]));
    let mut moved = tar::Builder::new(Vec::new());
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        moved.append_data(&mut header, name, content.as_slice()).unwrap();
    }
    moved.into_inner().unwrap()
}

/// As the first tar, compressed without a checksum at its end: with stored blocks, so that the size depends on
/// nothing else.
fn zstd_stored(tar: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0b1010_0000];
    frame.extend_from_slice(&u32::try_from(tar.len()).unwrap().to_le_bytes());
    let blocks: Vec<&[u8]> = tar.chunks(128 << 10).collect();
    for (number, block) in blocks.iter().enumerate() {
        let is_last = u32::from(number + 1 == blocks.len());
        let header = u32::try_from(block.len()).unwrap() << 3 | is_last;
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.extend_from_slice(block);
    }
    frame
}

/// Review D13.
#[tokio::test]
async fn a_changed_bundle_of_equal_size_and_time_is_imported() {
    let archive = |layer| documents_in_the_middle(&docker_archive(layer));
    for (file, [first, second]) in
        [("app.tar", [1, 2].map(archive)), ("app.tar.zst", [1, 2].map(|layer| zstd_stored(&archive(layer))))]
    {
        let bundles = BundleFixture::new();
        replace_with_equal_size_and_time(&bundles, file, &first);
        assert_eq!(count_outcomes(&bundles.run_preseed().await), [1, 0, 0], "{file}");
        let before = target_of(&bundles, "localhost/app:1").await;
        replace_with_equal_size_and_time(&bundles, file, &second);
        assert_eq!(count_outcomes(&bundles.run_preseed().await), [1, 0, 0], "{file}");
        assert_ne!(target_of(&bundles, "localhost/app:1").await, before);
        assert_eq!(count_outcomes(&bundles.run_preseed().await), [0, 1, 0], "{file}");
    }
}

/// Review D13.
#[tokio::test]
async fn a_link_to_a_bundle_is_followed_and_one_to_anything_else_is_named() {
    let bundles = BundleFixture::new();
    let elsewhere = tempfile::tempdir().unwrap();
    let stored = elsewhere.path().join("3f2a-pause");
    fs::write(&stored, archive_of("3.10", b"pause").to_tar()).unwrap();
    fs::create_dir(elsewhere.path().join("directory.tar")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, elsewhere.path().join("fifo.tar"), rustix::fs::Mode::RWXU).unwrap();
    bundles.put_image("a.tar", "localhost/a:1", b"a");
    symlink(&stored, bundles.path("pause.tar")).unwrap();
    symlink("a.tar", bundles.path("relative.tar")).unwrap();
    symlink("pause.tar", bundles.path("twice.tar")).unwrap();
    symlink("loop.tar", bundles.path("loop.tar")).unwrap();
    symlink("nowhere.tar", bundles.path("dangling.tar")).unwrap();
    symlink(elsewhere.path().join("fifo.tar"), bundles.path("fifo.tar")).unwrap();
    symlink(elsewhere.path().join("directory.tar"), bundles.path("directory.tar")).unwrap();
    let report = tokio::time::timeout(Duration::from_secs(60), bundles.run_preseed()).await.unwrap();
    assert_eq!(count_outcomes(&report), [4, 0, 4], "{report:#?}");
    let text = format!("{report:?}");
    for file in ["loop.tar", "dangling.tar", "fifo.tar", "directory.tar"] {
        assert!(text.contains(file), "{file} is named: {text}");
    }
    let failures = report.failures().join("\n");
    assert!(failures.contains("too many links") && !failures.contains("not followed"), "{failures}");
    let names = ["docker.io/library/pause:3.10", "docker.io/library/twice:3.10", "localhost/a:1"];
    assert_eq!(bundles.image_names().await, names);
    // The file behind the link counts, not the link.
    fs::write(&stored, archive_of("3.11", b"new").to_tar()).unwrap();
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [2, 2, 4]);
    assert!(bundles.image_names().await.contains(&"docker.io/library/pause:3.11".to_owned()));
}

/// Review D11.
#[tokio::test]
async fn a_zstd_archive_with_a_large_window_is_rejected_by_name() {
    let tar = archive_of("localhost/a:1", &vec![7; 1000]).to_tar();
    let compress = |window_log: u32| {
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window_log).unwrap();
        std::io::Write::write_all(&mut encoder, &tar).unwrap();
        encoder.finish().unwrap()
    };
    let mut bundles = BundleFixture::new();
    bundles.put_bundle("a24.tar.zst", &compress(24));
    bundles.put_bundle("b25.tar.zst", &compress(25));
    bundles.put_bundle("c27.tar.zst", &compress(27));
    // A later frame may have another window.
    bundles.put_bundle("d.tar.zst", &[compress(20), compress(27)].concat());
    // The default accepts what RKE2 and `zstd --long` write.
    assert_eq!(count_outcomes(&bundles.run_preseed().await), [4, 0, 0]);
    (bundles.store, bundles.preseed) = (MemStore::new(), Preseed::new(bundles.directory.path()));
    let mut limits = ImportLimits::default();
    limits.zstd_window = (32 << 20) - 1;
    bundles.preseed = bundles.preseed.with_limits(limits);
    let report = bundles.run_preseed().await;
    assert_eq!(count_outcomes(&report), [1, 0, 3], "{report:#?}");
    let text = format!("{report:?}");
    for file in ["b25.tar.zst", "c27.tar.zst", "d.tar.zst"] {
        assert!(text.contains(file), "{text}");
    }
    assert_eq!(text.matches("Window").count(), 3, "{text}");
}

#[tokio::test]
async fn a_store_failing_at_any_change_of_an_image_completes_it_in_the_next_pass() {
    for call in [StoreCall::BeginImport, StoreCall::OpenWriter, StoreCall::PutImage, StoreCall::Finish] {
        for number in 0.. {
            let bundles = BundleFixture::new();
            let archive = archive_of("localhost/a:1", b"a").with_image(&["localhost/b:1"], b"b");
            bundles.put_bundle("a.tar", &archive.to_tar()).run_preseed().await;
            fs::remove_file(bundles.path("a.tar")).unwrap();
            let before = bundles.store.call_count(call);
            bundles.store.fail_call(call, number);
            let is_reached = !bundles.run_preseed().await.failures().is_empty();
            assert_eq!(is_reached, bundles.store.call_count(call) > before + number, "{call:?} {number}");
            bundles.run_preseed().await;
            let unpinned = ["localhost/a:1", "localhost/b:1"].map(|name| (name.to_owned(), false, false));
            assert_eq!(list_pins(&bundles).await, unpinned, "{call:?} {number}");
            if !is_reached {
                break;
            }
        }
    }
}
