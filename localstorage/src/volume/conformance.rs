//! What every volume is held to.

use super::{DataVolume, Erase, State, VolumeError};
use crate::metadata::Mode;

/// Checks the [contract](DataVolume#contract) on a volume on which there is nothing yet. Afterwards it is unmounted, and
/// made.
///
/// # Panics
/// Where the contract is broken.
pub fn volume_conformance(volume: &dyn DataVolume) {
    assert_eq!(volume.state(), State::Unmounted, "a volume begins unmounted");
    assert!(volume.unmount().is_ok(), "unmounting what is not mounted is nothing to do");
    let absent = volume.mount_existing();
    assert!(matches!(absent, Err(VolumeError::Absent { .. })), "there is nothing yet: {absent:?}");
    assert_eq!(volume.state(), State::Unmounted, "a failure is undone");

    let top = volume.mount_new(Erase::Nothing).expect("a new volume is made where there is nothing");
    assert_eq!(volume.state(), State::Mounted);
    top.write("witness", b"data", Mode::PRIVATE_FILE).expect("a new volume can be written to");
    for again in [volume.mount_new(Erase::Nothing), volume.mount_existing()] {
        assert!(
            matches!(again, Err(VolumeError::State { state: State::Mounted })),
            "it is mounted once: {again:?}"
        );
    }
    drop(top);
    volume.unmount().expect("what nobody uses is unmounted");
    assert_eq!(volume.state(), State::Unmounted);

    let occupied = volume.mount_new(Erase::Nothing);
    let Err(VolumeError::Occupied { found, .. }) = occupied else {
        panic!("a volume is not made over another: {occupied:?}")
    };
    assert_eq!(volume.state(), State::Unmounted, "a refusal is undone");
    let top = volume.mount_existing().expect("a volume that was made is there");
    assert_eq!(top.read("witness").expect("with what was written"), b"data");
    drop(top);
    volume.unmount().expect("unmounts again");

    let top = volume.mount_new(Erase::Exactly(found)).expect("what was found can be given up");
    assert!(top.read("witness").is_err_and(|error| error.is_not_found()), "it is gone");
    drop(top);
    volume.unmount().expect("unmounts at last");
}
