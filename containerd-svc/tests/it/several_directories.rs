//! Bundles of several directories.

use std::fs;
use std::path::PathBuf;

use nodekeel_containerd_svc::{ImageState, Preseed};

use crate::bundles::{BundleFixture, archive_of, count_outcomes};

/// The fixture's directory, and another one before or after it.
struct Directories {
    bundles: BundleFixture,
    other: PathBuf,
}

impl Directories {
    fn new() -> Self {
        let bundles = BundleFixture::new();
        let other = bundles.directory.path().with_extension("other");
        fs::create_dir_all(other.join("k8s.io")).unwrap();
        Self { bundles, other }
    }

    fn put_other(&self, file: &str, name: &str, layer: &[u8]) {
        fs::write(self.other.join("k8s.io").join(file), archive_of(name, layer).to_tar()).unwrap();
    }

    /// Name, directory and file of each image that a bundle has.
    fn owners(&self) -> Vec<(String, PathBuf, String)> {
        let row = |state: ImageState| (state.name.unwrap(), state.directory, state.bundle);
        self.bundles.preseed.image_states().into_iter().map(row).collect()
    }

    fn owner(&self, name: &str, is_other: bool, file: &str) -> (String, PathBuf, String) {
        let directory = if is_other { self.other.clone() } else { self.bundles.directory.path().to_owned() };
        (name.to_owned(), directory, file.to_owned())
    }

    /// Name, target and whether it is pinned.
    async fn listed(&self) -> Vec<(String, String, bool)> {
        let images = self.bundles.list_images().await.into_iter();
        let pinned =
            |labels: &nodekeel_containerd_svc::Labels| labels.contains_key("io.cri-containerd.pinned");
        images.map(|image| (image.name, image.target.digest.to_string(), pinned(&image.labels))).collect()
    }
}

impl Drop for Directories {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.other));
    }
}

#[tokio::test]
async fn the_first_directory_keeps_a_name_and_one_that_is_absent_loses_nothing() {
    let mut both = Directories::new();
    both.bundles.preseed = Preseed::new(both.bundles.directory.path()).with_directory(&both.other);
    both.bundles.put_image("same.tar", "localhost/x:1", b"first");
    both.put_other("same.tar", "localhost/x:1", b"second");
    both.put_other("a.tar", "localhost/a:1", b"a");
    assert_eq!(count_outcomes(&both.bundles.run_preseed().await), [3, 0, 0]);
    let (a, x) = (both.owner("localhost/a:1", true, "a.tar"), both.owner("localhost/x:1", false, "same.tar"));
    assert_eq!(both.owners(), [x, a]);
    let first = both.listed().await;
    assert_eq!(count_outcomes(&both.bundles.run_preseed().await), [0, 3, 0]);
    // Either is gone, and comes back.
    for directory in [both.bundles.directory.path().to_owned(), both.other.clone()] {
        let away = directory.with_extension("away");
        for is_missing in [true, false] {
            fs::rename(&directory, &away).unwrap();
            if !is_missing {
                fs::create_dir(&directory).unwrap();
            }
            let report = both.bundles.run_preseed().await;
            let absent = &report.absent_directories[..];
            assert!(
                matches!(absent, [one] if one.path == directory && one.reason.is_some() == is_missing),
                "{absent:?}"
            );
            assert!(report.failures()[0].contains(&directory.display().to_string()), "{report:?}");
            assert_eq!(both.listed().await, first, "{report:?}");
            if !is_missing {
                fs::remove_dir(&directory).unwrap();
            }
            fs::rename(&away, &directory).unwrap();
            assert_eq!(count_outcomes(&both.bundles.run_preseed().await), [0, 3, 0]);
            assert_eq!(both.listed().await, first);
        }
    }
    // A file that is gone from a directory that is there is deleted: the second brings the name now.
    fs::remove_file(both.bundles.path("same.tar")).unwrap();
    both.bundles.run_preseed().await;
    let x = both.owner("localhost/x:1", true, "same.tar");
    assert!(both.owners().contains(&x), "{:?}", both.owners());
    let moved = both.listed().await;
    assert!(moved[1].1 != first[1].1 && moved[1].2, "{moved:?}");
    fs::remove_file(both.other.join("k8s.io/same.tar")).unwrap();
    both.bundles.run_preseed().await;
    assert!(!both.listed().await[1].2, "unpinned");
}

#[tokio::test]
async fn directories_are_added_and_removed_without_reading_the_others_again() {
    let both = Directories::new();
    let own = both.bundles.directory.path().to_owned();
    both.bundles.put_image("same.tar", "localhost/own:1", b"own");
    both.put_other("same.tar", "localhost/other:1", b"other");
    both.bundles.run_preseed().await;
    let written = both.bundles.store.written_bytes();
    for (directories, expected) in [
        (vec![both.other.clone(), own.clone()], [1, 1, 0]),
        (vec![own.clone(), both.other.clone()], [0, 2, 0]),
        (vec![own.clone()], [0, 1, 0]),
    ] {
        both.bundles.preseed.set_directories(directories.clone());
        let report = both.bundles.run_preseed().await;
        assert_eq!(count_outcomes(&report), expected, "{directories:?}: {report:?}");
        let pinned: Vec<_> = both.listed().await.into_iter().map(|(.., is_pinned)| is_pinned).collect();
        assert_eq!(pinned, [directories.len() > 1, true], "{directories:?}");
        assert_eq!(count_outcomes(&both.bundles.run_preseed().await), [0, directories.len(), 0]);
    }
    assert!(both.bundles.store.written_bytes() > written, "of the other");
}

/// To remove a directory is a decision; that one is not there is none.
#[tokio::test]
async fn what_a_removed_directory_has_brought_is_unpinned_also_while_another_is_absent_or_has_no_archive() {
    for is_left in ["missing", "empty", "of another namespace"] {
        let mut all = Directories::new();
        let third = all.other.with_extension("third");
        all.bundles.preseed =
            Preseed::new(all.bundles.directory.path()).with_directory(&all.other).with_directory(&third);
        fs::create_dir_all(third.join("k8s.io")).unwrap();
        all.bundles.put_image("a.tar", "localhost/a:1", b"a");
        all.put_other("b.tar", "localhost/b:1", b"b");
        fs::write(third.join("k8s.io/c.tar"), archive_of("localhost/c:1", b"c").to_tar()).unwrap();
        assert_eq!(count_outcomes(&all.bundles.run_preseed().await), [3, 0, 0]);
        // The first is removed, and of the others at most one has bundles.
        fs::remove_dir_all(&third).unwrap();
        match is_left {
            "missing" => {}
            "empty" => {
                fs::remove_dir_all(&all.other).unwrap();
                fs::create_dir(&all.other).unwrap();
            }
            _ => fs::rename(all.other.join("k8s.io"), all.other.join("elsewhere")).unwrap(),
        }
        all.bundles.preseed.set_directories(vec![all.other.clone(), third]);
        let report = all.bundles.run_preseed().await;
        let pinned: Vec<_> = all.listed().await.into_iter().map(|(.., is_pinned)| is_pinned).collect();
        assert_eq!(pinned, [false, true, true], "{is_left}: {report:?}");
        // It comes back with the directory.
        let directories = vec![all.other.clone(), all.bundles.directory.path().to_owned()];
        all.bundles.preseed.set_directories(directories);
        all.bundles.run_preseed().await;
        assert!(all.listed().await[0].2, "{is_left}");
    }
}
