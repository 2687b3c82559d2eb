//! Detached mounts of volumes, which become visible once they are moved to a target.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::mount::OpenTreeFlags;

use super::mounter::MountRestrictions;
use super::sys;
use crate::image::ImageFormat;
use crate::image::loops::{self, LoopDevice, LoopOptions, attach};
use crate::image::mounts::mount_device;
use crate::step::{StepRunner, VolumeStep};

/// Bytes of a block of a device with a file system: what each disk can read and write directly.
const FILE_SYSTEM_BLOCK: u32 = 4096;

/// Creates a detached mount of a directory or file; dropping it unmounts it.
pub(super) fn detached_mount(volume: BorrowedFd<'_>, flags: MountRestrictions) -> io::Result<OwnedFd> {
    let clone =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let mount = rustix::mount::open_tree(volume, c"", clone)?;
    restrict_mount(mount.as_fd(), flags)?;
    Ok(mount)
}

fn restrict_mount(mount: BorrowedFd<'_>, flags: MountRestrictions) -> io::Result<()> {
    let old = "the kernel does not support mount_setattr: Linux 5.12 or newer is required";
    sys::set_mount_flags(mount, flags).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSYS) => io::Error::new(io::ErrorKind::Unsupported, old),
        _ => error,
    })
}

/// Creates a detached mount of the node of a device. The mount does not decide whether the device can be written.
pub(super) fn device_mount(device: &LoopDevice) -> io::Result<OwnedFd> {
    let flags = MountRestrictions { read_only: false, no_suid: true, no_dev: false, no_exec: true };
    detached_mount(device.open_node()?.as_fd(), flags)
}

/// Attaches the file of a block volume to a device, which keeps it until it is detached.
pub(super) fn attach_block(
    steps: &StepRunner,
    file: BorrowedFd<'_>,
    read_only: bool,
) -> io::Result<LoopDevice> {
    let options = LoopOptions { read_only, autoclear: false, block_size: None };
    steps.run_step(VolumeStep::AttachDevice, || attach(file, options))
}

/// Creates a detached mount of the file system in a file. The device below it disappears with its last mount, also if
/// this process is killed.
pub(super) fn file_system_mount(
    steps: &StepRunner,
    file: BorrowedFd<'_>,
    format: ImageFormat,
    flags: MountRestrictions,
) -> io::Result<OwnedFd> {
    let options = LoopOptions { read_only: false, autoclear: true, block_size: Some(FILE_SYSTEM_BLOCK) };
    // An open device keeps its file: the file system can be mounted from it.
    let attached =
        loops::find(file)?.into_iter().find(|device| device.is_complete() && !device.is_read_only());
    let device = match attached {
        Some(device) => device,
        None => steps.run_step(VolumeStep::AttachDevice, || attach(file, options))?,
    };
    // The volume may have been expanded while it was mounted nowhere.
    device.grow()?;
    let mount = mount_device(&device, format)?;
    mount.grow_to(&device)?;
    // Last: a file system can't grow through a read-only mount.
    restrict_mount(mount.as_fd(), flags)?;
    Ok(mount.into())
}
