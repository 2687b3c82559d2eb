//! Real mounts, in a private mount namespace.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nodekeel_localstorage::mount::{MountEntry, mount_table};
use nodekeel_provisioner::OpenVolume;
use nodekeel_provisioner::csi::testing::{ConformanceSetup, conformance};
use nodekeel_provisioner::csi::{
    BindMounter, MountRestrictions, TargetConflict, TargetMountError, VolumeMounter,
};
use tonic::Code;

use super::harness::{MountSite, TestPlugin};

/// Runs in a thread with a private mount namespace, which its child threads share.
pub(crate) fn run_in_mount_namespace(run: impl FnOnce() + Send + 'static) {
    let run_apart = move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("root may unshare");
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).expect("make private");
        unmount_copies();
        run();
    };
    if let Err(panic) = std::thread::spawn(run_apart).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Other tests unmount their disks, and need them unused then: copies of their mounts would keep them in use.
fn unmount_copies() {
    let directory = std::env::temp_dir();
    let is_copy = |mount: &&MountEntry| mount.target != directory && mount.target.starts_with(&directory);
    for mount in mount_table().expect("the mounts").iter().rev().filter(is_copy) {
        let _ = umount2(&mount.target, MntFlags::MNT_DETACH);
    }
}

/// A site with the volumes `one`, which has a file, and `two`.
fn mount_site() -> MountSite {
    let site = MountSite::new();
    for name in ["one", "two"] {
        site.create_directory(name);
    }
    fs::write(site.path("volumes/one/file"), "one").expect("write");
    site
}

/// Mounts a directory or a file elsewhere.
pub(crate) fn bind_mount(source: &Path, target: &Path) {
    mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("mount");
}

#[test]
#[ignore = "needs root"]
fn the_os_mounter_keeps_the_contract() {
    run_in_mount_namespace(|| {
        let fixture = mount_site();
        let (one, two, kubelet) =
            (fixture.create_directory("one"), fixture.create_directory("two"), fixture.path("kubelet"));
        conformance(&fixture.mounts, ConformanceSetup { volumes: [&one, &two], kubelet: &kubelet });
        assert_eq!(fs::read_dir(fixture.path("kubelet/pods")).expect("list").count(), 0);
        // Also if the kubelet's directory is reached through a symbolic link, as it often is.
        symlink(&kubelet, fixture.path("link")).expect("link");
        let mounts = BindMounter::new(fixture.path("link"));
        conformance(&mounts, ConformanceSetup { volumes: [&one, &two], kubelet: &fixture.path("link") });
    });
}

#[test]
#[ignore = "needs root"]
fn a_mount_shows_the_volume_and_enforces_its_flags() {
    run_in_mount_namespace(|| {
        let (fixture, target) = (mount_site(), "kubelet/pods/a");
        let read_only = MountRestrictions { read_only: true, ..Default::default() };
        fixture.mount(&fixture.create_directory("one"), "pods/a", read_only);
        assert_eq!(fs::read_to_string(fixture.path(target).join("file")).expect("read"), "one");
        let error = fs::write(fixture.path(target).join("new"), "").expect_err("read-only");
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        fs::write(fixture.path("volumes/one/new"), "").expect("the volume itself isn't read-only");
        fixture.mounts.unmount(&fixture.target("pods/a")).expect("unmount");
        assert!(!fixture.path(target).exists());
        assert_eq!(fs::read_to_string(fixture.path("volumes/one/file")).expect("read"), "one");
    });
}

#[test]
#[ignore = "needs root"]
fn a_mount_of_a_directory_within_a_volume_is_a_use_of_it_and_of_no_other() {
    run_in_mount_namespace(|| {
        let fixture = mount_site();
        let below = fixture.path("kubelet/pods/a/volume-subpaths/0");
        fs::create_dir_all(&below).expect("create");
        fs::create_dir_all(fixture.path("volumes/one/sub/deep")).expect("create");
        fs::create_dir_all(fixture.path("volumes/one-more/sub")).expect("create");
        let bind = |source: &str| {
            bind_mount(&fixture.path(source), &below);
        };
        let (one, two) = (fixture.create_directory("one"), fixture.create_directory("two"));
        let nested = |volume: &OpenVolume| fixture.mounts.list_nested(volume).expect("list");
        assert_eq!(nested(&one), Vec::<std::path::PathBuf>::new());
        bind("volumes/one-more/sub");
        assert_eq!(nested(&one), Vec::<std::path::PathBuf>::new(), "a name that begins like it");
        bind("volumes/one/sub/deep");
        assert_eq!(nested(&one), std::slice::from_ref(&below));
        assert_eq!(nested(&two), Vec::<std::path::PathBuf>::new());
        let targets = fixture.mounts.list_targets(&one).expect("list");
        assert!(targets.is_empty(), "the volume itself is not mounted: {targets:?}");
    });
}

#[test]
#[ignore = "needs root"]
fn a_busy_target_stays_until_it_is_free() {
    run_in_mount_namespace(|| {
        let fixture = mount_site();
        fixture.mount(&fixture.create_directory("one"), "pods/a", MountRestrictions::default());
        let used = File::open(fixture.path("kubelet/pods/a/file")).expect("open");
        let error = fixture.mounts.unmount(&fixture.target("pods/a")).expect_err("in use");
        assert!(matches!(error, TargetMountError::Busy { .. }), "{error:?}");
        assert!(fixture.mounts.find_mount(&fixture.target("pods/a")).expect("inspect").is_some());
        drop(used);
        fixture.mounts.unmount(&fixture.target("pods/a")).expect("unmount");
    });
}

#[test]
#[ignore = "needs root"]
fn links_and_conflicting_files_are_kept() {
    run_in_mount_namespace(|| {
        let (fixture, flags) = (mount_site(), MountRestrictions::default());
        let outside = fixture.path("outside");
        fs::create_dir_all(outside.join("mount")).expect("create");
        symlink(&outside, fixture.path("kubelet/pods/way")).expect("link");
        symlink(&outside, fixture.path("kubelet/pods/end")).expect("link");
        fs::write(fixture.path("kubelet/pods/file"), "data").expect("write");
        fs::create_dir_all(fixture.path("kubelet/pods/full/x")).expect("create");
        let volume = fixture.create_directory("one");
        let mount = |below: &str| fixture.mounts.mount(&volume, &fixture.target(below), flags);
        for below in ["pods/way/mount", "pods/end", "pods/file", "pods/file/x"] {
            let target = fixture.target(below);
            assert!(
                matches!(mount(below), Err(TargetMountError::NotDirectory { .. })),
                "{below}: {:?}",
                mount(below)
            );
            assert!(
                matches!(fixture.mounts.unmount(&target), Err(TargetMountError::NotDirectory { .. })),
                "{below}"
            );
            assert!(
                matches!(fixture.mounts.find_mount(&target), Err(TargetMountError::NotDirectory { .. })),
                "{below}"
            );
        }
        assert!(matches!(mount("pods/none/mount"), Err(TargetMountError::NoParent { .. })));
        let full = mount("pods/full");
        assert!(
            matches!(full, Err(TargetMountError::Occupied { source: TargetConflict::NotEmpty, .. })),
            "{full:?}"
        );
        let full = fixture.mounts.unmount(&fixture.target("pods/full"));
        assert!(
            matches!(full, Err(TargetMountError::Occupied { source: TargetConflict::NotEmpty, .. })),
            "{full:?}"
        );
        assert_eq!(fixture.mounts.list_targets(&volume).expect("list"), []);
        assert!(outside.join("mount").exists() && fixture.path("kubelet/pods/full/x").exists());
    });
}

#[test]
#[ignore = "needs root"]
fn a_mount_that_fails_leaves_no_directory() {
    run_in_mount_namespace(|| {
        let fixture = mount_site();
        let file = OpenVolume::Directory(File::open("/proc/self/status").expect("open").into());
        let target = fixture.target("pods/a");
        fixture
            .mounts
            .mount(&file, &target, MountRestrictions::default())
            .expect_err("a file isn't a directory");
        assert!(!fixture.path("kubelet/pods/a").exists());
    });
}

#[test]
#[ignore = "needs root"]
fn mounts_inside_a_published_volume_do_not_reach_the_store() {
    run_in_mount_namespace(|| {
        let fixture = mount_site();
        // As on a node: all mounts are shared.
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_SHARED, nothing).expect("share");
        fs::create_dir(fixture.path("volumes/one/sub")).expect("create");
        fixture.mount(&fixture.create_directory("one"), "pods/a", MountRestrictions::default());
        let sub = fixture.path("kubelet/pods/a/sub");
        mount(Some("none"), &sub, Some("tmpfs"), MsFlags::empty(), nothing).expect("mount");
        fs::write(sub.join("inner"), "").expect("write");
        assert!(!fixture.path("volumes/one/sub/inner").exists());
        nix::mount::umount(&sub).expect("unmount");
        fixture.mounts.unmount(&fixture.target("pods/a")).expect("unmount");
    });
}

#[test]
#[ignore = "needs root"]
fn the_kubelets_calls_end_in_real_mounts() {
    run_in_mount_namespace(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let plugin = TestPlugin::start(|kubelet: &Path| Arc::new(BindMounter::new(kubelet))).await;
            let (volume, path) = (plugin.create_volume(1).await, plugin.pod_path("a"));
            fs::write(plugin.volumes.path(&volume).join("file"), "data").expect("write");
            let mut node = plugin.node_client().await;
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
            plugin.supervisor.shutdown().await;
        });
    });
}

#[test]
#[ignore = "needs root"]
fn an_unpublish_unmounts_the_volume_and_nothing_else() {
    run_in_mount_namespace(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let plugin = TestPlugin::start(|kubelet: &Path| Arc::new(BindMounter::new(kubelet))).await;
            let (volume, other) = (plugin.create_volume(1).await, plugin.create_volume(2).await);
            let path = plugin.pod_path("a");
            let mut node = plugin.node_client().await;
            let is_mounted = || mount_table().expect("mounts").iter().any(|it| it.target == Path::new(&path));
            let unmount = || umount2(Path::new(&path), MntFlags::empty()).expect("it is mounted");

            // On top of the volume, and instead of it.
            assert_eq!(node.publish(&volume, &path).await, Ok(()));
            bind_mount(&plugin.volumes.path(&other), Path::new(&path));
            assert_eq!(node.unpublish(&volume, &path).await, Err(Code::FailedPrecondition));
            unmount();
            assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
            fs::create_dir(&path).expect("create");
            let nothing = None::<&str>;
            mount(nothing, Path::new(&path), Some("tmpfs"), MsFlags::empty(), nothing).expect("mount");
            assert_eq!(node.unpublish(&volume, &path).await, Err(Code::FailedPrecondition));
            assert!(is_mounted());
            unmount();

            // A volume that the store has lost, or has again, is known by the mount.
            assert_eq!(node.publish(&volume, &path).await, Ok(()));
            fs::remove_dir_all(plugin.volumes.path(&volume)).expect("remove");
            assert_eq!(node.unpublish(&other, &path).await, Err(Code::FailedPrecondition));
            assert_eq!(node.unpublish(&volume, &path).await, Ok(()));
            assert!(!is_mounted());
            plugin.supervisor.shutdown().await;
        });
    });
}
