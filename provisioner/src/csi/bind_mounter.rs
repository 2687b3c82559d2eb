//! Mounts by system calls.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::mount_table;
use rustix::fs::{AtFlags, FileType, Mode, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::mounter::{
    FileId, MountRestrictions, TargetConflict, TargetMount, TargetMountError, VolumeMounter,
};
use super::sys;
use super::target_path::TargetPath;

/// Bind-mounts a volume's directory, by its descriptor, at a target below the kubelet's directory.
///
/// Creates a detached mount, sets its flags, and then moves it to the target: it is never visible with other
/// flags. Requires Linux 5.12 and the right to mount.
///
/// *Source:* `open_tree`(2), `mount_setattr`(2), `move_mount`(2).
#[derive(Debug, Clone)]
pub struct BindMounter {
    kubelet_dir: PathBuf,
}

/// What is at a target path.
enum TargetState {
    Absent,
    Directory,
    Mount { id: u64, directory: FileId },
}

impl BindMounter {
    /// A mounter for targets below the kubelet's directory. Opens the directory again for each call: it may
    /// be mounted later.
    pub fn new(kubelet: impl Into<PathBuf>) -> Self {
        Self { kubelet_dir: kubelet.into() }
    }

    /// Checks whether a directory can be mounted, without mounting it.
    ///
    /// # Errors
    /// The kernel's error: it is too old, or the caller is not root.
    pub fn probe_support(volume: BorrowedFd<'_>) -> io::Result<()> {
        detached_mount(volume, MountRestrictions::default()).map(drop)
    }

    /// Whether mounts below a directory are visible outside of this container, if this is one: whether the
    /// mount that contains the directory is shared.
    ///
    /// # Errors
    /// Reading the directory's attributes or the mount table failed.
    pub fn is_shared(path: &Path) -> io::Result<bool> {
        let stat = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)?;
        Ok(mount_table()?.iter().any(|mount| mount.id == stat.stx_mnt_id && mount.is_shared))
    }

    /// Opens the parent directory of the target; `None` if it does not exist.
    fn open_parent(&self, target: &TargetPath) -> Result<Option<Dir>, TargetMountError> {
        let below = target.parent_and_name().0;
        let open = || match below.as_os_str().is_empty() {
            true => Dir::open(&self.kubelet_dir),
            false => Dir::open(&self.kubelet_dir)?.open_dir(below),
        };
        match open() {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) if error.is_symlink() || error.is_not_a_directory() => {
                Err(TargetMountError::NotDirectory { path: below.to_owned() })
            }
            Err(error) => Err(inspect_error(target)(io::Error::new(error.io_kind(), error))),
        }
    }

    /// Mounts at a target whose parent directory exists.
    fn mount_in_parent(
        &self,
        parent: &Dir,
        volume: BorrowedFd<'_>,
        request: &MountRequest<'_>,
    ) -> Result<(), TargetMountError> {
        let occupied = |source| TargetMountError::Occupied { target: request.target.clone(), source };
        let dir = parent.open_dir(Path::new(request.target.parent_and_name().1)).map_err(|error| {
            let source = io::Error::new(error.io_kind(), error);
            TargetMountError::Mount { target: request.target.clone(), source }
        })?;
        let is_empty = dir.is_empty().map_err(|error| inspect_error(request.target)(error.into_cause()))?;
        if !is_empty {
            return Err(occupied(TargetConflict::NotEmpty));
        }
        bind_mount(volume, dir.as_fd(), request.flags)
            .map_err(|source| TargetMountError::Mount { target: request.target.clone(), source })
    }
}

/// The target and the flags of a mount.
struct MountRequest<'a> {
    target: &'a TargetPath,
    flags: MountRestrictions,
}

impl VolumeMounter for BindMounter {
    fn find_mount(&self, target: &TargetPath) -> Result<Option<TargetMount>, TargetMountError> {
        let Some(parent) = self.open_parent(target)? else { return Ok(None) };
        let TargetState::Mount { id, directory } = target_state(&parent, target)? else { return Ok(None) };
        let all = mount_table().map_err(inspect_error(target))?;
        Ok(all
            .iter()
            .find(|mount| mount.id == id)
            .map(|mount| TargetMount { directory, flags: mount.own_flags.into() }))
    }

    fn mount(
        &self,
        volume: BorrowedFd<'_>,
        target: &TargetPath,
        flags: MountRestrictions,
    ) -> Result<(), TargetMountError> {
        let (parent_path, name) = target.parent_and_name();
        let no_parent = || TargetMountError::NoParent { parent: parent_path.to_owned() };
        let parent = self.open_parent(target)?.ok_or_else(no_parent)?;
        let is_new = match target_state(&parent, target)? {
            TargetState::Mount { .. } => {
                return Err(TargetMountError::Occupied {
                    target: target.clone(),
                    source: TargetConflict::Mount,
                });
            }
            TargetState::Directory => false,
            TargetState::Absent => true,
        };
        if is_new {
            let mode = Mode::from_raw_mode(0o750);
            rustix::fs::mkdirat(&parent, name, mode)
                .map_err(|errno| TargetMountError::Mount { target: target.clone(), source: errno.into() })?;
        }
        let done = self.mount_in_parent(&parent, volume, &MountRequest { target, flags });
        if is_new && done.is_err() {
            // If that fails, the next publish finds and uses the empty directory.
            let _ = rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR);
        }
        done
    }

    fn unmount(&self, target: &TargetPath) -> Result<(), TargetMountError> {
        let Some(parent) = self.open_parent(target)? else { return Ok(()) };
        let failed = |errno: Errno| match errno {
            Errno::BUSY => TargetMountError::Busy { target: target.clone() },
            Errno::NOTEMPTY => {
                TargetMountError::Occupied { target: target.clone(), source: TargetConflict::NotEmpty }
            }
            errno => TargetMountError::Unmount { target: target.clone(), source: errno.into() },
        };
        let name = target.parent_and_name().1;
        loop {
            match target_state(&parent, target)? {
                TargetState::Absent => return Ok(()),
                TargetState::Directory => match rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR) {
                    Ok(()) | Err(Errno::NOENT) => return Ok(()),
                    Err(errno) => return Err(failed(errno)),
                },
                TargetState::Mount { .. } => unmount_name(&parent, name.as_ref()).map_err(failed)?,
            }
        }
    }

    fn list_targets(&self, volume: BorrowedFd<'_>) -> Result<Vec<TargetPath>, TargetMountError> {
        let list = |source| TargetMountError::List { source };
        let directory = FileId::from_fd(volume).map_err(list)?;
        let device = (rustix::fs::major(directory.device), rustix::fs::minor(directory.device));
        // The mount table has resolved paths, even if symbolic links lead to the kubelet's directory.
        let kubelet = std::fs::canonicalize(&self.kubelet_dir).map_err(list)?;
        let all = mount_table().map_err(list)?;
        let here = all.iter().filter(|mount| mount.info.device == device);
        let below = here.filter_map(|mount| TargetPath::try_new(&kubelet, mount.target.to_str()?).ok());
        filter_targets(directory, below, |target| self.find_mount(target))
    }

    fn list_nested(&self, volume: BorrowedFd<'_>) -> Result<Vec<PathBuf>, TargetMountError> {
        let list = || {
            let kubelet = std::fs::canonicalize(&self.kubelet_dir)?;
            let stat = rustix::fs::statx(volume, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
            let path = std::fs::read_link(format!("/proc/self/fd/{}", volume.as_raw_fd()))?;
            let all = mount_table()?;
            let holder = all.iter().find(|mount| mount.id == stat.stx_mnt_id);
            let below =
                holder.and_then(|holder| Some(holder.root.join(path.strip_prefix(&holder.target).ok()?)));
            // Without a path, as of a disk that was unmounted, nothing is known of it.
            let (Some(holder), Some(volume)) = (holder, below) else { return Ok(Vec::new()) };
            let nested = all.iter().filter(|mount| {
                mount.info.device == holder.info.device
                    && mount.root != volume
                    && mount.root.starts_with(&volume)
                    && mount.target.starts_with(&kubelet)
            });
            Ok(nested.map(|mount| mount.target.clone()).collect())
        };
        list().map_err(|source| TargetMountError::List { source })
    }
}

/// The targets at which this directory is mounted, sorted. A target that is missing or covered by another
/// mount does not show the volume, nor does a file, which some pods mount. A target that cannot be inspected
/// is an error, since it may show it.
fn filter_targets(
    directory: FileId,
    targets: impl Iterator<Item = TargetPath>,
    inspect: impl Fn(&TargetPath) -> Result<Option<TargetMount>, TargetMountError>,
) -> Result<Vec<TargetPath>, TargetMountError> {
    let mut found = BTreeSet::new();
    for target in targets {
        let mounted = match inspect(&target) {
            Err(TargetMountError::NotDirectory { .. }) => None,
            result => result?,
        };
        if mounted.is_some_and(|mounted| mounted.directory == directory) {
            found.insert(target);
        }
    }
    Ok(found.into_iter().collect())
}

fn inspect_error(target: &TargetPath) -> impl Fn(io::Error) -> TargetMountError {
    |source| TargetMountError::Inspect { target: target.clone(), source }
}

/// Inspects the topmost mount at a target.
fn target_state(parent: &Dir, target: &TargetPath) -> Result<TargetState, TargetMountError> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
    let stat = match rustix::fs::statx(parent, target.parent_and_name().1, flags, wanted) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(TargetState::Absent),
        Err(errno) => return Err(inspect_error(target)(errno.into())),
    };
    if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::Directory {
        return Err(TargetMountError::NotDirectory { path: target.relative_path().to_owned() });
    }
    Ok(match stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        false => TargetState::Directory,
        true => TargetState::Mount {
            id: stat.stx_mnt_id,
            directory: FileId {
                device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
                inode: stat.stx_ino,
            },
        },
    })
}

/// Bind-mounts one directory over another, both by descriptor.
fn bind_mount(volume: BorrowedFd<'_>, over: BorrowedFd<'_>, flags: MountRestrictions) -> io::Result<()> {
    let mount = detached_mount(volume, flags)?;
    let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(&mount, c"", over, c"", both)?)
}

/// Creates a detached mount of a directory; dropping it unmounts it.
fn detached_mount(volume: BorrowedFd<'_>, flags: MountRestrictions) -> io::Result<OwnedFd> {
    let clone =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let mount = rustix::mount::open_tree(volume, c"", clone)?;
    let old = "the kernel does not support mount_setattr: Linux 5.12 or newer is required";
    let set = sys::set_mount_flags(mount.as_fd(), flags);
    set.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSYS) => io::Error::new(io::ErrorKind::Unsupported, old),
        _ => error,
    })?;
    Ok(mount)
}

/// Unmounts the topmost mount at a name. Refers to the parent by its descriptor and follows no link, so
/// nothing else can be unmounted. An open descriptor of the mount itself would keep it busy.
fn unmount_name(parent: &Dir, name: &Path) -> rustix::io::Result<()> {
    let path = Path::new("/proc/self/fd").join(parent.as_fd().as_raw_fd().to_string()).join(name);
    rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_cannot_be_inspected_is_an_error() {
        let target =
            |name: &str| TargetPath::try_new(Path::new("/k"), &format!("/k/{name}")).expect("a target");
        let volume = FileId { device: 1, inode: 2 };
        let mounted = |inode| TargetMount {
            directory: FileId { device: 1, inode },
            flags: MountRestrictions::default(),
        };
        let seen = |target: &TargetPath| match target.to_string().as_str() {
            "gone" => Ok(None),
            "other" => Ok(Some(mounted(3))),
            "file" => Err(TargetMountError::NotDirectory { path: target.relative_path().to_owned() }),
            "unreadable" => Err(inspect_error(target)(io::Error::from_raw_os_error(libc::EMFILE))),
            _ => Ok(Some(mounted(2))),
        };
        let all = ["b", "gone", "a", "other", "file", "b"].map(target);
        assert_eq!(
            filter_targets(volume, all.into_iter(), seen).expect("all are inspected"),
            ["a", "b"].map(target)
        );
        let result = filter_targets(volume, ["gone", "unreadable"].map(target).into_iter(), seen);
        assert!(
            matches!(&result, Err(TargetMountError::Inspect { target, .. }) if target.to_string() == "unreadable"),
            "{result:?}"
        );
    }
}
