//! Mounts: as data, recorded, and by the kernel.

use std::path::Path;

use nodekeel_localstorage::mount::{MountError, MountFlags, MountSpec, Mounter, OsMounter};
use nodekeel_localstorage::testing::{MountCall, RecordingMounter};

#[test]
fn node_mounts_have_the_flags_of_monogon_plus_nosuid_and_execute_from_data() {
    const NOSUID: u32 = 2;
    const NODEV: u32 = 4;
    const NOEXEC: u32 = 8;
    const SYNCHRONOUS: u32 = 16;
    for (spec, fstype, flags) in [
        (MountSpec::ESP, "vfat", NOSUID | NODEV | NOEXEC | SYNCHRONOUS),
        (MountSpec::TMP, "tmpfs", NOSUID | NODEV | NOEXEC),
        (MountSpec::EPHEMERAL, "tmpfs", NOSUID | NODEV),
        (MountSpec::RUN, "tmpfs", NOSUID | NODEV | NOEXEC),
        (MountSpec::DATA, "xfs", NOSUID),
    ] {
        assert_eq!((spec.fstype, spec.flags.bits()), (fstype, flags), "{spec:?}");
    }
    assert_eq!(MountSpec::DATA.options, ["prjquota"]);
    assert_eq!(MountSpec::ESP.options, ["fmask=0177", "dmask=0077"], "keys on vfat are root's alone");
    assert_eq!((MountSpec::TMP.flags | MountFlags::READ_ONLY).to_string(), "ro,nosuid,nodev,noexec");
}

/// Checks the contract of a mounter on a target without mounts.
fn check_mounter_contract(mounter: &dyn Mounter, target: &Path) {
    assert_eq!(mounter.mount_info(target).unwrap(), None);
    mounter.unmount(target).unwrap();
    mounter.mount(&MountSpec::TMP, None, target).unwrap();
    mounter.mount(&MountSpec::TMP, None, target).unwrap();
    let mounted = mounter.mount_info(target).unwrap().unwrap();
    assert!(mounted.matches_spec(&MountSpec::TMP, None), "{mounted:?}");
    assert_eq!((mounted.fstype.as_str(), mounted.flags), ("tmpfs", MountSpec::TMP.flags));
    for other in [MountSpec::EPHEMERAL, MountSpec::ESP] {
        let conflict = mounter.mount(&other, None, target).unwrap_err();
        assert!(matches!(conflict, MountError::Conflict { .. }), "{conflict:?}");
    }
    mounter.unmount(target).unwrap();
    assert_eq!(mounter.mount_info(target).unwrap(), None, "the repeated mount did not stack");
}

#[test]
fn the_recording_mounter_keeps_the_contract_and_records_calls() {
    let mounter = RecordingMounter::default();
    check_mounter_contract(&mounter, Path::new("/tmp"));
    let target = Path::new("/tmp").to_owned();
    let mount = MountCall::Mount { spec: MountSpec::TMP, source: None, target: target.clone() };
    assert_eq!(mounter.recorded_calls(), [mount, MountCall::Unmount { target }]);
}

#[test]
fn mounting_on_a_missing_path_or_a_symlink_is_rejected() {
    let temporary = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/tmp", temporary.path().join("link")).unwrap();
    for target in [temporary.path().join("absent"), temporary.path().join("link"), "relative".into()] {
        let rejected = OsMounter.mount(&MountSpec::TMP, None, &target).unwrap_err();
        assert!(matches!(rejected, MountError::OpenTarget { .. }), "{rejected:?}");
    }
}

#[test]
#[ignore = "needs root"]
fn the_os_mounter_keeps_the_contract() {
    let temporary = tempfile::tempdir().unwrap();
    let target = temporary.path().canonicalize().unwrap();
    check_mounter_contract(&OsMounter, &target);
}

#[test]
#[ignore = "needs root"]
fn a_mount_rejected_by_the_kernel_reports_its_message_and_mounts_nothing() {
    let temporary = tempfile::tempdir().unwrap();
    let target = temporary.path().canonicalize().unwrap();
    let spec = MountSpec { options: &["size=many"], ..MountSpec::TMP };
    let rejected = OsMounter.mount(&spec, None, &target).unwrap_err();
    assert!(rejected.to_string().contains("size"), "the kernel names the option: {rejected}");
    let spec = MountSpec { fstype: "nosuchfs", ..MountSpec::TMP };
    assert!(matches!(OsMounter.mount(&spec, None, &target), Err(MountError::Mount { .. })));
    assert_eq!(OsMounter.mount_info(&target).unwrap(), None);
}
