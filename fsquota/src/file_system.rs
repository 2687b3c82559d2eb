//! Checks that a file system enforces project quotas, and reports what is missing.

use std::ffi::{CString, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nodekeel_localstorage::mount::{MountEntry, MountFlags, mount_table};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use thiserror::Error;

use crate::linux::{self, LinuxKernel};
use crate::sys;

/// A file system that has project quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileSystemKind {
    /// Limits apply to every process; a write beyond them fails with ENOSPC.
    Xfs,
    /// Limits do not apply to processes with CAP_SYS_RESOURCE; a write beyond them fails with EDQUOT.
    Ext4,
}

impl fmt::Display for FileSystemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Xfs => "xfs",
            Self::Ext4 => "ext4",
        })
    }
}

/// A mounted file system that enforces project quotas.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSystem {
    /// Type of the file system.
    pub kind: FileSystemKind,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// The mount source, usually a device.
    pub source: OsString,
    /// The directory of the file system that is mounted there: `/` for all of it.
    pub root: PathBuf,
}

/// A way around the limits that exists although quotas are enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EnforcementGap {
    /// A process in the initial user namespace can move a file that it owns out of its project, and so out of
    /// the limits (`FS_IOC_FSSETXATTR`); in another user namespace the kernel rejects that.
    OwnersCanLeave,
    /// ext4 lets processes with CAP_SYS_RESOURCE exceed every limit.
    PrivilegedCanExceed,
    /// Only a part of the file system is mounted here. A process that allocates projects through another
    /// mount of it does not see our lock. Both search in different parts of the range, and detect if they
    /// allocated the same number.
    PartOfFileSystem,
}

impl fmt::Display for EnforcementGap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::OwnersCanLeave => {
                "file owners outside of a user namespace can move files out of their project and so out of \
                 the limits: run limited programs in a user namespace, or deny them FS_IOC_FSSETXATTR"
            }
            Self::PrivilegedCanExceed => {
                "ext4 does not limit processes with CAP_SYS_RESOURCE, such as root's: use XFS to limit them"
            }
            Self::PartOfFileSystem => {
                "only a part of the file system is mounted here: allocate projects through one mount only"
            }
        })
    }
}

/// A file system's quotas can't be used; the message names the remedy.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The directory does not exist or can't be opened.
    #[error("can't open {} to use its quotas", path.display())]
    Open {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// `/proc` does not list the mount of the directory. Mount `/proc`.
    #[error("can't find the mount of {} in /proc/self/mountinfo (is /proc mounted?)", path.display())]
    FindMount {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The file system has no project quotas. Use XFS or ext4.
    #[error("{} is on {found}, which has no project quotas: use XFS or ext4", path.display())]
    UnsupportedFileSystem {
        /// The directory.
        path: PathBuf,
        /// The type of its file system.
        found: String,
    },
    /// Another mount covers the mount point, so other processes can't find the directory that carries the
    /// lock.
    #[error(
        "another file system is mounted over {} and hides it: unmount that one first",
        mount_point.display()
    )]
    Covered {
        /// The mount point of both.
        mount_point: PathBuf,
    },
    /// The file system is mounted read-only. Remount it; on XFS,
    /// [`open_for_reading`](crate::ProjectQuota::open_for_reading) works there.
    #[error("{} is mounted read-only: remount it with `mount -o remount,rw`", mount_point.display())]
    ReadOnly {
        /// The mount point.
        mount_point: PathBuf,
    },
    /// The kernel was built without quotas for the file system.
    #[error(
        "this kernel was built without quotas for {kind}: boot one with {}",
        required_kernel_options(kind)
    )]
    NoKernelSupport {
        /// The type of the file system.
        kind: FileSystemKind,
    },
    /// The ext4 file system was created without the project feature. Enable it with tune2fs.
    #[error(
        "{source_device} has no project quotas: unmount it, run \
         `tune2fs -O project,quota -Q prjquota {source_device}`, and mount it with `-o prjquota`"
    )]
    NoProjectFeature {
        /// The device.
        source_device: String,
    },
    /// Projects are not counted: the mount lacks the quota option.
    #[error("{} is mounted without project quotas: {}", mount_point.display(), mount_advice(kind))]
    AccountingOff {
        /// The type of the file system.
        kind: FileSystemKind,
        /// The mount point.
        mount_point: PathBuf,
    },
    /// Projects are counted, but their limits are not enforced: turn enforcement on, without an unmount.
    #[error(
        "{} counts projects but does not enforce their limits: {}",
        mount_point.display(),
        enforcement_advice(kind, mount_point)
    )]
    EnforcementOff {
        /// The type of the file system.
        kind: FileSystemKind,
        /// The mount point.
        mount_point: PathBuf,
    },
    /// The caller is not root in the initial user namespace.
    #[error(
        "no permission for the quotas of {}: run as root outside of user namespaces (CAP_SYS_ADMIN)",
        mount_point.display()
    )]
    Permission {
        /// The mount point.
        mount_point: PathBuf,
    },
    /// The kernel returned an error that known kernels do not return.
    #[error("can't probe the quotas of {}", mount_point.display())]
    Probe {
        /// The mount point.
        mount_point: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

fn required_kernel_options(kind: &FileSystemKind) -> &'static str {
    match kind {
        FileSystemKind::Xfs => "CONFIG_XFS_QUOTA",
        FileSystemKind::Ext4 => "CONFIG_QUOTA and CONFIG_QFMT_V2",
    }
}

fn mount_advice(kind: &FileSystemKind) -> &'static str {
    match kind {
        FileSystemKind::Xfs => {
            "unmount it, then mount it with `-o prjquota` (remounting is not enough; for the root file \
             system boot with `rootflags=prjquota`)"
        }
        FileSystemKind::Ext4 => "mount it with `-o prjquota`",
    }
}

fn enforcement_advice(kind: &FileSystemKind, mount_point: &Path) -> String {
    let mount = mount_point.display();
    let command = match kind {
        FileSystemKind::Xfs => format!("xfs_quota -x -c 'enable -p' {mount}"),
        FileSystemKind::Ext4 => format!("quotaon -P {mount}"),
    };
    format!("run `{command}`, and mount it with `-o prjquota` from the next time on")
}

/// The purpose of opening a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenMode {
    /// To change and read limits.
    Change,
    /// To read them, also on a read-only mount.
    Read,
}

impl OpenMode {
    /// Returns whether the mount is enough. ext4 turns its quotas off while the file system is read-only, XFS does
    /// not.
    fn accepts(self, mount: &MountEntry, kind: FileSystemKind) -> bool {
        let is_read_only = |flags: MountFlags| flags.contains(MountFlags::READ_ONLY);
        match self {
            Self::Change => !is_read_only(mount.info.flags),
            Self::Read => kind == FileSystemKind::Xfs || !is_read_only(mount.file_system_flags),
        }
    }
}

/// The name of the file system for quotactl: by descriptor if the kernel supports that, or always by device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuotactlMode {
    Auto,
    ByDevice,
}

/// Opens the file system that `path` is on, and checks that it enforces project quotas.
pub(crate) fn open_file_system(
    path: &Path,
    mode: OpenMode,
    way: QuotactlMode,
) -> Result<(LinuxKernel, FileSystem), OpenError> {
    let opened = |source: io::Error| OpenError::Open { path: path.into(), source };
    let dir = open_directory(path).map_err(opened)?;
    let mount =
        find_mount(dir.as_fd()).map_err(|source| OpenError::FindMount { path: path.into(), source })?;
    let kind = match &*mount.info.fstype {
        "xfs" => FileSystemKind::Xfs,
        "ext4" => FileSystemKind::Ext4,
        _ => {
            let found = mount.info.fstype;
            return Err(OpenError::UnsupportedFileSystem { path: path.into(), found });
        }
    };
    if !mode.accepts(&mount, kind) {
        return Err(OpenError::ReadOnly { mount_point: mount.target });
    }
    let root = open_mount_dir(&mount)?;
    let by_device = way == QuotactlMode::ByDevice || !sys::supports_quotactl_fd();
    let probed = |source: io::Error| OpenError::Probe { mount_point: mount.target.clone(), source };
    let device = if by_device {
        Some(CString::new(mount.source.as_bytes()).map_err(|error| probed(io::Error::other(error)))?)
    } else {
        None
    };
    let linux = LinuxKernel::new(root, device, kind, mount.target.clone());
    check_quotas(&linux, &mount)?;
    let MountEntry { target, source, root, .. } = mount;
    Ok((linux, FileSystem { kind, mount_point: target, source, root }))
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn find_mount(dir: BorrowedFd<'_>) -> io::Result<MountEntry> {
    let stat = rustix::fs::fstat(dir)?;
    let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let id = read_mount_id(dir)?;
    let (mut by_id, mut by_device) = (None, None);
    for mount in mount_table()? {
        if Some(mount.id) == id {
            by_id = Some(mount);
        } else if mount.info.device == device {
            // Before Linux 5.8, statx(2) tells no mount ID: the last mount of the device stands for it.
            by_device = Some(mount);
        }
    }
    by_id.or(by_device).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The ID of the mount; `None` before Linux 5.8.
fn read_mount_id(dir: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    let stat = rustix::fs::statx(dir, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    let is_known = stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    Ok(is_known.then_some(stat.stx_mnt_id))
}

/// Opens the directory that carries the lock: the mount point, whichever directory below it was named. If
/// another mount covers the mount point, it can't be reached, not even by `..`.
fn open_mount_dir(mount: &MountEntry) -> Result<OwnedFd, OpenError> {
    let point = &mount.target;
    let opened = |source: io::Error| OpenError::Open { path: point.clone(), source };
    let root = open_directory(point).map_err(opened)?;
    if read_mount_id(root.as_fd()).map_err(opened)?.is_some_and(|id| id != mount.id) {
        return Err(OpenError::Covered { mount_point: point.clone() });
    }
    Ok(root)
}

fn check_quotas(linux: &LinuxKernel, mount: &MountEntry) -> Result<(), OpenError> {
    let (kind, mount_point) = (linux.kind, mount.target.clone());
    let errno = |result: io::Result<()>| match result {
        Ok(()) => Ok(None),
        Err(error) => error.raw_os_error().ok_or(error).map(Some),
    };
    let probed = |source| OpenError::Probe { mount_point: mount_point.clone(), source };
    // Counting first, then enforcement: the error names the first thing that is missing.
    let lack = match errno(sys::probe_accounting(linux.quota_target())).map_err(probed)? {
        None => return check_enforcement(linux, mount_point),
        // ENOSYS means that the kernel, or the file system, was built without quotas.
        Some(libc::ENOSYS) => OpenError::NoKernelSupport { kind },
        // ext4 gives the same error without the feature and without the mount option; a file with a project
        // tells them apart.
        Some(libc::ESRCH) if kind == FileSystemKind::Ext4 && !supports_projects(linux) => {
            OpenError::NoProjectFeature { source_device: mount.source.to_string_lossy().into_owned() }
        }
        Some(libc::ESRCH) => OpenError::AccountingOff { kind, mount_point },
        Some(libc::EPERM | libc::EACCES) => OpenError::Permission { mount_point },
        Some(other) => probed(io::Error::from_raw_os_error(other)),
    };
    Err(lack)
}

fn check_enforcement(linux: &LinuxKernel, mount_point: PathBuf) -> Result<(), OpenError> {
    let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    // Reading a record needs privileges, and the probe before does not: fs/quota/quota.c,
    // `check_quotactl_permission`.
    match sys::read_quota(linux.quota_target(), 0) {
        Err(error) if is_denied(&error) => return Err(OpenError::Permission { mount_point }),
        _ => {}
    }
    match sys::is_enforcement_on(linux.quota_target()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(OpenError::EnforcementOff { kind: linux.kind, mount_point }),
        Err(source) => Err(OpenError::Probe { mount_point, source }),
    }
}

/// Returns whether files there can have a project: tries it with an unnamed file, which disappears when it is closed.
fn supports_projects(linux: &LinuxKernel) -> bool {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    // Without such a file nothing is known, and the error names the mount option.
    let Ok(file) = rustix::fs::openat(&linux.root, ".", flags, Mode::RUSR) else { return true };
    let tag = crate::kernel::ProjectTag { project: 1, inherit: false };
    let tried = linux::write_project_tag(file.as_fd(), tag);
    !tried.is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP))
}

/// The warnings that apply to the file system.
pub(crate) fn enforcement_gaps(file_system: &FileSystem) -> Vec<EnforcementGap> {
    let mut warnings = vec![EnforcementGap::OwnersCanLeave];
    if file_system.kind == FileSystemKind::Ext4 {
        warnings.push(EnforcementGap::PrivilegedCanExceed);
    }
    if file_system.root != Path::new("/") {
        warnings.push(EnforcementGap::PartOfFileSystem);
    }
    warnings
}
