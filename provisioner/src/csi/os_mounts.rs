//! The kernel's mounts.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::mount_table;
use rustix::fs::{AtFlags, FileType, Mode, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

use super::mounts::{Conflict, FileId, MountError, MountFlags, Mounted, Mounts};
use super::sys;
use super::target::Target;

/// Mounts as the kernel has them: binds a volume's directory, by its descriptor, to a target below the kubelet's.
///
/// The mount is made aside, gets its flags, and is then moved to its place: nobody ever sees it with others. Needs Linux
/// 5.12 and the right to mount.
///
/// *Source:* `open_tree`(2), `mount_setattr`(2), `move_mount`(2).
#[derive(Debug, Clone)]
pub struct OsMounts {
    kubelet: PathBuf,
}

/// What is at a target.
enum Place {
    Nothing,
    Directory,
    Mount { id: u64, of: FileId },
}

impl OsMounts {
    /// For targets below this directory, the kubelet's. It is opened anew for each call: it may be mounted later.
    pub fn new(kubelet: impl Into<PathBuf>) -> Self {
        Self { kubelet: kubelet.into() }
    }

    /// Finds out whether a directory could be mounted, without mounting it.
    ///
    /// # Errors
    /// What the kernel says: it is too old, or the caller isn't root.
    pub fn probe(volume: BorrowedFd<'_>) -> io::Result<()> {
        detached(volume, MountFlags::default()).map(drop)
    }

    /// Whether what is mounted below a directory is seen outside of this container, where this is one: whether the mount
    /// that the directory is on is shared.
    ///
    /// # Errors
    /// The directory, or the mounts, can't be looked at.
    pub fn is_shared(path: &Path) -> io::Result<bool> {
        let stat = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)?;
        Ok(mount_table()?.iter().any(|mount| mount.id == stat.stx_mnt_id && mount.is_shared))
    }

    /// The directory that the target is in; `None` where there is none.
    fn parent(&self, target: &Target) -> Result<Option<Dir>, MountError> {
        let below = target.split().0;
        let open = || match below.as_os_str().is_empty() {
            true => Dir::open(&self.kubelet),
            false => Dir::open(&self.kubelet)?.open_dir(below),
        };
        match open() {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) if error.is_symlink() || error.is_not_a_directory() => {
                Err(MountError::Link { path: below.to_owned() })
            }
            Err(error) => Err(look(target)(io::Error::new(error.kind(), error))),
        }
    }

    /// Mounts in a directory that is there.
    fn mount_in(&self, parent: &Dir, volume: BorrowedFd<'_>, asked: &Asked<'_>) -> Result<(), MountError> {
        let occupied = |source| MountError::Occupied { target: asked.target.clone(), source };
        let dir = parent.open_dir(Path::new(asked.target.split().1)).map_err(|error| {
            let source = io::Error::new(error.kind(), error);
            MountError::Mount { target: asked.target.clone(), source }
        })?;
        let is_empty = is_empty(dir.as_fd()).map_err(look(asked.target))?;
        if !is_empty {
            return Err(occupied(Conflict::NotEmpty));
        }
        bind(volume, dir.as_fd(), asked.flags)
            .map_err(|source| MountError::Mount { target: asked.target.clone(), source })
    }
}

/// Where to mount, and how.
struct Asked<'a> {
    target: &'a Target,
    flags: MountFlags,
}

impl Mounts for OsMounts {
    fn mounted(&self, target: &Target) -> Result<Option<Mounted>, MountError> {
        let Some(parent) = self.parent(target)? else { return Ok(None) };
        let Place::Mount { id, of } = place(&parent, target)? else { return Ok(None) };
        let all = mount_table().map_err(look(target))?;
        Ok(all.iter().find(|mount| mount.id == id).map(|mount| Mounted { of, flags: mount.own_flags.into() }))
    }

    fn mount(&self, volume: BorrowedFd<'_>, target: &Target, flags: MountFlags) -> Result<(), MountError> {
        let (above, name) = target.split();
        let no_parent = || MountError::NoParent { parent: above.to_owned() };
        let parent = self.parent(target)?.ok_or_else(no_parent)?;
        let is_new = match place(&parent, target)? {
            Place::Mount { .. } => {
                return Err(MountError::Occupied { target: target.clone(), source: Conflict::Mount });
            }
            Place::Directory => false,
            Place::Nothing => true,
        };
        if is_new {
            let mode = Mode::from_raw_mode(0o750);
            rustix::fs::mkdirat(&parent, name, mode)
                .map_err(|errno| MountError::Mount { target: target.clone(), source: errno.into() })?;
        }
        let done = self.mount_in(&parent, volume, &Asked { target, flags });
        if is_new && done.is_err() {
            // If that fails, the next publish finds an empty directory, and takes it.
            let _ = rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR);
        }
        done
    }

    fn unmount(&self, target: &Target) -> Result<(), MountError> {
        let Some(parent) = self.parent(target)? else { return Ok(()) };
        let failed = |errno: Errno| match errno {
            Errno::BUSY => MountError::Busy { target: target.clone() },
            Errno::NOTEMPTY => MountError::Occupied { target: target.clone(), source: Conflict::NotEmpty },
            errno => MountError::Unmount { target: target.clone(), source: errno.into() },
        };
        let name = target.split().1;
        loop {
            match place(&parent, target)? {
                Place::Nothing => return Ok(()),
                Place::Directory => match rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR) {
                    Ok(()) | Err(Errno::NOENT) => return Ok(()),
                    Err(errno) => return Err(failed(errno)),
                },
                Place::Mount { .. } => unmount_in(&parent, name.as_ref()).map_err(failed)?,
            }
        }
    }

    fn targets(&self, volume: BorrowedFd<'_>) -> Result<Vec<Target>, MountError> {
        let list = |source| MountError::List { source };
        let of = FileId::of(volume).map_err(list)?;
        let device = (rustix::fs::major(of.device), rustix::fs::minor(of.device));
        // The kernel tells mount points as they are, whatever links lead to the kubelet's directory.
        let kubelet = std::fs::canonicalize(&self.kubelet).map_err(list)?;
        let all = mount_table().map_err(list)?;
        let here = all.iter().filter(|mount| mount.mounted.device == device);
        let below = here.filter_map(|mount| Target::try_new(&kubelet, mount.target.to_str()?).ok());
        those_of(of, below, |target| self.mounted(target))
    }
}

/// Those targets at which this is mounted, in their order. What is gone, or hidden by another mount, can't be seen there, and
/// neither can a volume where there is a file, as some pods have one mounted; of what can't be looked at nobody knows that.
fn those_of(
    of: FileId,
    targets: impl Iterator<Item = Target>,
    look: impl Fn(&Target) -> Result<Option<Mounted>, MountError>,
) -> Result<Vec<Target>, MountError> {
    let mut found = BTreeSet::new();
    for target in targets {
        let mounted = match look(&target) {
            Err(MountError::Link { .. }) => None,
            looked => looked?,
        };
        if mounted.is_some_and(|mounted| mounted.of == of) {
            found.insert(target);
        }
    }
    Ok(found.into_iter().collect())
}

fn look(target: &Target) -> impl Fn(io::Error) -> MountError {
    |source| MountError::Look { target: target.clone(), source }
}

/// What is at the target, on top of all mounts.
fn place(parent: &Dir, target: &Target) -> Result<Place, MountError> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
    let stat = match rustix::fs::statx(parent, target.split().1, flags, wanted) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(Place::Nothing),
        Err(errno) => return Err(look(target)(errno.into())),
    };
    if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::Directory {
        return Err(MountError::Link { path: target.path().to_owned() });
    }
    Ok(match stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        false => Place::Directory,
        true => Place::Mount {
            id: stat.stx_mnt_id,
            of: FileId {
                device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
                inode: stat.stx_ino,
            },
        },
    })
}

fn is_empty(dir: BorrowedFd<'_>) -> io::Result<bool> {
    for entry in rustix::fs::Dir::read_from(dir)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Binds one directory over another, both by descriptor.
fn bind(volume: BorrowedFd<'_>, over: BorrowedFd<'_>, flags: MountFlags) -> io::Result<()> {
    let mount = detached(volume, flags)?;
    let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(&mount, c"", over, c"", both)?)
}

/// A mount of a directory that is nowhere yet, and gone when it is dropped.
fn detached(volume: BorrowedFd<'_>, flags: MountFlags) -> io::Result<OwnedFd> {
    let clone =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let mount = rustix::mount::open_tree(volume, c"", clone)?;
    let old = "the kernel has no mount_setattr: Linux 5.12 or newer is needed";
    let set = sys::set_flags(mount.as_fd(), flags);
    set.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSYS) => io::Error::new(io::ErrorKind::Unsupported, old),
        _ => error,
    })?;
    Ok(mount)
}

/// Unmounts the topmost mount at a name. The directory above is named by its descriptor, and a link isn't followed: it
/// can be nothing else than what is there. An open descriptor of the mount itself would keep it busy.
fn unmount_in(parent: &Dir, name: &Path) -> rustix::io::Result<()> {
    let path = Path::new("/proc/self/fd").join(parent.as_fd().as_raw_fd().to_string()).join(name);
    rustix::mount::unmount(path, UnmountFlags::NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_that_cannot_be_looked_at_is_not_said_to_be_free() {
        let target = |name: &str| Target::try_new(Path::new("/k"), &format!("/k/{name}")).expect("a target");
        let volume = FileId { device: 1, inode: 2 };
        let mounted = |inode| Mounted { of: FileId { device: 1, inode }, flags: MountFlags::default() };
        let seen = |target: &Target| match target.to_string().as_str() {
            "gone" => Ok(None),
            "other" => Ok(Some(mounted(3))),
            "file" => Err(MountError::Link { path: target.path().to_owned() }),
            "shut" => Err(look(target)(io::Error::from_raw_os_error(libc::EMFILE))),
            _ => Ok(Some(mounted(2))),
        };
        let all = ["b", "gone", "a", "other", "file", "b"].map(target);
        assert_eq!(those_of(volume, all.into_iter(), seen).expect("all are seen"), ["a", "b"].map(target));
        let refused = those_of(volume, ["gone", "shut"].map(target).into_iter(), seen);
        assert!(
            matches!(&refused, Err(MountError::Look { target, .. }) if target.to_string() == "shut"),
            "{refused:?}"
        );
    }
}
