//! Mounts by system calls.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::{MountEntry, mount_table};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::MoveMountFlags;

use super::mount_source::{attach_block, detached_mount, device_mount, file_system_mount};
use super::mounter::{
    FileId, MountRestrictions, TargetConflict, TargetMount, TargetMountError, VolumeMounter,
};
use super::target_list::{attached_devices, filter_targets, mounts_below};
use super::target_path::TargetPath;
use super::target_state::{
    TargetState, create_target, inspect_error, open_file, open_target, remove_target, unmount_name,
};
use crate::id::VolumeId;
use crate::image::loops::{self, LoopDevice};
use crate::image::{ImageFormat, VolumeKind};
use crate::step::{StepHook, StepRunner, VolumeStep};
use crate::store::OpenVolume;

/// Mounts a volume, by its descriptor, at a target below the kubelet's directory: the directory of a volume, the loop
/// device of a block volume, or the file system in a file.
///
/// Creates a detached mount, sets its flags, and then moves it to the target: it is never visible with other
/// flags. Requires Linux 5.12 and the right to mount; for volumes in files, also loop devices and `/dev`.
///
/// Keeps nothing in memory: which device has the file of a volume, and where it is mounted, the kernel knows.
///
/// *Source:* `open_tree`(2), `mount_setattr`(2), `fsmount`(2), `move_mount`(2), `loop`(4).
#[derive(Debug, Clone)]
pub struct BindMounter {
    kubelet_dir: PathBuf,
    steps: StepRunner,
}

impl BindMounter {
    /// A mounter for targets below the kubelet's directory. Opens the directory again for each call: it may
    /// be mounted later.
    pub fn new(kubelet: impl Into<PathBuf>) -> Self {
        Self { kubelet_dir: kubelet.into(), steps: StepRunner::default() }
    }

    /// Notifies a hook of the steps that outlive the process, for tests.
    #[must_use]
    pub fn with_hook(self, hook: Option<Arc<dyn StepHook>>) -> Self {
        Self { steps: StepRunner::new(hook), ..self }
    }

    /// Checks whether a directory can be mounted, without mounting it.
    ///
    /// # Errors
    /// The kernel's error: it is too old, or the caller is not root.
    pub fn probe_support(volume: BorrowedFd<'_>) -> io::Result<()> {
        detached_mount(volume, MountRestrictions::default()).map(drop)
    }

    /// Returns whether mounts below a directory are visible outside of this container, if this is one: whether the
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
        let open = || {
            let kubelet = Dir::open(&self.kubelet_dir)?;
            if below.as_os_str().is_empty() { Ok(kubelet) } else { kubelet.open_dir(below) }
        };
        match open() {
            Ok(dir) => Ok(Some(dir)),
            Err(error) if error.is_not_found() => Ok(None),
            // No link is followed, also none that is above the target: it could lead out of the kubelet's
            // directory.
            Err(error) if error.is_symlink() || error.is_not_a_directory() => {
                Err(TargetMountError::NotDirectory { path: below.to_owned() })
            }
            Err(error) => Err(inspect_error(target)(io::Error::new(error.io_kind(), error))),
        }
    }

    /// Mounts at a target that exists.
    fn mount_in_parent(&self, parent: &Dir, request: &MountRequest<'_>) -> Result<(), TargetMountError> {
        // Opened first, and mounted at by its descriptor: a rename in between leads the mount nowhere else.
        let place = request.open_place(parent)?;
        let mount = self.create_mount(request)?;
        let both = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        let move_there = || rustix::mount::move_mount(&mount, c"", &place, c"", both);
        self.steps
            .run_step(VolumeStep::MountVolume, move_there)
            .map_err(|errno| request.mount_error(errno.into()))
    }

    /// Creates a mount with the flags, detached: no process can see it.
    fn create_mount(&self, request: &MountRequest<'_>) -> Result<OwnedFd, TargetMountError> {
        let mount = match request.volume {
            OpenVolume::Directory(dir) => detached_mount(dir.as_fd(), request.flags),
            OpenVolume::Image { file, format: ImageFormat::Block } => {
                device_mount(&self.attach_device(file.as_fd(), request)?)
            }
            OpenVolume::Image { file, format } => {
                file_system_mount(&self.steps, file.as_fd(), *format, request.flags)
            }
        };
        mount.map_err(|source| request.mount_error(source))
    }

    /// The device of a block volume. One that is attached already, also by a process that was killed, is used again.
    fn attach_device(
        &self,
        file: BorrowedFd<'_>,
        request: &MountRequest<'_>,
    ) -> Result<LoopDevice, TargetMountError> {
        let failed = |source| request.mount_error(source);
        let read_only = request.flags.read_only;
        let has_other_access = |device: &LoopDevice| device.is_read_only() != read_only;
        let mut attached = loops::find(file).map_err(failed)?;
        if attached.iter().any(has_other_access) {
            // Perhaps no target shows the device any more, and then it is released. An open descriptor would
            // keep its file attached.
            drop(attached);
            self.release(request.volume)?;
            attached = loops::find(file).map_err(failed)?;
        }
        if attached.iter().any(has_other_access) {
            return Err(TargetMountError::AccessConflict { target: request.target.clone() });
        }
        match attached.into_iter().find(LoopDevice::is_complete) {
            None => attach_block(&self.steps, file, read_only).map_err(failed),
            // Such a device may disappear with its last user, and may have the size from before an expansion.
            Some(mut device) => {
                device.keep_attached().and_then(|()| device.grow()).map_err(failed)?;
                Ok(device)
            }
        }
    }

    /// Detaches the device of a target that was unmounted, unless another target shows it.
    fn detach_unused(&self, device: LoopDevice) -> io::Result<()> {
        // Devices of other programs stay. Ours have the id of a volume as their name, and no autoclear.
        let is_ours = !device.is_autoclear() && device.name().parse::<VolumeId>().is_ok();
        let kubelet = std::fs::canonicalize(&self.kubelet_dir)?;
        let shows_device =
            |mount: &MountEntry| device.may_be_node_of(mount) && mount.target.starts_with(&kubelet);
        if is_ours && !mount_table()?.iter().any(shows_device) {
            self.steps.run_step(VolumeStep::DetachDevice, || device.detach())?;
        }
        Ok(())
    }
}

/// A volume to mount at a target, with these flags.
struct MountRequest<'a> {
    volume: &'a OpenVolume,
    target: &'a TargetPath,
    flags: MountRestrictions,
}

impl MountRequest<'_> {
    /// Returns whether the target is a device, and not a directory.
    fn is_device(&self) -> bool {
        self.volume.kind() == VolumeKind::Image(ImageFormat::Block)
    }

    /// Returns whether the target must be created.
    fn is_new(&self, state: &TargetState) -> Result<bool, TargetMountError> {
        let path = || self.target.relative_path().to_owned();
        match (state, self.is_device()) {
            (TargetState::Mount(_), _) => Err(self.occupied(TargetConflict::Mount)),
            (TargetState::Absent, _) => Ok(true),
            (TargetState::Directory, false) | (TargetState::File, true) => Ok(false),
            (TargetState::Directory, true) => Err(TargetMountError::NotFile { path: path() }),
            (TargetState::File, false) => Err(TargetMountError::NotDirectory { path: path() }),
        }
    }

    /// Opens the empty directory, or the file, to mount at.
    fn open_place(&self, parent: &Dir) -> Result<OwnedFd, TargetMountError> {
        let name = Path::new(self.target.parent_and_name().1);
        if self.is_device() {
            return open_file(parent, name).map_err(|source| self.mount_error(source));
        }
        let dir = parent
            .open_dir(name)
            .map_err(|error| self.mount_error(io::Error::new(error.io_kind(), error)))?;
        // The mount would hide its files.
        if !dir.is_empty().map_err(|error| inspect_error(self.target)(error.into_cause()))? {
            return Err(self.occupied(TargetConflict::NotEmpty));
        }
        dir.as_fd().try_clone_to_owned().map_err(|source| self.mount_error(source))
    }

    fn occupied(&self, source: TargetConflict) -> TargetMountError {
        TargetMountError::Occupied { target: self.target.clone(), source }
    }

    fn mount_error(&self, source: io::Error) -> TargetMountError {
        TargetMountError::Mount { target: self.target.clone(), source }
    }
}

impl VolumeMounter for BindMounter {
    fn find_mount(&self, target: &TargetPath) -> Result<Option<TargetMount>, TargetMountError> {
        let Some(parent) = self.open_parent(target)? else { return Ok(None) };
        let TargetState::Mount(mounted) = TargetState::read(&parent, target)? else { return Ok(None) };
        let all = mount_table().map_err(inspect_error(target))?;
        let Some(mount) = all.iter().find(|mount| mount.id == mounted.mount) else { return Ok(None) };
        let mut flags = MountRestrictions::from(mount.own_flags);
        // Without a loop device, the target shows a directory: that of the volume, or another one.
        let Some(device) = mounted.loop_device(mount).map_err(inspect_error(target))? else {
            return Ok(Some(TargetMount { volume: mounted.file, flags }));
        };
        // The device decides whether it can be written, and not the mount of its node.
        if mounted.is_device() {
            flags.read_only = device.is_read_only();
        }
        Ok(Some(TargetMount { volume: device.backing_file().into(), flags }))
    }

    fn mount(
        &self,
        volume: &OpenVolume,
        target: &TargetPath,
        flags: MountRestrictions,
    ) -> Result<(), TargetMountError> {
        let request = MountRequest { volume, target, flags };
        let (parent_path, name) = target.parent_and_name();
        let no_parent = || TargetMountError::NoParent { parent: parent_path.to_owned() };
        let parent = self.open_parent(target)?.ok_or_else(no_parent)?;
        let is_new = request.is_new(&TargetState::read(&parent, target)?)?;
        let (name, is_device) = (Path::new(name), request.is_device());
        if is_new {
            let create = || create_target(&parent, name, is_device);
            self.steps
                .run_step(VolumeStep::CreateTarget, create)
                .map_err(|errno| request.mount_error(errno.into()))?;
        }
        let done = self.mount_in_parent(&parent, &request);
        if done.is_err() {
            // If that fails, the next publish finds and uses the empty directory or file, and the device.
            if is_new {
                let _ = remove_target(&parent, name, is_device);
            }
            let _ = self.release(volume);
        }
        done
    }

    fn unmount(&self, target: &TargetPath) -> Result<(), TargetMountError> {
        let Some(parent) = self.open_parent(target)? else { return Ok(()) };
        let failed = |errno| unmount_error(target, errno);
        let name = Path::new(target.parent_and_name().1);
        let remove = |is_device| {
            let removed = || remove_target(&parent, name, is_device);
            self.steps.run_step(VolumeStep::RemoveTarget, removed).map_err(failed)
        };
        let mut devices = Vec::new();
        // Mounts can be on top of each other. Each turn looks again, and removes the topmost, and at last the
        // target.
        loop {
            match TargetState::read(&parent, target)? {
                TargetState::Absent => break,
                TargetState::Directory => remove(false)?,
                TargetState::File => remove(true)?,
                TargetState::Mount(mounted) => {
                    // A device that can't be inspected is found by its volume.
                    devices.extend(mounted.own_device().ok().flatten());
                    let unmount = || unmount_name(&parent, name);
                    self.steps.run_step(VolumeStep::UnmountVolume, unmount).map_err(failed)?;
                }
            }
        }
        // Only now: as long as a mount shows a device, it is in use.
        devices
            .into_iter()
            .try_for_each(|device| self.detach_unused(device))
            .map_err(|source| TargetMountError::Unmount { target: target.clone(), source })
    }

    fn shows_other(
        &self,
        target: &TargetPath,
        id: &VolumeId,
        volume: Option<FileId>,
    ) -> Result<bool, TargetMountError> {
        let Some(parent) = self.open_parent(target)? else { return Ok(false) };
        let TargetState::Mount(mounted) = TargetState::read(&parent, target)? else { return Ok(false) };
        let all = mount_table().map_err(inspect_error(target))?;
        let Some(mount) = all.iter().find(|mount| mount.id == mounted.mount) else { return Ok(false) };
        // The mount and the device have the id as their name, also after the store has lost the volume, or got it back.
        Ok(match mounted.loop_device(mount) {
            Ok(Some(device)) => device.name() != id.as_str() && volume != Some(device.backing_file().into()),
            // Of a device without a file nothing is known.
            Ok(None) if mounted.is_loop_device() => false,
            Ok(None) => !is_root_of(mount, id) && volume != Some(mounted.file),
            Err(_) => false,
        })
    }

    fn list_targets(&self, volume: &OpenVolume) -> Result<Vec<TargetPath>, TargetMountError> {
        let list = |source| TargetMountError::List { source };
        let file = FileId::from_fd(volume.as_fd()).map_err(list)?;
        let numbers = (rustix::fs::major(file.device), rustix::fs::minor(file.device));
        let devices = attached_devices(volume).map_err(list)?;
        // A first choice: the mount table has no inodes. Each target is inspected below.
        let may_show = |mount: &MountEntry| match volume {
            OpenVolume::Directory(_) => mount.info.device == numbers,
            OpenVolume::Image { .. } => {
                devices.iter().any(|device| device.is_source_of(mount) || device.may_be_node_of(mount))
            }
        };
        // The mount table has resolved paths, even if symbolic links lead to the kubelet's directory.
        let kubelet = std::fs::canonicalize(&self.kubelet_dir).map_err(list)?;
        let all = mount_table().map_err(list)?;
        let here = all.iter().filter(|mount| may_show(mount));
        let below = here.filter_map(|mount| TargetPath::try_new(&kubelet, mount.target.to_str()?).ok());
        filter_targets(file, below, |target| self.find_mount(target))
    }

    fn list_nested(&self, volume: &OpenVolume) -> Result<Vec<PathBuf>, TargetMountError> {
        let list = || {
            let kubelet = std::fs::canonicalize(&self.kubelet_dir)?;
            let all = mount_table()?;
            let nested = match volume {
                OpenVolume::Directory(dir) => mounts_below(dir.as_fd(), &all)?,
                OpenVolume::Image { .. } => {
                    let devices = attached_devices(volume)?;
                    let is_nested = |mount: &&MountEntry| {
                        // A mount of the whole file system is one of the volume; a subPath mount shows a
                        // directory in it.
                        mount.root != Path::new("/")
                            && devices.iter().any(|device| device.is_source_of(mount))
                    };
                    all.iter().filter(is_nested).collect()
                }
            };
            let below = nested.into_iter().filter(|mount| mount.target.starts_with(&kubelet));
            Ok(below.map(|mount| mount.target.clone()).collect())
        };
        list().map_err(|source| TargetMountError::List { source })
    }

    fn open_mount(&self, target: &TargetPath) -> Result<Option<OwnedFd>, TargetMountError> {
        let Some(parent) = self.open_parent(target)? else { return Ok(None) };
        let TargetState::Mount(_) = TargetState::read(&parent, target)? else { return Ok(None) };
        let opened = open_target(&parent, Path::new(target.parent_and_name().1));
        opened.map(Some).map_err(|errno| inspect_error(target)(errno.into()))
    }

    fn list_attached(&self) -> Result<Vec<VolumeId>, TargetMountError> {
        let names = loops::list_names().map_err(|source| TargetMountError::List { source })?;
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    fn release(&self, volume: &OpenVolume) -> Result<(), TargetMountError> {
        let OpenVolume::Image { file, format: ImageFormat::Block } = volume else { return Ok(()) };
        let failed = |source| TargetMountError::Release { source };
        // The devices first: without one, the mount table is not read.
        if loops::find(file.as_fd()).map_err(failed)?.is_empty() || !self.list_targets(volume)?.is_empty() {
            return Ok(());
        }
        let detach = || loops::detach_all(file.as_fd());
        self.steps.run_step(VolumeStep::DetachDevice, detach).map_err(failed)
    }
}

/// Returns whether the root of a mount is the directory of a volume, which may have been deleted since.
///
/// *Source:* Linux, `d_path`: the path of a deleted directory ends in `//deleted`.
fn is_root_of(mount: &MountEntry, id: &VolumeId) -> bool {
    let root = mount.root.to_string_lossy();
    let root = root.strip_suffix("//deleted").unwrap_or(&root);
    Path::new(root).file_name().is_some_and(|name| name == id.as_str())
}

fn unmount_error(target: &TargetPath, errno: Errno) -> TargetMountError {
    let target = target.clone();
    match errno {
        Errno::BUSY => TargetMountError::Busy { target },
        Errno::NOTEMPTY => TargetMountError::Occupied { target, source: TargetConflict::NotEmpty },
        errno => TargetMountError::Unmount { target, source: errno.into() },
    }
}
