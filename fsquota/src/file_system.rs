//! What a file system can do about quotas, and what it lacks.

use std::ffi::{CString, OsString};
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use thiserror::Error;

use crate::linux::{self, Linux};
use crate::mounts::{self, Mount};
use crate::sys;

/// A file system that has project quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kind {
    /// Its limits bind everybody; what they refuse fails with ENOSPC.
    Xfs,
    /// Its limits do not bind who has CAP_SYS_RESOURCE; what they refuse fails with EDQUOT.
    Ext4,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Xfs => "xfs",
            Self::Ext4 => "ext4",
        })
    }
}

/// A mounted file system whose limits bind.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileSystem {
    /// Which it is.
    pub kind: Kind,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// What it is on: a device, usually.
    pub source: OsString,
    /// What of it is mounted there: `/` is all of it.
    pub root: PathBuf,
}

/// What quotas do not protect from, though everything is in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Warning {
    /// Whoever owns a file and is in the initial user namespace can take it out of its project, and so out of the limits
    /// (`FS_IOC_FSSETXATTR`); in another user namespace the kernel refuses it.
    OwnersCanLeave,
    /// ext4 lets processes with CAP_SYS_RESOURCE exceed every limit.
    PrivilegedCanExceed,
    /// Whoever can open the directory where it is mounted can take the lock by which processes are kept apart, and hold up
    /// all who set limits.
    OthersCanLock,
    /// Only a part of the file system is mounted here. Whoever allocates projects by another mount of it does not see
    /// our lock; both look where the other is unlikely to, and notice if they gave the same number away.
    PartOfFileSystem,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::OwnersCanLeave => {
                "whoever owns a file, outside a user namespace, can take it out of its project and so out of the limits; \
                 run what is limited in a user namespace, or deny it FS_IOC_FSSETXATTR"
            }
            Self::PrivilegedCanExceed => {
                "ext4 does not bind processes that have CAP_SYS_RESOURCE, such as root's; XFS does"
            }
            Self::OthersCanLock => {
                "whoever can open the directory where it is mounted can hold up all who set limits: give it to root alone \
                 (chmod 700)"
            }
            Self::PartOfFileSystem => {
                "only a part of the file system is mounted here: allocate projects by one mount of it alone"
            }
        })
    }
}

/// Why a file system's quotas can't be used, and what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no such directory, or it can't be opened.
    #[error("open {}", path.display())]
    Open {
        /// What was to be opened.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// `/proc` does not say what the directory is on. Mount it.
    #[error("find what {} is on in /proc/self/mountinfo; is /proc mounted?", path.display())]
    Mounts {
        /// What was to be found.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// Another file system.
    #[error("{} is on {found}, which has no project quotas: use XFS or ext4", path.display())]
    OtherKind {
        /// What was opened.
        path: PathBuf,
        /// The name of its file system.
        found: String,
    },
    /// Another mount lies over it, so nobody else finds the directory by which processes are kept apart.
    #[error("another mount covers {}: unmount that one first", mount_point.display())]
    Covered {
        /// Where both are mounted.
        mount_point: PathBuf,
    },
    /// Nothing can be changed there.
    #[error("{} is mounted read-only: remount it with `mount -o remount,rw`", mount_point.display())]
    ReadOnly {
        /// Where it is mounted.
        mount_point: PathBuf,
    },
    /// The kernel was built without.
    #[error("this kernel has no quotas for {kind}: it needs {}", options(kind))]
    NoKernelSupport {
        /// For which file system.
        kind: Kind,
    },
    /// ext4 has not been told to keep projects.
    #[error(
        "{source_device} has no project quotas: unmount it, run `tune2fs -O project,quota -Q prjquota {source_device}`, \
         and mount it with `-o prjquota`"
    )]
    NoProjectFeature {
        /// The device.
        source_device: String,
    },
    /// Projects are not counted.
    #[error("{} is mounted without project quotas: {}", mount_point.display(), remedy(kind))]
    NotMounted {
        /// Which file system.
        kind: Kind,
        /// Where it is mounted.
        mount_point: PathBuf,
    },
    /// Projects are counted, and their limits bind nobody.
    #[error("{} counts projects but does not enforce their limits: {}", mount_point.display(), remedy(kind))]
    NotEnforced {
        /// Which file system.
        kind: Kind,
        /// Where it is mounted.
        mount_point: PathBuf,
    },
    /// The caller is not root in the initial user namespace.
    #[error("no permission for the quotas of {}: they are root's, outside of user namespaces (CAP_SYS_ADMIN)", mount_point.display())]
    Permission {
        /// Where it is mounted.
        mount_point: PathBuf,
    },
    /// The kernel did not answer as known kernels do.
    #[error("ask for the quotas of {}", mount_point.display())]
    Probe {
        /// Where it is mounted.
        mount_point: PathBuf,
        /// What it said.
        #[source]
        source: io::Error,
    },
}

fn options(kind: &Kind) -> &'static str {
    match kind {
        Kind::Xfs => "CONFIG_XFS_QUOTA",
        Kind::Ext4 => "CONFIG_QUOTA and CONFIG_QFMT_V2",
    }
}

fn remedy(kind: &Kind) -> &'static str {
    match kind {
        Kind::Xfs => {
            "unmount it, then mount it with `-o prjquota` (remounting is not enough; for the root file system boot with \
             `rootflags=prjquota`)"
        }
        Kind::Ext4 => "mount it with `-o prjquota`",
    }
}

/// Whether the kernel may be asked by descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Best,
    Device,
}

/// Opens what `path` is on, and finds out whether its limits bind.
pub(crate) fn open(path: &Path, way: Way) -> Result<(Linux, FileSystem), OpenError> {
    let opened = |source: io::Error| OpenError::Open { path: path.into(), source };
    let dir = open_directory(path).map_err(opened)?;
    let mount = mount_of(dir.as_fd()).map_err(|source| OpenError::Mounts { path: path.into(), source })?;
    let kind = match mount.kind.as_bytes() {
        b"xfs" => Kind::Xfs,
        b"ext4" => Kind::Ext4,
        other => {
            let found = String::from_utf8_lossy(other).into_owned();
            return Err(OpenError::OtherKind { path: path.into(), found });
        }
    };
    if mount.is_read_only() {
        return Err(OpenError::ReadOnly { mount_point: mount.point });
    }
    let root = root_of(&mount)?;
    let by_device = way == Way::Device || !sys::takes_descriptors();
    let probed = |source: io::Error| OpenError::Probe { mount_point: mount.point.clone(), source };
    let device = if by_device {
        Some(CString::new(mount.source.as_bytes()).map_err(|error| probed(io::Error::other(error)))?)
    } else {
        None
    };
    let linux = Linux { root, device, kind };
    check(&linux, &mount)?;
    let Mount { point, source, root, .. } = mount;
    Ok((linux, FileSystem { kind, mount_point: point, source, root }))
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn mount_of(dir: BorrowedFd<'_>) -> io::Result<Mount> {
    let stat = rustix::fs::fstat(dir)?;
    let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let id = mount_id(dir)?;
    let text = fs::read("/proc/self/mountinfo")?;
    let (mut by_id, mut by_device) = (None, None);
    for mount in mounts::parse(&text) {
        if Some(mount.id) == id {
            by_id = Some(mount);
        } else if mount.device == device {
            by_device = Some(mount);
        }
    }
    by_id.or(by_device).ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn mount_id(dir: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    Ok(mounts::mount_id(&fs::read(format!("/proc/self/fdinfo/{}", dir.as_raw_fd()))?))
}

/// The directory whose lock everybody takes: the mount's own, whichever directory in it was named. `..` does not lead to
/// one that another mount covers either.
fn root_of(mount: &Mount) -> Result<OwnedFd, OpenError> {
    let point = &mount.point;
    let opened = |source: io::Error| OpenError::Open { path: point.clone(), source };
    let root = open_directory(point).map_err(opened)?;
    if mount_id(root.as_fd()).map_err(opened)? != Some(mount.id) {
        return Err(OpenError::Covered { mount_point: point.clone() });
    }
    Ok(root)
}

fn check(linux: &Linux, mount: &Mount) -> Result<(), OpenError> {
    let (kind, mount_point) = (linux.kind, mount.point.clone());
    let errno = |result: io::Result<()>| match result {
        Ok(()) => Ok(None),
        Err(error) => error.raw_os_error().ok_or(error).map(Some),
    };
    let probed = |source| OpenError::Probe { mount_point: mount_point.clone(), source };
    let lack = match errno(sys::probe(linux.target())).map_err(probed)? {
        None => return check_rights(linux, mount_point),
        // Without any quotas in the kernel there is no such call, and a file system that knows none says the same.
        Some(libc::ENOSYS) => OpenError::NoKernelSupport { kind },
        Some(libc::ESRCH) if kind == Kind::Ext4 && !keeps_projects(linux) => {
            OpenError::NoProjectFeature { source_device: mount.source.to_string_lossy().into_owned() }
        }
        Some(libc::ESRCH) => OpenError::NotMounted { kind, mount_point },
        Some(libc::EPERM | libc::EACCES) => OpenError::Permission { mount_point },
        Some(other) => probed(io::Error::from_raw_os_error(other)),
    };
    Err(lack)
}

fn check_rights(linux: &Linux, mount_point: PathBuf) -> Result<(), OpenError> {
    let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    match sys::account(linux.target(), 0) {
        Err(error) if is_denied(&error) => return Err(OpenError::Permission { mount_point }),
        _ => {}
    }
    match sys::is_enforced(linux.target()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(OpenError::NotEnforced { kind: linux.kind, mount_point }),
        Err(source) => Err(OpenError::Probe { mount_point, source }),
    }
}

/// Whether a file can have a project there: tried with one that has no name and is gone when it is closed.
fn keeps_projects(linux: &Linux) -> bool {
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    let Ok(file) = rustix::fs::openat(&linux.root, ".", flags, Mode::RUSR) else { return true };
    let tag = crate::kernel::Tag { project: 1, inherit: false };
    let tried = linux::set_tag(file.as_fd(), tag);
    !tried.is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP))
}

/// The warnings that hold whatever is done there.
pub(crate) fn warnings(file_system: &FileSystem, root: BorrowedFd<'_>) -> Vec<Warning> {
    let mut warnings = vec![Warning::OwnersCanLeave];
    if file_system.kind == Kind::Ext4 {
        warnings.push(Warning::PrivilegedCanExceed);
    }
    let others = Mode::RGRP | Mode::ROTH;
    if rustix::fs::fstat(root).is_ok_and(|stat| Mode::from_raw_mode(stat.st_mode).intersects(others)) {
        warnings.push(Warning::OthersCanLock);
    }
    if file_system.root != Path::new("/") {
        warnings.push(Warning::PartOfFileSystem);
    }
    warnings
}
