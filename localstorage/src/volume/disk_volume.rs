//! A disk as a volume: XFS with project quotas, not encrypted.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::{DiskAccess, VolumeDevice};
use super::filesystem::{DEFAULT_LABEL, VolumeMount, XfsFormat, clean_label};
use super::identity::DiskIdentity;
use super::lifecycle::MountLifecycle;
use super::marker::VolumeMarker;
use super::reading::{DiskReader, ReadingHook, ReadingProgress};
use super::{DataVolume, ErasePolicy, MountState, VolumeContents, VolumeError};
use crate::dir::Dir;
use crate::mount::Mounter;

/// A disk, formatted as XFS and mounted with project quotas.
///
/// # Behaviour
/// | contents of the disk | `mount_new` | `mount_existing` |
/// |---|---|---|
/// | [blank](VolumeContents::Blank): all of it was read | writes a claim, formats, releases the claim, mounts, writes the marker | [`Absent`](VolumeError::Absent) |
/// | a claim, and only what it covers: killed while formatting | formats again | [`Unfinished`](VolumeError::Unfinished) |
/// | an XFS with our label, without files and without the marker: killed before the end | mounts, writes the marker | [`Unfinished`](VolumeError::Unfinished) |
/// | an XFS with our label and the marker | [`Occupied`](VolumeError::Occupied) | mounts |
/// | anything else | [`Occupied`](VolumeError::Occupied) | [`ForeignData`](VolumeError::ForeignData), without mounting it |
/// | unreadable | [`Device`](VolumeError::Device) | [`Device`](VolumeError::Device) |
///
/// The claim is one sector near the end of the disk, synced before the format starts: no other record is
/// needed, and the disk may be moved to another host halfway. The claim names the file system to be created
/// and, with [`ErasePolicy::Exactly`], the contents to be erased, by their
/// [fingerprints](super::DiskSignature::fingerprint). It does not cover data that was written to the disk
/// since, even of the same kind:
/// - The claim of a blank disk covers what mkfs.xfs writes, which it knows by the UUID of the file system. Any
///   other byte on the disk is foreign data: the whole disk is read again. Right before mkfs.xfs starts, the places
///   that a probe reads are probed again.
/// - The claim of contents to be erased also covers data without a signature: it remains of them while one
///   file system replaces the other.
///
/// If mkfs.xfs can't be started, or fails before it wrote anything, the claim is released again.
#[derive(Debug)]
pub struct DiskVolume {
    device: VolumeDevice,
    reading_hook: Option<ReadingHook>,
    runtime: Option<Dir>,
    mount: VolumeMount,
    label: String,
    mkfs: PathBuf,
    lifecycle: MountLifecycle,
}

impl DiskVolume {
    /// A volume on this device, to be mounted on `target`: the absolute path of an existing directory.
    pub fn new(
        device: impl Into<PathBuf>,
        target: impl Into<PathBuf>,
        mounter: Arc<dyn Mounter>,
    ) -> DiskVolume {
        DiskVolume {
            device: VolumeDevice::new(device.into()),
            reading_hook: None,
            runtime: None,
            mount: VolumeMount { target: target.into(), mounter },
            label: DEFAULT_LABEL.into(),
            mkfs: "mkfs.xfs".into(),
            lifecycle: MountLifecycle::default(),
        }
    }

    /// Sets the label that identifies the volume as ours: 1 to 12 bytes of ASCII letters, digits, dash and
    /// dot. Other characters are replaced by dashes, and longer labels are truncated.
    pub fn with_label(self, label: &str) -> DiskVolume {
        DiskVolume { label: clean_label(label).unwrap_or(self.label), ..self }
    }

    /// Sets the path of `mkfs.xfs`, instead of the first one in `PATH`. `xfs_growfs` is in the same directory.
    pub fn with_mkfs(self, mkfs: impl Into<PathBuf>) -> DiskVolume {
        DiskVolume { mkfs: mkfs.into(), ..self }
    }

    /// Uses no other disk at this path than the one that was inspected.
    pub fn expecting(mut self, disk: DiskIdentity) -> DiskVolume {
        self.device.identity = Some(disk);
        self
    }

    /// Sets the function that receives the progress of the reading of a whole disk, before it counts as blank, and
    /// cancels it by `Break`.
    pub fn with_reading_progress(
        mut self,
        progress: impl Fn(ReadingProgress) -> ControlFlow<()> + Send + Sync + 'static,
    ) -> DiskVolume {
        self.reading_hook = Some(ReadingHook(Arc::new(progress)));
        self
    }

    /// Sets the directory, in memory and for root alone, that records the progress of a reading, so that a later call
    /// resumes it. Without one, it starts over.
    pub fn with_runtime(self, runtime: Dir) -> DiskVolume {
        DiskVolume { runtime: Some(runtime), ..self }
    }

    /// Reads the whole disk, if only that shows whether it is blank. A [`mount_new`](DataVolume::mount_new) does it as well.
    ///
    /// # Errors
    /// [`VolumeError::Occupied`] if it has data; [`VolumeError::ReadingCanceled`], [`VolumeError::Device`].
    pub fn read_disk(&self) -> Result<(), VolumeError> {
        self.device.read_disk(self.reading())
    }

    fn reading(&self) -> DiskReader<'_> {
        DiskReader { hook: self.reading_hook.as_ref(), directory: self.runtime.as_ref() }
    }

    fn create_volume(&self, erase: &ErasePolicy) -> Result<Dir, VolumeError> {
        let disk = self.device.open(DiskAccess::Write)?;
        let mut found = disk.probe_contents()?;
        // An earlier incarnation may have mounted it, and was killed.
        let is_mounted = self.mount.is_mounted_from(disk.device_numbers()?)?;
        if !is_mounted {
            found = disk.read_undecided(found, erase, self.reading())?;
        }
        let step = plan_creation(&found, erase, &self.label, is_mounted);
        match step {
            CreationStep::Reject => {
                return Err(VolumeError::Occupied { path: self.device.path.clone(), found });
            }
            CreationStep::Format { force } => {
                self.reading().forget();
                disk.format_xfs(&XfsFormat { mkfs: &self.mkfs, label: &self.label, force }, &found)?;
            }
            CreationStep::Finish => {}
        }
        let source = disk.mount_source()?;
        drop(disk);
        let created = self.mount.mount_and_check(&source, |top| {
            match VolumeMarker::read_from(top).map_err(VolumeError::Finish)? {
                VolumeMarker::Unfinished => VolumeMarker::write_complete(top).map_err(VolumeError::Finish),
                VolumeMarker::Complete | VolumeMarker::Erasing | VolumeMarker::Foreign { .. } => {
                    Err(VolumeError::Occupied { path: self.device.path.clone(), found })
                }
            }
        });
        match created {
            // The mount has changed the superblock: the caller agrees to the contents as they are now.
            Err(VolumeError::Occupied { path, .. }) if !is_mounted => {
                let found = self.device.open(DiskAccess::Read)?.probe_contents()?;
                Err(VolumeError::Occupied { path, found })
            }
            created => created,
        }
    }

    fn open_volume(&self) -> Result<Dir, VolumeError> {
        let path = || self.device.path.clone();
        let disk = self.device.open(DiskAccess::Read)?;
        match disk.probe_contents()? {
            VolumeContents::Unread { .. } => return Err(VolumeError::Absent { path: path() }),
            VolumeContents::Interrupted => return Err(VolumeError::Unfinished { path: path() }),
            // Nothing else is mounted: a mount replays the log, and so writes to the disk.
            VolumeContents::Xfs { label, .. } if label == self.label => {}
            found => return Err(VolumeError::ForeignData { path: path(), found }),
        }
        let source = disk.mount_source()?;
        drop(disk);
        self.mount.mount_and_check(&source, |top| VolumeMarker::check_complete(top, &self.device.path))
    }

    /// Grows the file system of the mounted volume to the size of the disk, by `xfs_growfs`; does nothing if it has
    /// that size.
    ///
    /// # Errors
    /// [`VolumeError::InvalidState`] unless the volume is mounted; [`VolumeError::Grow`].
    pub fn grow_volume(&self) -> Result<(), VolumeError> {
        match self.lifecycle.state() {
            MountState::Mounted => self.mount.grow_file_system(&self.mkfs),
            state => Err(VolumeError::InvalidState { state }),
        }
    }

    /// The path of the device.
    pub fn device_path(&self) -> &Path {
        &self.device.path
    }
}

#[derive(Debug, PartialEq, Eq)]
enum CreationStep {
    /// The file system is ours: complete it.
    Finish,
    /// The disk is blank, or its contents may be erased.
    Format {
        /// True if mkfs.xfs overwrites contents that it recognizes.
        force: bool,
    },
    /// The disk has other contents.
    Reject,
}

fn plan_creation(found: &VolumeContents, erase: &ErasePolicy, label: &str, is_mounted: bool) -> CreationStep {
    match found {
        // Formatting under a mounted file system would destroy it twice.
        VolumeContents::Xfs { label: found, .. } if found == label && is_mounted => CreationStep::Finish,
        _ if is_mounted => CreationStep::Reject,
        VolumeContents::Blank => CreationStep::Format { force: false },
        // mkfs.xfs would refuse a disk with half a file system.
        VolumeContents::Interrupted => CreationStep::Format { force: true },
        found if *erase == ErasePolicy::Exactly(found.clone()) => CreationStep::Format { force: true },
        // A killed call may have formatted the disk. The marker inside shows whether the volume has data.
        VolumeContents::Xfs { label: found, .. } if found == label => CreationStep::Finish,
        _ => CreationStep::Reject,
    }
}

impl DataVolume for DiskVolume {
    fn mount_new(&self, erase: ErasePolicy) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.create_volume(&erase))
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.open_volume())
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.lifecycle.unmount(|| self.mount.unmount())
    }

    fn state(&self) -> MountState {
        self.lifecycle.state()
    }
}
