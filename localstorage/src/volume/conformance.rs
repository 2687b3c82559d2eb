//! The checks that every volume must pass.

use super::{DataVolume, ErasePolicy, MountState, VolumeError};
use crate::metadata::FileMode;

/// Checks the [contract](DataVolume#contract) on a blank volume. Afterwards the volume exists and is
/// unmounted.
///
/// # Panics
/// If the contract is broken.
pub fn volume_conformance(volume: &dyn DataVolume) {
    assert_eq!(volume.state(), MountState::Unmounted, "a volume starts unmounted");
    assert!(volume.unmount().is_ok(), "unmounting an unmounted volume succeeds");
    let absent = volume.mount_existing();
    assert!(matches!(absent, Err(VolumeError::Absent { .. })), "a blank volume is absent: {absent:?}");
    assert_eq!(volume.state(), MountState::Unmounted, "a failure is undone");

    let top = volume.mount_new(ErasePolicy::Nothing).expect("a volume is created on a blank one");
    assert_eq!(volume.state(), MountState::Mounted);
    top.write("witness", b"data", FileMode::PRIVATE_FILE).expect("a new volume is writable");
    for again in [volume.mount_new(ErasePolicy::Nothing), volume.mount_existing()] {
        assert!(
            matches!(again, Err(VolumeError::InvalidState { state: MountState::Mounted })),
            "a volume is mounted only once: {again:?}"
        );
    }
    drop(top);
    volume.unmount().expect("an unused volume is unmounted");
    assert_eq!(volume.state(), MountState::Unmounted);

    let occupied = volume.mount_new(ErasePolicy::Nothing);
    let Err(VolumeError::Occupied { found, .. }) = occupied else {
        panic!("a volume is not created over another: {occupied:?}")
    };
    assert_eq!(volume.state(), MountState::Unmounted, "a rejected call is undone");
    let top = volume.mount_existing().expect("a created volume is mounted");
    assert_eq!(top.read("witness").expect("a mounted volume contains its files"), b"data");
    drop(top);
    volume.unmount().expect("the volume is unmounted again");

    let top = volume.mount_new(ErasePolicy::Exactly(found)).expect("the reported contents can be erased");
    assert!(top.read("witness").is_err_and(|error| error.is_not_found()), "the file is erased");
    drop(top);
    volume.unmount().expect("the new volume is unmounted");
}
