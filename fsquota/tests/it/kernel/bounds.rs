//! Limits bind.

use std::fs::{self, File};
use std::os::fd::AsFd as _;

use nodekeel_fsquota::{Bytes, Change, Inodes, Limit, ProjectQuota, QuotaSetter as _};

use super::{Place, at, bound, crowd, fill, on_both};

const MIB: u64 = 1 << 20;

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn writing_stops_at_the_limit_of_bytes_and_nowhere_else() {
    on_both(|place| {
        place.limited("small", at(MIB, 100));
        place.limited("large", at(64 * MIB, 100));
        let (written, error) = bound(|| fill(&place.path("small/file")));
        assert_eq!(error.raw_os_error(), Some(place.refusal()));
        assert!((MIB - 128 * 1024..=MIB).contains(&written), "{written} bytes fit into 1 MiB");
        let status = place.status("small").unwrap();
        assert!(!status.over_limit() && status.usage.bytes <= Bytes(MIB), "{status:?}");
        bound(|| fs::write(place.path("large/file"), vec![1; 8 * MIB as usize])).unwrap();
        bound(|| fs::write(place.path("outside"), vec![1; 8 * MIB as usize])).unwrap();
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn files_below_are_counted_at_any_depth() {
    on_both(|place| {
        place.limited("dir", at(MIB, 100));
        fs::create_dir_all(place.path("dir/a/b/c")).unwrap();
        let (written, error) = bound(|| fill(&place.path("dir/a/b/c/file")));
        assert_eq!(error.raw_os_error(), Some(place.refusal()));
        assert!(written <= MIB);
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn making_files_stops_at_the_limit_of_inodes() {
    on_both(|place| {
        place.limited("dir", at(64 * MIB, 20));
        let (made, error) = bound(|| crowd(&place.path("dir")));
        assert_eq!((made, error.raw_os_error()), (19, Some(place.refusal())), "the directory is one of 20");
        assert_eq!(place.status("dir").unwrap().usage.inodes, Inodes(20));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn limits_survive_a_remount_and_still_bind() {
    on_both(|mut place| {
        let before = place.limited("dir", at(MIB, 20));
        let kept = before.limits;
        drop(place.quota);
        place.mounted.remount("prjquota").unwrap();
        place.quota = ProjectQuota::open(place.mounted.path()).unwrap();
        let after = place.status("dir").unwrap();
        assert_eq!((after.project, after.limits), (before.project, kept));
        let (made, error) = bound(|| crowd(&place.path("dir")));
        assert_eq!((made, error.raw_os_error()), (19, Some(place.refusal())));
        let (written, error) = bound(|| fill(&place.path("dir/0")));
        assert_eq!(error.raw_os_error(), Some(place.refusal()));
        assert!((1..=MIB).contains(&written));
        let next = place.limited("next", at(MIB, 20));
        assert_ne!(next.project, before.project, "what is taken is known again");
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn a_raised_limit_lets_writing_go_on_and_a_lowered_one_stops_it_at_once() {
    on_both(|place| {
        place.limited("dir", at(MIB, 100));
        bound(|| fill(&place.path("dir/file")));
        let set = |bytes| {
            let change = Change { bytes, inodes: Limit::Keep };
            place.quota.set(place.open("dir").as_fd(), change).unwrap()
        };
        set(Limit::At(Bytes(4 * MIB)));
        bound(|| fs::write(place.path("dir/more"), vec![1; MIB as usize])).unwrap();
        File::open(place.path("dir/more")).unwrap().sync_all().unwrap();
        let lowered = set(Limit::At(Bytes(MIB)));
        assert!(lowered.over_limit(), "{lowered:?}");
        let (written, error) = bound(|| fill(&place.path("dir/yet-more")));
        assert_eq!((written, error.raw_os_error()), (0, Some(place.refusal())));
        let lifted = set(Limit::Unlimited);
        assert_eq!((lifted.limits.bytes, lifted.limits.inodes), (None, Some(Inodes(100))));
        bound(|| fs::write(place.path("dir/yet-more"), vec![1; 8 * MIB as usize])).unwrap();
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn what_is_read_back_is_near_what_was_written() {
    on_both(|place| {
        place.limited("dir", at(MIB, 100));
        let file = place.path("dir/file");
        bound(|| fs::write(&file, vec![1; 512 * 1024])).unwrap();
        File::open(&file).unwrap().sync_all().unwrap();
        let status = place.status("dir").unwrap();
        assert_eq!((status.limits.bytes, status.limits.inodes), (Some(Bytes(MIB)), Some(Inodes(100))));
        assert!(status.usage.bytes.0.abs_diff(512 * 1024) <= 51 * 1024, "{status:?}");
        for number in 0..50 {
            File::create(place.path(&format!("dir/{number}"))).unwrap();
        }
        assert_eq!(place.status("dir").unwrap().usage.inodes, Inodes(52));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn inside_a_limited_directory_the_file_system_is_as_large_as_the_limit() {
    on_both(|place| {
        place.limited("dir", at(8 * MIB, 100));
        let stat = rustix::fs::statvfs(place.path("dir")).unwrap();
        assert_eq!((stat.f_blocks * stat.f_frsize, stat.f_files), (8 * MIB, 100));
    });
}

#[test]
#[ignore = "needs kernel with 2 disks of 512 MiB"]
fn ext4_does_not_bind_the_privileged_as_the_warning_says() {
    let place = Place::new(testbed::guest::inside::FileSystem::Ext4);
    assert!(place.quota.warnings().contains(&nodekeel_fsquota::Warning::PrivilegedCanExceed));
    place.limited("dir", at(MIB, 100));
    fs::write(place.path("dir/file"), vec![1; 4 * MIB as usize]).unwrap();
    File::open(place.path("dir/file")).unwrap().sync_all().unwrap();
    assert!(place.status("dir").unwrap().over_limit());
}
