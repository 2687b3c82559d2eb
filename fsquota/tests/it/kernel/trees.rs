//! Directories that are not empty.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;

use nodekeel_fsquota::{Error, Inodes, QuotaSetter as _};

use super::{Place, at, bound, fill, on_both};

const MIB: u64 = 1 << 20;

fn furnish(place: &Place) {
    fs::create_dir_all(place.path("full/a/b")).unwrap();
    fs::create_dir(place.path("outside")).unwrap();
    for name in ["full/one", "full/a/two", "full/a/b/three", "outside/file"] {
        fs::write(place.path(name), vec![1; 64 * 1024]).unwrap();
        File::open(place.path(name)).unwrap().sync_all().unwrap();
    }
    symlink("../outside", place.path("full/link")).unwrap();
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_full_directory_is_refused_and_taken_when_its_tree_is_asked_for() {
    on_both(|place| {
        furnish(&place);
        let full = place.open("full");
        assert!(matches!(place.quota.set(full.as_fd(), at(MIB, 100)), Err(Error::NotEmpty)));
        assert_eq!(place.status("full"), None);
        let (status, changed) = place.quota.set_tree(full.as_fd(), at(MIB, 100)).unwrap();
        assert_eq!((changed.changed, changed.special, changed.foreign), (5, 1, 0), "{changed:?}");
        assert_eq!(status.usage.inodes, Inodes(6));
        assert!(status.usage.bytes.0 >= 192 * 1024, "{status:?}");
        assert_eq!(place.status("outside"), None, "no link was followed");
        let (written, error) = bound(|| fill(&place.path("full/a/b/more")));
        assert_eq!(error.raw_os_error(), Some(place.refusal()));
        assert!(written <= MIB - 192 * 1024);
        let (_, again) = place.quota.set_tree(full.as_fd(), at(MIB, 100)).unwrap();
        assert_eq!((again.changed, again.unchanged), (0, 6), "{again:?}");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_tree_is_cleared_and_its_number_free_again() {
    on_both(|place| {
        furnish(&place);
        fs::remove_file(place.path("full/link")).unwrap();
        let full = place.open("full");
        place.quota.set_tree(full.as_fd(), at(MIB, 100)).unwrap();
        assert!(matches!(place.quota.clear(full.as_fd()), Err(Error::NotEmpty)));
        let changed = place.quota.clear_tree(full.as_fd()).unwrap();
        assert_eq!(changed.changed, 5, "{changed:?}");
        for name in ["full", "full/a", "full/a/b"] {
            assert_eq!(place.status(name), None);
        }
        assert_eq!(place.quota.list().unwrap(), []);
        fs::write(place.path("full/a/large"), vec![1; 4 * MIB as usize]).unwrap();
        assert_eq!(place.quota.clear_tree(full.as_fd()).unwrap().changed, 0, "again is nothing");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn directories_with_limits_of_their_own_keep_them() {
    on_both(|place| {
        fs::create_dir(place.path("full")).unwrap();
        let inner = place.limited("full/inner", at(MIB, 10));
        fs::write(place.path("full/inner/file"), "x").unwrap();
        let (outer, changed) = place.quota.set_tree(place.open("full").as_fd(), at(8 * MIB, 100)).unwrap();
        assert_eq!((changed.changed, changed.foreign), (0, 1), "{changed:?}");
        assert_ne!(outer.project, inner.project);
        assert_eq!(place.status("full/inner").unwrap().limits, inner.limits);
        place.quota.clear_tree(place.open("full").as_fd()).unwrap();
        assert_eq!(place.status("full/inner").unwrap().limits, inner.limits);
    });
}
