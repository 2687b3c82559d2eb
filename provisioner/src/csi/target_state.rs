//! The state of a target path: absent, a directory or file, or a mount.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::Path;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::MountEntry;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::mounter::{FileId, TargetMountError};
use super::target_path::TargetPath;
use crate::image::loops::{DeviceNumbers, LoopDevice};

pub(super) enum TargetState {
    Absent,
    Directory,
    /// An empty file.
    File,
    Mount(MountedFile),
}

/// The file or directory that the topmost mount shows.
pub(super) struct MountedFile {
    /// The mount ID.
    pub(super) mount: u64,
    /// The file itself.
    pub(super) file: FileId,
    kind: FileType,
    /// The device of its file system.
    file_system: DeviceNumbers,
    /// Numbers of the device, if it is one.
    device: DeviceNumbers,
}

impl TargetState {
    /// Inspects a target whose parent directory exists.
    pub(super) fn read(parent: &Dir, target: &TargetPath) -> Result<Self, TargetMountError> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID | StatxFlags::SIZE;
        let stat = match rustix::fs::statx(parent, target.parent_and_name().1, flags, wanted) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(Self::Absent),
            Err(errno) => return Err(inspect_error(target)(errno.into())),
        };
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        match kind {
            // The kernel tells whether it is the root of a mount: statx(2). A bind mount may have the device
            // number of its parent.
            FileType::Directory | FileType::RegularFile | FileType::BlockDevice
                if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) =>
            {
                Ok(Self::Mount(MountedFile::new(&stat, kind)))
            }
            FileType::Directory => Ok(Self::Directory),
            // A file with data was not created by a publish, and is not removed by an unpublish.
            FileType::RegularFile if stat.stx_size == 0 => Ok(Self::File),
            _ => Err(TargetMountError::NotDirectory { path: target.relative_path().to_owned() }),
        }
    }
}

impl MountedFile {
    fn new(stat: &Statx, kind: FileType) -> Self {
        let device = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
        Self {
            mount: stat.stx_mnt_id,
            file: FileId { device, inode: stat.stx_ino },
            kind,
            file_system: DeviceNumbers { major: stat.stx_dev_major, minor: stat.stx_dev_minor },
            device: DeviceNumbers { major: stat.stx_rdev_major, minor: stat.stx_rdev_minor },
        }
    }

    pub(super) fn is_device(&self) -> bool {
        self.kind == FileType::BlockDevice
    }

    /// Returns whether it is the node of a loop device, also of one without a file.
    pub(super) fn is_loop_device(&self) -> bool {
        self.is_device() && self.device.is_loop()
    }

    /// The loop device that it is, or whose complete file system it is. A directory of a store on a loop device is
    /// neither.
    pub(super) fn loop_device(&self, mount: &MountEntry) -> io::Result<Option<LoopDevice>> {
        match self.kind {
            FileType::BlockDevice => self.own_device(),
            FileType::Directory if mount.root == Path::new("/") => LoopDevice::open_numbers(self.file_system),
            _ => Ok(None),
        }
    }

    /// The loop device that it is.
    pub(super) fn own_device(&self) -> io::Result<Option<LoopDevice>> {
        if self.is_device() { LoopDevice::open_numbers(self.device) } else { Ok(None) }
    }
}

/// Creates a directory, or an empty file, to mount at.
pub(super) fn create_target(parent: &Dir, name: &Path, is_device: bool) -> rustix::io::Result<()> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if is_device {
        rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o600)).map(drop)
    } else {
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o750))
    }
}

/// Removes an empty directory, or a file.
pub(super) fn remove_target(parent: &Dir, name: &Path, is_device: bool) -> rustix::io::Result<()> {
    let flags = if is_device { AtFlags::empty() } else { AtFlags::REMOVEDIR };
    match rustix::fs::unlinkat(parent, name, flags) {
        // The kubelet may have removed it first.
        Err(Errno::NOENT) => Ok(()),
        removed => removed,
    }
}

/// Opens what is at a name without being able to read it, and follows no link.
pub(super) fn open_target(parent: &Dir, name: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(parent, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Opens an ordinary file, without being able to read it.
pub(super) fn open_file(parent: &Dir, name: &Path) -> io::Result<OwnedFd> {
    let file = open_target(parent, name)?;
    match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(io::Error::other("another process replaced the file there: retry")),
    }
}

/// Unmounts the topmost mount at a name. Refers to the parent by its descriptor and follows no link, so
/// nothing else can be unmounted. An open descriptor of the mount itself would keep it busy.
pub(super) fn unmount_name(parent: &Dir, name: &Path) -> rustix::io::Result<()> {
    let path = Path::new("/proc/self/fd").join(parent.as_fd().as_raw_fd().to_string()).join(name);
    rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)
}

pub(super) fn inspect_error(target: &TargetPath) -> impl Fn(io::Error) -> TargetMountError {
    |source| TargetMountError::Inspect { target: target.clone(), source }
}
