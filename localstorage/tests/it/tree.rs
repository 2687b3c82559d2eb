//! The typed layout: its paths, its checks, and its state after a crash.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::mem::{InjectedFault, MemFileStore};
use nodekeel_localstorage::tree::{
    BrandNames, DecodeError, LayoutDir, LayoutEntry, LayoutError, LayoutFile, LayoutProblem, LayoutSocket,
    LayoutTarget, LoadError,
};
use nodekeel_localstorage::{Dir, FileMode, FileStore, InvalidName, OsFileStore, layout};

use crate::golden::golden_path;
use crate::monogon_root::{
    DataPartition, EfiSystemPartition, EphemeralDir, NodeRoot, RunDir, TmpDir, metropolis_names,
};

fn memory_target(root: &str) -> LayoutTarget {
    LayoutTarget::new(Arc::new(MemFileStore::default()), root)
}

fn disk_target(root: &Path) -> LayoutTarget {
    LayoutTarget::new(Arc::new(OsFileStore::new(Dir::open(root).unwrap())), root)
}

#[test]
fn the_root_layout_matches_monogon() {
    let outline = fs::read_to_string(golden_path("layout/root.txt")).unwrap();
    let theirs = outline
        .replace("nodekeel.vfs", "dev.monogon.metropolis.vfs")
        .replace("nodekeel.devices", "devices.monogon.dev")
        .replace("nodekeel", "metropolis");
    assert_eq!(NodeRoot::SHAPE.render_outline(&metropolis_names()), theirs);
    NodeRoot::SHAPE.validate_at(&metropolis_names(), Path::new("/")).unwrap();
    NodeRoot::SHAPE.validate_at(&BrandNames::default(), Path::new("/")).unwrap();
}

#[test]
fn paths_do_not_depend_on_how_the_root_is_written() {
    for (root, prefix) in [("", ""), ("/", ""), ("//", ""), ("/r", "/r"), ("/r/", "/r"), ("r//s/", "/r/s")] {
        let root: NodeRoot = memory_target(root).create_layout().unwrap();
        let is =
            |path: &Path, expected: &str| assert_eq!(path.to_str().unwrap(), format!("{prefix}{expected}"));
        is(root.esp.path(), "/esp");
        is(root.etc.machine_id.path(), "/etc/machine-id");
        let data = root.data.create_layout_unmounted().unwrap();
        is(data.etcd.path(), "/data/etcd");
        is(data.node.credentials.certificate.path(), "/data/node/credentials/cert.pem");
        is(
            data.kubernetes.kubelet.plugins.volumes.path(),
            "/data/kubernetes/kubelet/plugins/nodekeel.vfs.sock",
        );
    }
}

#[test]
fn the_brand_name_changes_every_path() {
    let target = memory_target("/").with_brand_names("acme".parse().unwrap());
    let root: NodeRoot = target.create_layout().unwrap();
    let esp = root.esp.create_layout_unmounted().unwrap();
    assert_eq!(esp.node.parameters.path(), Path::new("/esp/acme/parameters.pb"));
    assert_eq!(esp.efi.images.a.path(), Path::new("/esp/EFI/acme/boot-a.efi"));
    let kubelet = root.data.create_layout_unmounted().unwrap().kubernetes.kubelet;
    assert!(kubelet.plugins_registry.volumes.path().ends_with("plugins_registry/acme.vfs-reg.sock"));
    assert!(kubelet.plugins_registry.kvm.path().ends_with("plugins_registry/acme.devices_kvm-reg.sock"));
    for invalid in ["", ".", "..", "a/b", "A", "-a", "a.", "a\0", &"a".repeat(64)] {
        assert!(invalid.parse::<BrandNames>().is_err(), "{invalid:?}");
        assert!(BrandNames::default().with_driver_name(invalid).is_err(), "{invalid:?}");
    }
}

#[test]
fn creating_a_layout_sets_modes_and_repairs_them() {
    let temporary = tempfile::tempdir().unwrap();
    let mode = |path: &str| fs::metadata(temporary.path().join(path)).unwrap().permissions().mode() & 0o7777;
    let create_data = || -> DataPartition {
        let root: NodeRoot = disk_target(temporary.path()).create_layout().unwrap();
        root.tmp.create_layout_unmounted().unwrap();
        root.data.create_layout_unmounted().unwrap()
    };
    let data = create_data();
    data.node.roles.write(b"all").unwrap();
    let expected = || {
        let modes = ["data", "data/etcd", "data/etcd/data", "data/node/roles.pb", "tmp"].map(mode);
        assert_eq!(modes.map(|mode| format!("{mode:o}")), ["755", "700", "700", "400", "1777"]);
    };
    expected();
    for path in ["data/etcd", "data/etcd/data", "data/node/roles.pb"] {
        fs::set_permissions(temporary.path().join(path), fs::Permissions::from_mode(0o704)).unwrap();
    }
    let changed = temporary.path().join("data/etcd");
    fs::set_permissions(changed, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(create_data().node.roles.read().unwrap(), b"all");
    expected();
}

#[test]
fn a_failed_creation_names_the_path_and_can_be_retried() {
    let temporary = tempfile::tempdir().unwrap();
    fs::create_dir(temporary.path().join("etcd")).unwrap();
    fs::write(temporary.path().join("etcd/data"), "conflict").unwrap();
    let target = disk_target(temporary.path());
    let error = target.create_layout::<DataPartition>().unwrap_err();
    let LayoutError::Directory { path, source } = &error else { panic!("{error:?}") };
    assert_eq!(path, &temporary.path().join("etcd/data"));
    assert!(source.is_not_a_directory(), "{source:?}");
    fs::remove_file(temporary.path().join("etcd/data")).unwrap();
    target.create_layout::<DataPartition>().unwrap();
    target.create_layout::<DataPartition>().unwrap();
}

#[test]
fn a_creation_failing_at_any_step_can_be_retried() {
    for fault in [
        InjectedFault::NoSpace,
        InjectedFault::IoError,
        InjectedFault::CrashBefore,
        InjectedFault::CrashAfter,
    ] {
        let store = Arc::new(MemFileStore::default());
        let target = LayoutTarget::new(store.clone(), "/data");
        let mut failed = 0;
        for at in 1.. {
            store.fail_nth(at, fault);
            let created = target.create_layout::<DataPartition>();
            store.clear_fault();
            match created {
                Ok(_) => break,
                Err(_) => failed += 1,
            }
        }
        assert!(failed > 25, "{fault:?} failed {failed} creations");
    }
}

layout! {
    /// Two names that are equal for a driver with the name `same`.
    pub struct Clash {
        /// Outer.
        pub outer: Inner = "outer", 0o700;
    }

    /// The inner layout.
    pub struct Inner {
        /// One.
        pub one: LayoutDir = "{driver}", 0o700;
        /// The other.
        pub other: LayoutFile = "same", 0o600;
    }

    /// An unknown variable.
    pub struct Unknown {
        /// It.
        pub file: LayoutFile = "{unknown}", 0o600;
    }

    /// The name of commit records.
    pub struct Reserved {
        /// Such a file.
        pub record: LayoutFile = ".commit", 0o600;
    }

    /// The name of a temporary file.
    pub struct TempFile {
        /// Such a file.
        pub temp_file: LayoutFile = ".nodekeel-0123456789abcdef.new", 0o600;
    }

    /// A socket at a deep path.
    pub struct Deep {
        /// It.
        pub socket: LayoutSocket = "deep.sock", 0o600;
    }
}

#[test]
fn an_invalid_layout_is_reported_with_its_entry_before_any_change() {
    let store = Arc::new(MemFileStore::default());
    let target = LayoutTarget::new(store.clone(), "/");
    let clashing = target.clone().with_brand_names(BrandNames::default().with_driver_name("same").unwrap());
    let error = clashing.create_layout::<Clash>().unwrap_err();
    let LayoutError::InvalidLayout(invalid) = error else { panic!("{error:?}") };
    assert_eq!(invalid.to_string(), "outer: same: the name is used twice in its directory");
    assert_eq!(invalid.problem(), LayoutProblem::Duplicate);
    assert_eq!(invalid.entry_names().collect::<Vec<_>>(), ["outer", "same"]);
    let error = Unknown::SHAPE.validate_at(&BrandNames::default(), Path::new("/")).unwrap_err();
    assert_eq!(error.to_string(), "{unknown}: the name contains an unknown variable");
    for shape in [Reserved::SHAPE, TempFile::SHAPE] {
        let reserved = shape.validate_at(&BrandNames::default(), Path::new("/")).unwrap_err();
        assert_eq!(reserved.problem(), LayoutProblem::InvalidName(InvalidName::Reserved));
    }
    assert_eq!(store.list(Path::new("")).unwrap(), [], "nothing was created");
    target.create_layout::<Clash>().unwrap();
}

#[test]
fn an_expanded_name_can_be_too_long() {
    layout! {
        /// 240 bytes and a driver name.
        pub struct Long {
            /// The file.
            pub file: LayoutFile = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{driver}", 0o600;
        }
    }
    let names = BrandNames::default().with_driver_name(&"d".repeat(60)).unwrap();
    let error = Long::SHAPE.validate_at(&names, Path::new("/")).unwrap_err();
    assert_eq!(error.problem(), LayoutProblem::InvalidName(InvalidName::TooLong));
}

#[test]
fn a_socket_path_has_at_most_107_bytes() {
    let room = 107 - "/deep.sock".len();
    let temporary = tempfile::tempdir().unwrap();
    let base = temporary.path().join("x".repeat(room - temporary.path().as_os_str().len() - 1));
    fs::create_dir(&base).unwrap();
    let deep: Deep = disk_target(&base).create_layout().unwrap();
    assert_eq!(deep.socket.path().as_os_str().len(), 107);
    assert!(!deep.socket.exists().unwrap());
    let listener = UnixListener::bind(deep.socket.path()).unwrap();
    assert!(deep.socket.exists().unwrap());
    drop(listener);
    assert!(deep.socket.remove_stale().unwrap() && !deep.socket.remove_stale().unwrap());

    let longer = base.with_file_name("x".repeat(base.file_name().unwrap().len() + 1));
    fs::create_dir(&longer).unwrap();
    let LayoutError::InvalidLayout(invalid) = disk_target(&longer).create_layout::<Deep>().unwrap_err()
    else {
        panic!()
    };
    assert_eq!(invalid.problem(), LayoutProblem::SocketPathTooLong { bytes: 108 });
    assert!(UnixListener::bind(longer.join("deep.sock")).is_err(), "the kernel agrees");
}

#[test]
fn another_layout_is_added_unless_names_collide() {
    layout! {
        /// A custom layout.
        pub struct WeatherStation {
            /// Readings.
            pub readings: LayoutDir = "readings", 0o750;
        }
        /// A custom layout with a duplicate name.
        pub struct Duplicate {
            /// A duplicate of the directory of etcd.
            pub etcd: LayoutFile = "etcd", 0o600;
        }
    }
    let data: DataPartition = memory_target("/data").create_layout().unwrap();
    let station: WeatherStation = data.add_layout().unwrap();
    assert_eq!(station.readings.path(), Path::new("/data/readings"));
    let LayoutError::InvalidLayout(invalid) = data.add_layout::<Duplicate>().unwrap_err() else { panic!() };
    assert_eq!(invalid.to_string(), "etcd: the name is used twice in its directory");
}

#[test]
fn an_absent_file_is_distinguished_from_an_unreadable_one() {
    let temporary = tempfile::tempdir().unwrap();
    let ephemeral: EphemeralDir = disk_target(temporary.path()).create_layout().unwrap();
    let id = &ephemeral.machine_id;
    assert!(!id.exists().unwrap());
    assert_eq!(id.read_if_present().unwrap(), None);
    id.write(b"0123").unwrap();
    assert!(id.exists().unwrap());
    assert_eq!(id.read_if_present().unwrap().unwrap(), b"0123");
    assert!(id.remove().unwrap() && !id.remove().unwrap());
    // A dangling link exists, and is not followed.
    std::os::unix::fs::symlink("nowhere", id.path()).unwrap();
    assert!(id.exists().unwrap());
    assert!(id.read_if_present().unwrap_err().is_symlink());
    // A file in place of a directory is an error and not absence.
    fs::remove_dir(temporary.path().join("consensus")).unwrap();
    fs::write(temporary.path().join("consensus"), "").unwrap();
    assert!(ephemeral.consensus.client.exists().unwrap_err().is_not_a_directory());
}

#[test]
fn esp_files_are_absent_unavailable_corrupted_or_unreadable() {
    let store = Arc::new(MemFileStore::default());
    let esp: EfiSystemPartition = LayoutTarget::new(store.clone(), "/esp").create_layout().unwrap();
    let unseal = |bytes: &[u8]| match bytes {
        b"sealed" => Err(DecodeError::unavailable("the TPM is gone")),
        b"plain" => Ok(bytes.len()),
        _ => Err(DecodeError::corrupted("no such tag")),
    };
    for file in [
        &esp.node.sealed_configuration,
        &esp.node.parameters,
        &esp.node.cluster_directory,
        &esp.node.network_configuration,
    ] {
        assert!(matches!(file.load_decoded(unseal), Err(LoadError::Absent { path }) if path == file.path()));
        assert_eq!(LoadError::absent_as_none(file.load_decoded(unseal)).unwrap(), None);
        file.write(b"sealed").unwrap();
        assert!(matches!(file.load_decoded(unseal), Err(LoadError::Unavailable { .. })));
        assert!(LoadError::absent_as_none(file.load_decoded(unseal)).is_err());
        file.write(b"noise").unwrap();
        let corrupted = file.load_decoded(unseal).unwrap_err();
        assert_eq!(corrupted.to_string(), format!("file {} is corrupt: restore it", file.path().display()));
        file.write(b"plain").unwrap();
        assert_eq!(file.load_decoded(unseal).unwrap(), 5);
        store.fail_nth(1, InjectedFault::IoError);
        let unread = file.load_decoded(unseal).unwrap_err();
        assert!(
            matches!(unread, LoadError::Read { .. }),
            "a failing disk does not mean a new node: {unread:?}"
        );
    }
}

#[test]
fn a_mounted_layout_is_reached_through_its_open_directory() {
    let temporary = tempfile::tempdir().unwrap();
    let root: NodeRoot = disk_target(temporary.path()).create_layout().unwrap();
    let mounted = tempfile::tempdir().unwrap();
    let run: RunDir = root.run.create_layout_in(Dir::open(mounted.path()).unwrap()).unwrap();
    assert_eq!(run.containerd.path(), temporary.path().join("run/containerd"));
    assert!(mounted.path().join("containerd").is_dir());
    assert_eq!(
        fs::read_dir(temporary.path().join("run")).unwrap().count(),
        0,
        "nothing lies below the mount"
    );
    let tmp: TmpDir = root.tmp.create_layout_on(Arc::new(MemFileStore::default())).unwrap();
    assert_eq!(tmp.path(), root.tmp.path());
}

#[test]
fn a_child_has_the_name_and_the_mode_of_run_time() {
    let scratch = tempfile::tempdir().unwrap();
    let top: EphemeralDir = disk_target(scratch.path()).create_layout().unwrap();
    let child: LayoutDir = top.create_child("pod-7", FileMode::new(0o710)).unwrap();
    // Its directory has what a handle does not have.
    let dir = child.open().unwrap();
    assert!(child.open().unwrap().try_lock().unwrap().is_some());
    dir.replace_file("image", FileMode::PRIVATE_FILE).unwrap().commit().unwrap();
    let image: LayoutFile = child.create_child("image", FileMode::new(0o640)).unwrap();
    assert!(image.exists().unwrap());
    let mode = |name: &str| Dir::open(scratch.path()).unwrap().metadata(name).unwrap().mode;
    assert_eq!((mode("pod-7"), mode("pod-7/image")), (FileMode::new(0o710), FileMode::new(0o640)));
    for (name, mode) in [("..", 0o700), ("a/b", 0o700), ("", 0o700), ("containerd", 0o700), ("pod-8", 0o600)]
    {
        let rejected = top.create_child::<LayoutDir>(name, FileMode::new(mode));
        assert!(matches!(rejected, Err(LayoutError::InvalidLayout(_))), "{name:?}: {rejected:?}");
    }
    let socket = top.create_child::<LayoutSocket>(&"s".repeat(200), FileMode::PRIVATE_FILE);
    assert!(matches!(socket, Err(LayoutError::InvalidLayout(_))), "{socket:?}");
    // A store in memory has no such directories.
    let memory: LayoutDir = memory_target("/").create_layout().unwrap();
    assert_eq!(memory.open().unwrap_err().io_kind(), std::io::ErrorKind::Unsupported);
    // What others create below it can be listed in any store.
    memory.create_child::<LayoutDir>("deep", FileMode::PRIVATE_DIR).unwrap();
    for target in [&memory, &top] {
        assert!(target.list_below("deep/er").unwrap_err().is_not_found());
        for outside in ["..", "deep/../..", "/etc"] {
            let error = target.list_below(outside).unwrap_err();
            assert!(!error.is_not_found(), "{outside}: {error}");
        }
    }
    assert!(memory.list_below("deep").unwrap().is_empty());
}
