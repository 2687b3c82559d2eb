//! The module's only unsafe code: a system call that rustix does not wrap.
#![allow(unsafe_code, reason = "mount_setattr")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use linux_raw_sys::general as raw;

use super::mounter::MountRestrictions;

// The first version of the structure, which every kernel with this call supports. *Source:* linux/mount.h.
const _: () = assert!(size_of::<raw::mount_attr>() == raw::MOUNT_ATTR_SIZE_VER0 as usize);

/// Sets exactly these flags on a mount, and makes it private: mounts below it do not propagate to the mount
/// it was cloned from, nor the other way round.
///
/// # Errors
/// `ENOSYS` before Linux 5.12.
pub(super) fn set_mount_flags(mount: BorrowedFd<'_>, flags: MountRestrictions) -> io::Result<()> {
    let bits = [
        (flags.read_only, raw::MOUNT_ATTR_RDONLY),
        (flags.no_suid, raw::MOUNT_ATTR_NOSUID),
        (flags.no_dev, raw::MOUNT_ATTR_NODEV),
        (flags.no_exec, raw::MOUNT_ATTR_NOEXEC),
    ];
    let of = |wanted: bool| {
        bits.iter().filter(|(is_set, _)| *is_set == wanted).fold(0, |sum, (_, bit)| sum | u64::from(*bit))
    };
    let attributes = raw::mount_attr {
        attr_set: of(true),
        attr_clr: of(false),
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    let size = size_of::<raw::mount_attr>();
    // SAFETY: the path is an empty C string, and the structure, of the size given, outlives the call, which
    // reads it.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
