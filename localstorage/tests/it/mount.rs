//! Mounts: as data, recorded, and by the kernel.

use std::path::Path;

use nodekeel_localstorage::mount::{MountError, MountFlags, MountSpec, Mounter, OsMounter};
use nodekeel_localstorage::testing::{MountCall, RecordingMounter};

#[test]
fn the_mounts_of_a_node_have_the_flags_of_the_original_and_nosuid() {
    const NOSUID: u32 = 2;
    const NODEV: u32 = 4;
    const NOEXEC: u32 = 8;
    const SYNCHRONOUS: u32 = 16;
    for (spec, fstype, flags) in [
        (MountSpec::ESP, "vfat", NOSUID | NODEV | NOEXEC | SYNCHRONOUS),
        (MountSpec::TMP, "tmpfs", NOSUID | NODEV | NOEXEC),
        (MountSpec::EPHEMERAL, "tmpfs", NOSUID | NODEV),
        (MountSpec::RUN, "tmpfs", NOSUID | NODEV | NOEXEC),
        (MountSpec::DATA, "xfs", NOSUID | NOEXEC),
    ] {
        assert_eq!((spec.fstype, spec.flags.bits()), (fstype, flags), "{spec:?}");
    }
    assert_eq!(MountSpec::DATA.options, ["prjquota"]);
    assert_eq!((MountSpec::TMP.flags | MountFlags::READ_ONLY).to_string(), "ro,nosuid,nodev,noexec");
}

/// What every mounter is held to, on a target where nothing is mounted.
fn keeps_the_contract(mounter: &dyn Mounter, target: &Path) {
    assert_eq!(mounter.mounted(target).unwrap(), None);
    mounter.unmount(target).unwrap();
    mounter.mount(&MountSpec::TMP, None, target).unwrap();
    mounter.mount(&MountSpec::TMP, None, target).unwrap();
    let mounted = mounter.mounted(target).unwrap().unwrap();
    assert!(mounted.is(&MountSpec::TMP, None), "{mounted:?}");
    assert_eq!((mounted.fstype.as_str(), mounted.flags), ("tmpfs", MountSpec::TMP.flags));
    for other in [MountSpec::EPHEMERAL, MountSpec::ESP] {
        let conflict = mounter.mount(&other, None, target).unwrap_err();
        assert!(matches!(conflict, MountError::Conflict { .. }), "{conflict:?}");
    }
    mounter.unmount(target).unwrap();
    assert_eq!(mounter.mounted(target).unwrap(), None, "the second mount of the same was none");
}

#[test]
fn the_recorder_keeps_the_contract_and_remembers() {
    let mounter = RecordingMounter::default();
    keeps_the_contract(&mounter, Path::new("/tmp"));
    let target = Path::new("/tmp").to_owned();
    let mount = MountCall::Mount { spec: MountSpec::TMP, source: None, target: target.clone() };
    assert_eq!(mounter.calls(), [mount, MountCall::Unmount { target }]);
}

#[test]
fn mounting_on_what_is_not_there_or_is_a_link_is_refused() {
    let temporary = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/tmp", temporary.path().join("link")).unwrap();
    for target in [temporary.path().join("absent"), temporary.path().join("link"), "relative".into()] {
        let refused = OsMounter.mount(&MountSpec::TMP, None, &target).unwrap_err();
        assert!(matches!(refused, MountError::Target { .. }), "{refused:?}");
    }
}

#[test]
#[ignore = "needs root"]
fn the_kernel_keeps_the_contract() {
    let temporary = tempfile::tempdir().unwrap();
    let target = temporary.path().canonicalize().unwrap();
    keeps_the_contract(&OsMounter, &target);
}

#[test]
#[ignore = "needs root"]
fn what_the_kernel_refuses_it_says_and_nothing_is_mounted() {
    let temporary = tempfile::tempdir().unwrap();
    let target = temporary.path().canonicalize().unwrap();
    let spec = MountSpec { options: &["size=many"], ..MountSpec::TMP };
    let refused = OsMounter.mount(&spec, None, &target).unwrap_err();
    assert!(refused.to_string().contains("size"), "the kernel names the option: {refused}");
    let spec = MountSpec { fstype: "nosuchfs", ..MountSpec::TMP };
    assert!(matches!(OsMounter.mount(&spec, None, &target), Err(MountError::Mount { .. })));
    assert_eq!(OsMounter.mounted(&target).unwrap(), None);
}
