//! The kernel's mounts, in a mount namespace of the test's own.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nodekeel_provisioner::csi::testing::{Ground, conformance};
use nodekeel_provisioner::csi::{Conflict, MountError, MountFlags, Mounts, OsMounts, Target};
use tonic::Code;

use super::harness::Running;

/// Runs in a thread that has mounts of its own, and so do the threads that it makes.
pub(crate) fn apart(run: impl FnOnce() + Send + 'static) {
    let apart = move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("root may unshare");
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).expect("make private");
        run();
    };
    if let Err(panic) = std::thread::spawn(apart).join() {
        std::panic::resume_unwind(panic);
    }
}

struct Place {
    directory: tempfile::TempDir,
    mounts: OsMounts,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for below in ["kubelet/pods", "volumes/one", "volumes/two"] {
            fs::create_dir_all(directory.path().join(below)).expect("create");
        }
        fs::write(directory.path().join("volumes/one/file"), "one").expect("write");
        let mounts = OsMounts::new(directory.path().join("kubelet"));
        Self { directory, mounts }
    }

    fn path(&self, below: &str) -> std::path::PathBuf {
        self.directory.path().join(below)
    }

    fn volume(&self, name: &str) -> File {
        File::open(self.path("volumes").join(name)).expect("open")
    }

    fn target(&self, below: &str) -> Target {
        let kubelet = self.path("kubelet");
        Target::try_new(&kubelet, kubelet.join(below).to_str().expect("UTF-8")).expect("a target")
    }
}

#[test]
#[ignore = "needs root"]
fn the_kernels_mounts_keep_the_contract() {
    apart(|| {
        let place = Place::new();
        let (one, two, kubelet) = (place.volume("one"), place.volume("two"), place.path("kubelet"));
        conformance(&place.mounts, Ground { volumes: [one.as_fd(), two.as_fd()], kubelet: &kubelet });
        assert_eq!(fs::read_dir(place.path("kubelet/pods")).expect("list").count(), 0);
        // Also where the kubelet's directory is reached by a link, as it often is.
        symlink(&kubelet, place.path("link")).expect("link");
        let mounts = OsMounts::new(place.path("link"));
        conformance(&mounts, Ground { volumes: [one.as_fd(), two.as_fd()], kubelet: &place.path("link") });
    });
}

#[test]
#[ignore = "needs root"]
fn a_mount_shows_the_volume_and_does_what_its_flags_say() {
    apart(|| {
        let (place, target) = (Place::new(), "kubelet/pods/a");
        let read_only = MountFlags { read_only: true, ..Default::default() };
        place.mounts.mount(place.volume("one").as_fd(), &place.target("pods/a"), read_only).expect("mount");
        assert_eq!(fs::read_to_string(place.path(target).join("file")).expect("read"), "one");
        let refused = fs::write(place.path(target).join("new"), "").expect_err("read-only");
        assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        fs::write(place.path("volumes/one/new"), "").expect("the volume itself isn't read-only");
        place.mounts.unmount(&place.target("pods/a")).expect("unmount");
        assert!(!place.path(target).exists());
        assert_eq!(fs::read_to_string(place.path("volumes/one/file")).expect("read"), "one");
    });
}

#[test]
#[ignore = "needs root"]
fn a_busy_target_stays_until_it_is_free() {
    apart(|| {
        let place = Place::new();
        place
            .mounts
            .mount(place.volume("one").as_fd(), &place.target("pods/a"), MountFlags::default())
            .expect("mount");
        let used = File::open(place.path("kubelet/pods/a/file")).expect("open");
        let refused = place.mounts.unmount(&place.target("pods/a")).expect_err("in use");
        assert!(matches!(refused, MountError::Busy { .. }), "{refused:?}");
        assert!(place.mounts.mounted(&place.target("pods/a")).expect("look").is_some());
        drop(used);
        place.mounts.unmount(&place.target("pods/a")).expect("unmount");
    });
}

#[test]
#[ignore = "needs root"]
fn links_and_what_is_in_the_way_are_left_alone() {
    apart(|| {
        let (place, flags) = (Place::new(), MountFlags::default());
        let outside = place.path("outside");
        fs::create_dir_all(outside.join("mount")).expect("create");
        symlink(&outside, place.path("kubelet/pods/way")).expect("link");
        symlink(&outside, place.path("kubelet/pods/end")).expect("link");
        fs::write(place.path("kubelet/pods/file"), "").expect("write");
        fs::create_dir_all(place.path("kubelet/pods/full/x")).expect("create");
        let volume = place.volume("one");
        let mount = |below: &str| place.mounts.mount(volume.as_fd(), &place.target(below), flags);
        for below in ["pods/way/mount", "pods/end", "pods/file", "pods/file/x"] {
            let target = place.target(below);
            assert!(matches!(mount(below), Err(MountError::Link { .. })), "{below}: {:?}", mount(below));
            assert!(matches!(place.mounts.unmount(&target), Err(MountError::Link { .. })), "{below}");
            assert!(matches!(place.mounts.mounted(&target), Err(MountError::Link { .. })), "{below}");
        }
        assert!(matches!(mount("pods/none/mount"), Err(MountError::NoParent { .. })));
        let full = mount("pods/full");
        assert!(matches!(full, Err(MountError::Occupied { source: Conflict::NotEmpty, .. })), "{full:?}");
        let full = place.mounts.unmount(&place.target("pods/full"));
        assert!(matches!(full, Err(MountError::Occupied { source: Conflict::NotEmpty, .. })), "{full:?}");
        assert_eq!(place.mounts.targets(volume.as_fd()).expect("list"), []);
        assert!(outside.join("mount").exists() && place.path("kubelet/pods/full/x").exists());
    });
}

#[test]
#[ignore = "needs root"]
fn a_mount_that_fails_leaves_no_directory() {
    apart(|| {
        let place = Place::new();
        let file = File::open("/proc/self/status").expect("open");
        let target = place.target("pods/a");
        place
            .mounts
            .mount(file.as_fd(), &target, MountFlags::default())
            .expect_err("a file isn't a directory");
        assert!(!place.path("kubelet/pods/a").exists());
    });
}

#[test]
#[ignore = "needs root"]
fn what_pods_mount_in_a_volume_is_not_seen_in_the_store() {
    apart(|| {
        let place = Place::new();
        // As a node has it: everything is shared.
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_SHARED, nothing).expect("share");
        fs::create_dir(place.path("volumes/one/sub")).expect("create");
        place
            .mounts
            .mount(place.volume("one").as_fd(), &place.target("pods/a"), MountFlags::default())
            .expect("mount");
        let sub = place.path("kubelet/pods/a/sub");
        mount(Some("none"), &sub, Some("tmpfs"), MsFlags::empty(), nothing).expect("mount");
        fs::write(sub.join("inner"), "").expect("write");
        assert!(!place.path("volumes/one/sub/inner").exists());
        nix::mount::umount(&sub).expect("unmount");
        place.mounts.unmount(&place.target("pods/a")).expect("unmount");
    });
}

#[test]
#[ignore = "needs root"]
fn the_kubelets_calls_end_in_real_mounts() {
    apart(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let running = Running::start(|kubelet: &Path| Arc::new(OsMounts::new(kubelet))).await;
            let (volume, path) = (running.volume(1).await, running.path("a"));
            fs::write(running.volumes.path(&volume).join("file"), "data").expect("write");
            let mut node = running.node().await;
            for _ in 0..2 {
                assert_eq!(node.publish(&volume, &path).await, Ok(()));
            }
            let mounts = fs::read_to_string("/proc/thread-self/mountinfo").expect("procfs");
            assert_eq!(
                mounts.lines().filter(|line| line.contains(&path)).count(),
                1,
                "mounts aren't stacked"
            );
            assert_eq!(fs::read_to_string(Path::new(&path).join("file")).expect("read"), "data");
            assert_eq!(node.stats(&volume, &path).await.map(|rows| rows.len()), Ok(2));
            assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
            assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
            assert_eq!(node.stats(&volume, &path).await, Err(Code::NotFound));
            assert!(!Path::new(&path).exists());
            running.supervisor.shutdown().await;
        });
    });
}
