//! Mounts made by the kernel this runs on.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

use super::table::mount_table;
use super::{MountError, MountFlags, MountSpec, Mounted, Mounter};

/// Mounts by fsopen(2), fsmount(2) and move_mount(2), Linux 5.2 or newer, in the mount namespace of the process.
///
/// It needs `CAP_SYS_ADMIN`. The new calls are used because a mount is complete before it becomes visible, and because
/// they say in words what the kernel did not like.
#[derive(Clone, Copy, Debug, Default)]
pub struct OsMounter;

impl Mounter for OsMounter {
    fn mount(&self, spec: &MountSpec, source: Option<&Path>, target: &Path) -> Result<(), MountError> {
        if let Some(is) = self.mounted(target)? {
            let device = source.map(device_of).transpose().map_err(|source| MountError::Mount {
                target: target.to_owned(),
                fstype: spec.fstype,
                kernel: String::new(),
                source,
            })?;
            return match is.is(spec, device.flatten()) {
                true => Ok(()),
                false => Err(MountError::Conflict { target: target.to_owned(), is: Box::new(is) }),
            };
        }
        let at =
            open_target(target).map_err(|source| MountError::Target { target: target.to_owned(), source })?;
        Attempt::new(spec).and_then(|attempt| attempt.attach(source, at)).map_err(|failed| {
            MountError::Mount {
                target: target.to_owned(),
                fstype: spec.fstype,
                kernel: failed.kernel,
                source: failed.source,
            }
        })
    }

    fn unmount(&self, target: &Path) -> Result<(), MountError> {
        if self.mounted(target)?.is_none() {
            return Ok(());
        }
        unmount(target, UnmountFlags::NOFOLLOW)
            .map_err(|source| MountError::Unmount { target: target.to_owned(), source: source.into() })
    }

    fn mounted(&self, target: &Path) -> Result<Option<Mounted>, MountError> {
        let table =
            mount_table().map_err(|source| MountError::Table { target: target.to_owned(), source })?;
        // Paths compare by components, so that a trailing slash makes no difference.
        let topmost = table.into_iter().rev().find(|entry| entry.target == target);
        Ok(topmost.map(|entry| entry.mounted))
    }
}

/// The device's numbers, if it is one.
fn device_of(source: &Path) -> io::Result<Option<(u32, u32)>> {
    let metadata = std::fs::metadata(source)?;
    let device = metadata.rdev();
    let is_block = metadata.file_type().is_block_device();
    Ok(is_block.then(|| (rustix::fs::major(device), rustix::fs::minor(device))))
}

fn open_target(target: &Path) -> io::Result<OwnedFd> {
    if !target.is_absolute() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mount point's path must be absolute"));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(CWD, target, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?)
}

/// A failed call, with what the kernel said about it.
struct Failed {
    kernel: String,
    source: io::Error,
}

/// A file system being configured; nobody sees it until it is attached.
struct Attempt<'a> {
    spec: &'a MountSpec,
    context: OwnedFd,
}

impl<'a> Attempt<'a> {
    fn new(spec: &'a MountSpec) -> Result<Attempt<'a>, Failed> {
        match fsopen(spec.fstype, FsOpenFlags::FSOPEN_CLOEXEC) {
            Ok(context) => Ok(Attempt { spec, context }),
            Err(errno) => Err(Failed { kernel: String::new(), source: errno.into() }),
        }
    }

    fn attach(&self, source: Option<&Path>, at: OwnedFd) -> Result<(), Failed> {
        self.configure(source)
            .and_then(|()| fsmount(self.context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, self.attributes()))
            .and_then(|mount| {
                let whole = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
                move_mount(mount, "", at, "", whole)
            })
            .map_err(|errno| Failed { kernel: self.said(), source: errno.into() })
    }

    fn configure(&self, source: Option<&Path>) -> rustix::io::Result<()> {
        let source = source.map_or(OsStr::new(self.spec.fstype), Path::as_os_str);
        fsconfig_set_string(self.context.as_fd(), "source", source)?;
        // These two are of the file system; the others of the mount.
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

    fn attributes(&self) -> MountAttrFlags {
        let all = [
            (MountFlags::READ_ONLY, MountAttrFlags::MOUNT_ATTR_RDONLY),
            (MountFlags::NOSUID, MountAttrFlags::MOUNT_ATTR_NOSUID),
            (MountFlags::NODEV, MountAttrFlags::MOUNT_ATTR_NODEV),
            (MountFlags::NOEXEC, MountAttrFlags::MOUNT_ATTR_NOEXEC),
        ];
        let set = all.into_iter().filter(|(flag, _)| self.spec.flags.contains(*flag));
        set.fold(MountAttrFlags::empty(), |attributes, (_, attribute)| attributes | attribute)
    }

    /// The context's log, one line a read, until there is no more.
    fn said(&self) -> String {
        let mut lines = Vec::new();
        let mut line = [0; 1024];
        while let Ok(len @ 1..) = rustix::io::read(self.context.as_fd(), &mut line) {
            lines.push(String::from_utf8_lossy(&line[..len]).trim().to_owned());
        }
        lines.join("; ")
    }
}
