//! Mounts by the kernel.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags as RemountFlags, MoveMountFlags, UnmountFlags,
    fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_remount, move_mount,
    unmount,
};

use super::table::mount_table;
use super::{MountError, MountFlags, MountInfo, MountSpec, Mounter};
use crate::syscalls;

/// Mounts by fsopen(2), fsmount(2) and move_mount(2), Linux 5.2 or newer, in the mount namespace of the
/// process.
///
/// Mounting needs `CAP_SYS_ADMIN`. With these calls a mount is complete before it becomes visible, and the
/// kernel reports errors in words.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsMounter;

impl Mounter for OsMounter {
    fn mount(&self, spec: &MountSpec, source: Option<&Path>, target: &Path) -> Result<(), MountError> {
        if let Some(existing) = self.mount_info(target)? {
            let to_error = |source| MountError::Mount {
                target: target.to_owned(),
                fstype: spec.fstype,
                kernel: String::new(),
                source,
            };
            let device = source.map(device_numbers).transpose().map_err(to_error)?.flatten();
            return if existing.matches_spec(spec, device) {
                Ok(())
            } else if device.is_some() && existing.matches_but_flags(spec, device) {
                set_flags(target, spec.flags).map_err(to_error)
            } else {
                Err(MountError::Conflict { target: target.to_owned(), existing: Box::new(existing) })
            };
        }
        let at = open_target(target)
            .map_err(|source| MountError::OpenTarget { target: target.to_owned(), source })?;
        FsContext::new(spec).and_then(|context| context.attach(source, at)).map_err(|failure| {
            MountError::Mount {
                target: target.to_owned(),
                fstype: spec.fstype,
                kernel: failure.kernel,
                source: failure.source,
            }
        })
    }

    fn unmount(&self, target: &Path) -> Result<(), MountError> {
        // umount2(2) fails with EINVAL if nothing is mounted, but for other reasons as well.
        if self.mount_info(target)?.is_none() {
            return Ok(());
        }
        unmount(target, UnmountFlags::NOFOLLOW)
            .map_err(|source| MountError::Unmount { target: target.to_owned(), source: source.into() })
    }

    fn mount_info(&self, target: &Path) -> Result<Option<MountInfo>, MountError> {
        let table =
            mount_table().map_err(|source| MountError::ReadTable { target: target.to_owned(), source })?;
        // Paths compare by components, so that a trailing slash makes no difference.
        let topmost = table.into_iter().rev().find(|entry| entry.target == target);
        Ok(topmost.map(|entry| entry.info))
    }
}

/// The major and minor number, if the source is a block device.
fn device_numbers(source: &Path) -> io::Result<Option<(u32, u32)>> {
    let metadata = std::fs::metadata(source)?;
    let device = metadata.rdev();
    let is_block = metadata.file_type().is_block_device();
    Ok(is_block.then(|| (rustix::fs::major(device), rustix::fs::minor(device))))
}

fn open_target(target: &Path) -> io::Result<OwnedFd> {
    if !target.is_absolute() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "mount point path is not absolute"));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(CWD, target, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?)
}

/// Changes the flags of an existing mount, and none of its file system, which may be in use.
fn set_flags(target: &Path, flags: MountFlags) -> io::Result<()> {
    let at = open_target(target)?;
    let all = [
        (MountFlags::READ_ONLY, RemountFlags::RDONLY),
        (MountFlags::NOSUID, RemountFlags::NOSUID),
        (MountFlags::NODEV, RemountFlags::NODEV),
        (MountFlags::NOEXEC, RemountFlags::NOEXEC),
    ];
    let set = all.into_iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, flag)| flag);
    Ok(mount_remount(
        syscalls::proc_path(at.as_fd()),
        set.collect::<RemountFlags>() | RemountFlags::BIND,
        "",
    )?)
}

/// A failed mount, with the log of the kernel.
struct MountFailure {
    kernel: String,
    source: io::Error,
}

/// A file system being configured, invisible until it is attached.
struct FsContext<'a> {
    spec: &'a MountSpec,
    context: OwnedFd,
}

impl<'a> FsContext<'a> {
    fn new(spec: &'a MountSpec) -> Result<FsContext<'a>, MountFailure> {
        match fsopen(spec.fstype, FsOpenFlags::FSOPEN_CLOEXEC) {
            Ok(context) => Ok(FsContext { spec, context }),
            Err(errno) => Err(MountFailure { kernel: String::new(), source: errno.into() }),
        }
    }

    fn attach(&self, source: Option<&Path>, at: OwnedFd) -> Result<(), MountFailure> {
        self.configure(source)
            .and_then(|()| {
                fsmount(self.context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, self.mount_attributes())
            })
            .and_then(|mount| {
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
                move_mount(mount, "", at, "", flags)
            })
            .map_err(|errno| MountFailure { kernel: self.read_log(), source: errno.into() })
    }

    fn configure(&self, source: Option<&Path>) -> rustix::io::Result<()> {
        // The mount table shows a source also for a file system without a device: by custom, its type.
        let source = source.map_or(OsStr::new(self.spec.fstype), Path::as_os_str);
        fsconfig_set_string(self.context.as_fd(), "source", source)?;
        // These two flags belong to the file system; the others to the mount.
        for (flag, name) in [(MountFlags::READ_ONLY, "ro"), (MountFlags::SYNCHRONOUS, "sync")] {
            if self.spec.flags.contains(flag) {
                fsconfig_set_flag(self.context.as_fd(), name)?;
            }
        }
        for option in self.spec.options {
            match option.split_once('=') {
                Some((key, value)) => fsconfig_set_string(self.context.as_fd(), key, value)?,
                None => fsconfig_set_flag(self.context.as_fd(), *option)?,
            }
        }
        fsconfig_create(self.context.as_fd())
    }

    fn mount_attributes(&self) -> MountAttrFlags {
        let all = [
            (MountFlags::READ_ONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
            (MountFlags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
            (MountFlags::NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
            (MountFlags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        ];
        let set = all.into_iter().filter(|(flag, _)| self.spec.flags.contains(*flag));
        set.fold(MountAttrFlags::empty(), |attributes, (_, attribute)| attributes | attribute)
    }

    /// Reads the log of the context: each read returns one line, until the log is empty.
    fn read_log(&self) -> String {
        let mut lines = Vec::new();
        let mut line = [0; 1024];
        while let Ok(len @ 1..) = rustix::io::read(self.context.as_fd(), &mut line) {
            lines.push(String::from_utf8_lossy(&line[..len]).trim().to_owned());
        }
        lines.join("; ")
    }
}
