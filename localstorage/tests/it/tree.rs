//! The typed tree: where everything lies, how it is checked, and what a crash leaves of it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use nodekeel_localstorage::mem::{Fault, MemPlacement};
use nodekeel_localstorage::tree::{
    Data, Directory, Ephemeral, Esp, File, LayoutProblem, LoadError, Names, Node, PlaceError, Root, Run,
    Site, Socket, Tmp, Undecodable,
};
use nodekeel_localstorage::{Dir, InvalidName, OsPlacement, Placement, layout};

fn in_memory(root: &str) -> Site {
    Site::new(Arc::new(MemPlacement::default()), root)
}

fn on_disk(root: &Path) -> Site {
    Site::new(Arc::new(OsPlacement::new(Dir::open(root).unwrap())), root)
}

/// Every path and mode of the original, with its own names filled in.
const ORIGINAL: &str = "\
0755 esp/ (mount point)
0700   metropolis/
0644     sealed_configuration.pb
0644     parameters.pb
0644     cluster_directory.pb
0644     network_configuration.pb
0755   EFI/
0755     BOOT/
0755     metropolis/
0644       boot-a.efi
0644       boot-b.efi
0755 data/ (mount point)
0700   containerd/
0700   etcd/
0700     peer_pki/
0600       ca.pem
0600       cert.pem
0600       cert-key.pem
0400     peer_crl
0700     data/
0700   kubernetes/
0700     clusternet/
0600       private.key
0700     csiprovisioner/
0700       pki/
0600         ca.pem
0600         cert.pem
0600         cert-key.pem
0700     netservices/
0700       pki/
0600         ca.pem
0600         cert.pem
0600         cert-key.pem
0700     kubelet/
0700       pki/
0600         ca.pem
0600         cert.pem
0600         cert-key.pem
0700       device-plugins/
0600         kubelet.sock=
0700       logs/
0700       plugins/
0600         dev.monogon.metropolis.vfs.sock=
0600         devices.monogon.dev_kvm.sock=
0700       plugins_registry/
0600         dev.monogon.metropolis.vfs-reg.sock=
0600         devices.monogon.dev_kvm-reg.sock=
0700   node/
0700     credentials/
0600       ca.pem
0600       cert.pem
0600       cert-key.pem
0400     roles.pb
0700   volumes/
0755 etc/
0444   machine-id
0755 ephemeral/ (mount point)
0700   consensus/
0600     client.sock=
0600     server-logs.fifo|
0755   containerd/
0600     client.sock=
0600     runsc-logs.fifo|
0755     tmp/
0700     runsc/
0700     ipam/
0700     cni/
0700     cni-cache/
0700   flexvolume_plugins/
0444   machine-id
1777 tmp/ (mount point)
0755 run/ (mount point)
0700   containerd/
";

fn metropolis() -> Names {
    let names: Names = "metropolis".parse().unwrap();
    names.with_driver("dev.monogon.metropolis.vfs").unwrap().with_devices("devices.monogon.dev").unwrap()
}

#[test]
fn the_root_is_that_of_the_original() {
    assert_eq!(Root::SHAPE.outline(&metropolis()), ORIGINAL);
    Root::SHAPE.validate(&metropolis(), Path::new("/")).unwrap();
    Root::SHAPE.validate(&Names::default(), Path::new("/")).unwrap();
}

#[test]
fn paths_are_the_same_for_every_way_to_write_the_root() {
    for (root, prefix) in [("", ""), ("/", ""), ("//", ""), ("/r", "/r"), ("/r/", "/r"), ("r//s/", "/r/s")] {
        let root: Root = in_memory(root).place().unwrap();
        let is =
            |path: &Path, expected: &str| assert_eq!(path.to_str().unwrap(), format!("{prefix}{expected}"));
        is(root.esp.path(), "/esp");
        is(root.etc.machine_id.path(), "/etc/machine-id");
        let data = root.data.enter_unmounted().unwrap();
        is(data.etcd.path(), "/data/etcd");
        is(data.node.credentials.certificate.path(), "/data/node/credentials/cert.pem");
        is(
            data.kubernetes.kubelet.plugins.volumes.path(),
            "/data/kubernetes/kubelet/plugins/nodekeel.vfs.sock",
        );
    }
}

#[test]
fn one_value_renames_the_system_everywhere() {
    let site = in_memory("/").with_names("acme".parse().unwrap());
    let root: Root = site.place().unwrap();
    let esp = root.esp.enter_unmounted().unwrap();
    assert_eq!(esp.node.parameters.path(), Path::new("/esp/acme/parameters.pb"));
    assert_eq!(esp.efi.images.a.path(), Path::new("/esp/EFI/acme/boot-a.efi"));
    let kubelet = root.data.enter_unmounted().unwrap().kubernetes.kubelet;
    assert!(kubelet.plugins_registry.volumes.path().ends_with("plugins_registry/acme.vfs-reg.sock"));
    assert!(kubelet.plugins_registry.kvm.path().ends_with("plugins_registry/acme.devices_kvm-reg.sock"));
    for wrong in ["", ".", "..", "a/b", "A", "-a", "a.", "a\0", &"a".repeat(64)] {
        assert!(wrong.parse::<Names>().is_err(), "{wrong:?}");
        assert!(Names::default().with_driver(wrong).is_err(), "{wrong:?}");
    }
}

#[test]
fn placing_makes_directories_with_their_modes_and_repairs_them() {
    let temporary = tempfile::tempdir().unwrap();
    let mode = |path: &str| fs::metadata(temporary.path().join(path)).unwrap().permissions().mode() & 0o7777;
    let place = || -> Data {
        let root: Root = on_disk(temporary.path()).place().unwrap();
        root.tmp.enter_unmounted().unwrap();
        root.data.enter_unmounted().unwrap()
    };
    let data = place();
    data.node.roles.write(b"all").unwrap();
    let expected = || {
        let modes = ["data", "data/etcd", "data/etcd/data", "data/node/roles.pb", "tmp"].map(mode);
        assert_eq!(modes.map(|mode| format!("{mode:o}")), ["755", "700", "700", "400", "1777"]);
    };
    expected();
    for path in ["data/etcd", "data/etcd/data", "data/node/roles.pb"] {
        fs::set_permissions(temporary.path().join(path), fs::Permissions::from_mode(0o704)).unwrap();
    }
    let wrong = temporary.path().join("data/etcd");
    fs::set_permissions(wrong, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(place().node.roles.read().unwrap(), b"all");
    expected();
}

#[test]
fn a_failed_placement_names_the_place_and_leaves_the_site_as_it_was() {
    let temporary = tempfile::tempdir().unwrap();
    fs::create_dir(temporary.path().join("etcd")).unwrap();
    fs::write(temporary.path().join("etcd/data"), "in the way").unwrap();
    let site = on_disk(temporary.path());
    let error = site.place::<Data>().unwrap_err();
    let PlaceError::Directory { path, source } = &error else { panic!("{error:?}") };
    assert_eq!(path, &temporary.path().join("etcd/data"));
    assert!(source.is_not_a_directory(), "{source:?}");
    fs::remove_file(temporary.path().join("etcd/data")).unwrap();
    site.place::<Data>().unwrap();
    site.place::<Data>().unwrap();
}

#[test]
fn a_placement_that_fails_at_any_step_is_made_again() {
    for fault in [Fault::Full, Fault::Device, Fault::CrashBefore, Fault::CrashAfter] {
        let placement = Arc::new(MemPlacement::default());
        let site = Site::new(placement.clone(), "/data");
        let mut failed = 0;
        for at in 1.. {
            placement.fail(at, fault);
            let placed = site.place::<Data>();
            placement.restart();
            match placed {
                Ok(_) => break,
                Err(_) => failed += 1,
            }
        }
        assert!(failed > 25, "{fault:?} failed {failed} placements");
    }
}

layout! {
    /// Two names that are one for a driver called `same`.
    pub struct Clash {
        /// Outer.
        pub outer: Inner = "outer", 0o700;
    }

    /// See there.
    pub struct Inner {
        /// One.
        pub one: Directory = "{driver}", 0o700;
        /// The other.
        pub other: File = "same", 0o600;
    }

    /// A variable that nobody knows.
    pub struct Unknown {
        /// It.
        pub it: File = "{nobody}", 0o600;
    }

    /// What this crate calls files of its own.
    pub struct Reserved {
        /// Such a file.
        pub record: File = ".commit", 0o600;
    }

    /// Another one.
    pub struct Sibling {
        /// Such a file.
        pub sibling: File = ".nodekeel-0123456789abcdef.new", 0o600;
    }

    /// A socket, deep down.
    pub struct Deep {
        /// It.
        pub socket: Socket = "deep.sock", 0o600;
    }
}

#[test]
fn what_is_wrong_is_told_with_its_place_before_anything_is_touched() {
    let placement = Arc::new(MemPlacement::default());
    let site = Site::new(placement.clone(), "/");
    let clashing = site.clone().with_names(Names::default().with_driver("same").unwrap());
    let error = clashing.place::<Clash>().unwrap_err();
    let PlaceError::Layout(invalid) = error else { panic!("{error:?}") };
    assert_eq!(invalid.to_string(), "outer: same: duplicate");
    assert_eq!(invalid.problem(), LayoutProblem::Duplicate);
    assert_eq!(invalid.at().collect::<Vec<_>>(), ["outer", "same"]);
    let error = Unknown::SHAPE.validate(&Names::default(), Path::new("/")).unwrap_err();
    assert_eq!(error.to_string(), "{nobody}: unknown variable");
    for shape in [Reserved::SHAPE, Sibling::SHAPE] {
        let reserved = shape.validate(&Names::default(), Path::new("/")).unwrap_err();
        assert_eq!(reserved.problem(), LayoutProblem::Name(InvalidName::Reserved));
    }
    assert_eq!(placement.list(Path::new("")).unwrap(), [], "nothing was made");
    site.place::<Clash>().unwrap();
}

#[test]
fn a_name_can_become_too_long_by_what_fills_it() {
    layout! {
        /// 240 bytes and a driver.
        pub struct Long {
            /// It.
            pub it: File = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{driver}", 0o600;
        }
    }
    let names = Names::default().with_driver(&"d".repeat(60)).unwrap();
    let error = Long::SHAPE.validate(&names, Path::new("/")).unwrap_err();
    assert_eq!(error.problem(), LayoutProblem::Name(InvalidName::TooLong));
}

#[test]
fn a_socket_path_is_as_long_as_the_kernel_takes_and_no_longer() {
    let room = 107 - "/deep.sock".len();
    let temporary = tempfile::tempdir().unwrap();
    let base = temporary.path().join("x".repeat(room - temporary.path().as_os_str().len() - 1));
    fs::create_dir(&base).unwrap();
    let deep: Deep = on_disk(&base).place().unwrap();
    assert_eq!(deep.socket.path().as_os_str().len(), 107);
    assert!(!deep.socket.exists().unwrap());
    let listener = UnixListener::bind(deep.socket.path()).unwrap();
    assert!(deep.socket.exists().unwrap());
    drop(listener);
    assert!(deep.socket.remove().unwrap() && !deep.socket.remove().unwrap());

    let longer = base.with_file_name("x".repeat(base.file_name().unwrap().len() + 1));
    fs::create_dir(&longer).unwrap();
    let PlaceError::Layout(invalid) = on_disk(&longer).place::<Deep>().unwrap_err() else { panic!() };
    assert_eq!(invalid.problem(), LayoutProblem::SocketPath { bytes: 108 });
    assert!(UnixListener::bind(longer.join("deep.sock")).is_err(), "the kernel agrees");
}

#[test]
fn a_builder_adds_directories_of_his_own_and_not_twice() {
    layout! {
        /// A builder's own.
        pub struct Mine {
            /// Readings.
            pub readings: Directory = "readings", 0o750;
        }
        /// A builder's, with a name that is taken.
        pub struct Theirs {
            /// Not etcd's.
            pub etcd: File = "etcd", 0o600;
        }
    }
    let data: Data = in_memory("/data").place().unwrap();
    let mine: Mine = data.extend().unwrap();
    assert_eq!(mine.readings.path(), Path::new("/data/readings"));
    let PlaceError::Layout(invalid) = data.extend::<Theirs>().unwrap_err() else { panic!() };
    assert_eq!(invalid.to_string(), "etcd: duplicate");
}

#[test]
fn absence_is_told_from_what_keeps_a_file_from_being_seen() {
    let temporary = tempfile::tempdir().unwrap();
    let ephemeral: Ephemeral = on_disk(temporary.path()).place().unwrap();
    let id = &ephemeral.machine_id;
    assert!(!id.exists().unwrap());
    assert_eq!(id.read_if_present().unwrap(), None);
    id.write(b"0123").unwrap();
    assert!(id.exists().unwrap());
    assert_eq!(id.read_if_present().unwrap().unwrap(), b"0123");
    assert!(id.remove().unwrap() && !id.remove().unwrap());
    // A link that leads nowhere is something, and is not followed.
    std::os::unix::fs::symlink("nowhere", id.path()).unwrap();
    assert!(id.exists().unwrap());
    assert!(id.read_if_present().unwrap_err().is_symlink());
    // A file where a directory should be is no absence.
    fs::remove_dir(temporary.path().join("consensus")).unwrap();
    fs::write(temporary.path().join("consensus"), "").unwrap();
    assert!(ephemeral.consensus.client.exists().unwrap_err().is_not_a_directory());
}

#[test]
fn files_of_the_esp_are_absent_unavailable_corrupted_or_unreadable() {
    let placement = Arc::new(MemPlacement::default());
    let esp: Esp = Site::new(placement.clone(), "/esp").place().unwrap();
    let unseal = |bytes: &[u8]| match bytes {
        b"sealed" => Err(Undecodable::unavailable("the TPM is gone")),
        b"plain" => Ok(bytes.len()),
        _ => Err(Undecodable::corrupted("no such tag")),
    };
    for file in [
        &esp.node.sealed_configuration,
        &esp.node.parameters,
        &esp.node.cluster_directory,
        &esp.node.network_configuration,
    ] {
        assert!(matches!(file.load(unseal), Err(LoadError::Absent { path }) if path == file.path()));
        assert_eq!(LoadError::optional(file.load(unseal)).unwrap(), None);
        file.write(b"sealed").unwrap();
        assert!(matches!(file.load(unseal), Err(LoadError::Unavailable { .. })));
        assert!(LoadError::optional(file.load(unseal)).is_err());
        file.write(b"noise").unwrap();
        let corrupted = file.load(unseal).unwrap_err();
        assert_eq!(corrupted.to_string(), format!("{} is corrupted", file.path().display()));
        file.write(b"plain").unwrap();
        assert_eq!(file.load(unseal).unwrap(), 5);
        placement.fail(1, Fault::Device);
        let unread = file.load(unseal).unwrap_err();
        assert!(matches!(unread, LoadError::Read { .. }), "a failing disk is no new node: {unread:?}");
    }
}

#[test]
fn what_is_mounted_is_entered_by_its_own_directory() {
    let temporary = tempfile::tempdir().unwrap();
    let root: Root = on_disk(temporary.path()).place().unwrap();
    let mounted = tempfile::tempdir().unwrap();
    let run: Run = root.run.enter(Dir::open(mounted.path()).unwrap()).unwrap();
    assert_eq!(run.containerd.path(), temporary.path().join("run/containerd"));
    assert!(mounted.path().join("containerd").is_dir());
    assert_eq!(
        fs::read_dir(temporary.path().join("run")).unwrap().count(),
        0,
        "nothing lies below the mount"
    );
    let tmp: Tmp = root.tmp.enter_on(Arc::new(MemPlacement::default())).unwrap();
    assert_eq!(tmp.path(), root.tmp.path());
}
