//! A volume as its users see it.

use std::fmt;

use super::error::VolumeError;
use super::lifecycle::MountState;
use super::probe::VolumeContents;
use crate::dir::Dir;
#[cfg(any(test, feature = "testing"))]
use crate::metadata::FileMode;

/// The volume of a node's data.
///
/// # Contract
/// - [`mount_new`](DataVolume::mount_new) erases only the contents that the caller agreed to erase. A call
///   that was killed at any point can be repeated with the same arguments, and resumes; after a restart of the machine
///   that erases contents, once the caller has agreed to those that are reported then. If it was killed
///   after the last step, the repeated call fails with [`Occupied`](VolumeError::Occupied), and the volume
///   exists.
/// - [`mount_existing`](DataVolume::mount_existing) writes nothing, and opens only volumes that `mount_new`
///   has completed.
/// - Both return the open root directory of the volume: a write through it reaches the volume or fails.
/// - A failed call leaves the volume [`Unmounted`](MountState::Unmounted), and can be repeated.
/// - One call runs at a time: a concurrent call, or one on a mounted volume, is
///   [`VolumeError::InvalidState`].
///
/// `testing::volume_conformance` (feature `testing`) checks it.
pub trait DataVolume: Send + Sync + fmt::Debug {
    /// Creates an empty volume and mounts it.
    ///
    /// # Errors
    /// [`VolumeError::Occupied`] if there are contents that `erase` does not name, and the steps that can
    /// fail.
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError>;

    /// Mounts a volume created earlier by [`mount_new`](DataVolume::mount_new).
    ///
    /// # Errors
    /// [`VolumeError::Absent`], [`VolumeError::Unfinished`], [`VolumeError::ForeignData`] report what exists
    /// instead.
    fn mount_existing(&self) -> Result<Dir, VolumeError>;

    /// Unmounts the volume; does nothing if it is not mounted. Open directories of the volume prevent it.
    ///
    /// # Errors
    /// [`VolumeError::Mount`], with the volume still mounted; [`VolumeError::InvalidState`]; any other error of a step
    /// after that, with the volume [`Unmounted`](MountState::Unmounted), as when a mapping is in use.
    fn unmount(&self) -> Result<(), VolumeError>;

    /// The current state.
    fn state(&self) -> MountState;
}

/// The contents that creating a volume may erase.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErasePolicy {
    /// Nothing.
    Nothing,
    /// These contents, as reported by [`VolumeError::Occupied`]. They are erased only if they are unchanged, as far
    /// as their [`digest`](VolumeContents::digest) covers the disk, and still on the same disk, even if another disk
    /// has its name now: the caller has seen what is erased.
    Exactly(VolumeContents),
}

/// Checks the [contract](DataVolume#contract) on a blank volume. Afterwards the volume exists and is
/// unmounted.
///
/// # Panics
/// If the contract is broken.
#[cfg(any(test, feature = "testing"))]
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
    assert!(
        matches!(occupied, Err(VolumeError::Occupied { .. })),
        "a volume is not created over another: {occupied:?}"
    );
    assert_eq!(volume.state(), MountState::Unmounted, "a rejected call is undone");
    let top = volume.mount_existing().expect("a created volume is mounted");
    assert_eq!(top.read("witness").expect("a mounted volume contains its files"), b"data");
    drop(top);
    volume.unmount().expect("the volume is unmounted again");

    // A mount may have changed them since they were reported.
    let Err(VolumeError::Occupied { found, .. }) = volume.mount_new(ErasePolicy::Nothing) else {
        panic!("a volume with data is occupied")
    };
    let top = volume.mount_new(ErasePolicy::Exactly(found)).expect("the reported contents can be erased");
    assert!(top.read("witness").is_err_and(|error| error.is_not_found()), "the file is erased");
    drop(top);
    volume.unmount().expect("the new volume is unmounted");
}
