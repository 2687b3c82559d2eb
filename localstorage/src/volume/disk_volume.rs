//! A disk as a volume: XFS with project quotas, not encrypted.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::{Disk, DiskAccess, XfsFormat};
use super::lifecycle::MountLifecycle;
use super::marker::VolumeMarker;
use super::{DataVolume, ErasePolicy, MountState, VolumeContents, VolumeError};
use crate::dir::Dir;
use crate::mount::{MountSpec, Mounter};

/// The longest label of an XFS, in bytes. *Source:* `XFSLABEL_MAX` in Linux `xfs_format.h`.
const MAX_LABEL_BYTES: usize = 12;

/// A disk, formatted as XFS and mounted with project quotas.
///
/// # Behaviour
/// | contents of the disk | `mount_new` | `mount_existing` |
/// |---|---|---|
/// | [blank](VolumeContents::Blank) | writes a claim, formats, releases the claim, mounts, writes the marker | [`Absent`](VolumeError::Absent) |
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
///   other byte in the places that prove a disk [blank](VolumeContents::Blank) is foreign data. This is decided
///   again right before mkfs.xfs starts.
/// - The claim of contents to be erased also covers data without a signature: it remains of them while one
///   file system replaces the other.
///
/// If mkfs.xfs can't be started, or fails before it wrote anything, the claim is released again.
#[derive(Debug)]
pub struct DiskVolume {
    device_path: PathBuf,
    target: PathBuf,
    mounter: Arc<dyn Mounter>,
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
            device_path: device.into(),
            target: target.into(),
            mounter,
            label: "nodekeel".into(),
            mkfs: "mkfs.xfs".into(),
            lifecycle: MountLifecycle::default(),
        }
    }

    /// Sets the label that identifies the volume as ours: 1 to 12 bytes of ASCII letters, digits, dash and
    /// dot. Other characters are replaced by dashes, and longer labels are truncated.
    pub fn with_label(self, label: &str) -> DiskVolume {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        let plain: String =
            label.chars().map(|c| if is_plain(c) { c } else { '-' }).take(MAX_LABEL_BYTES).collect();
        DiskVolume { label: if plain.is_empty() { self.label } else { plain }, ..self }
    }

    /// Sets the path of `mkfs.xfs`, instead of the first one in `PATH`.
    pub fn with_mkfs(self, mkfs: impl Into<PathBuf>) -> DiskVolume {
        DiskVolume { mkfs: mkfs.into(), ..self }
    }

    fn create_volume(&self, erase: &ErasePolicy) -> Result<Dir, VolumeError> {
        let disk = Disk::open(&self.device_path, DiskAccess::Write)?;
        let found = disk.probe_contents()?;
        let step = plan_creation(&found, erase, &self.label, self.is_mounted(&disk)?);
        match step {
            CreationStep::Reject => {
                return Err(VolumeError::Occupied { path: self.device_path.clone(), found });
            }
            CreationStep::Format { force } => {
                disk.format_xfs(&XfsFormat { mkfs: &self.mkfs, label: &self.label, force }, &found)?;
            }
            CreationStep::Finish => {}
        }
        drop(disk);
        self.mount_and_check(|top| match VolumeMarker::read_from(top).map_err(VolumeError::Finish)? {
            VolumeMarker::Unfinished => VolumeMarker::write_complete(top).map_err(VolumeError::Finish),
            VolumeMarker::Complete | VolumeMarker::Erasing | VolumeMarker::Foreign { .. } => {
                Err(VolumeError::Occupied { path: self.device_path.clone(), found })
            }
        })
    }

    fn open_volume(&self) -> Result<Dir, VolumeError> {
        let path = || self.device_path.clone();
        match Disk::open(&self.device_path, DiskAccess::Read)?.probe_contents()? {
            VolumeContents::Blank => return Err(VolumeError::Absent { path: path() }),
            VolumeContents::Interrupted => return Err(VolumeError::Unfinished { path: path() }),
            VolumeContents::Xfs { label, .. } if label == self.label => {}
            found => return Err(VolumeError::ForeignData { path: path(), found }),
        }
        self.mount_and_check(|top| match VolumeMarker::read_from(top).map_err(VolumeError::Finish)? {
            VolumeMarker::Complete => Ok(()),
            VolumeMarker::Unfinished | VolumeMarker::Erasing => Err(VolumeError::Unfinished { path: path() }),
            VolumeMarker::Foreign { entries } => {
                Err(VolumeError::ForeignData { path: path(), found: VolumeContents::Files { entries } })
            }
        })
    }

    /// Mounts the volume and checks its contents; unmounts it again if the check fails.
    fn mount_and_check(
        &self,
        check: impl FnOnce(&Dir) -> Result<(), VolumeError>,
    ) -> Result<Dir, VolumeError> {
        let was_mounted = self.mounter.mount_info(&self.target).map_err(VolumeError::Mount)?.is_some();
        self.mounter
            .mount(&MountSpec::DATA, Some(&self.device_path), &self.target)
            .map_err(VolumeError::Mount)?;
        let checked = Dir::open(&self.target).map_err(VolumeError::Finish).and_then(|top| {
            check(&top)?;
            Ok(top)
        });
        // The first error is the useful one. If the unmount fails, the next attempt finds the volume mounted.
        if checked.is_err() && !was_mounted {
            let _ = self.mounter.unmount(&self.target);
        }
        checked
    }

    /// Whether an earlier incarnation has mounted it and was killed.
    fn is_mounted(&self, disk: &Disk) -> Result<bool, VolumeError> {
        let mounted = self.mounter.mount_info(&self.target).map_err(VolumeError::Mount)?;
        let device = disk.device_numbers()?;
        Ok(mounted.is_some_and(|info| info.matches_spec(&MountSpec::DATA, device)))
    }

    /// The path of the device.
    pub fn device_path(&self) -> &Path {
        &self.device_path
    }
}

/// The first step of creating a volume.
#[derive(Debug, PartialEq, Eq)]
enum CreationStep {
    /// The file system is ours: complete it.
    Finish,
    /// The disk is blank, or its contents may be erased.
    Format {
        /// Whether mkfs.xfs overwrites contents that it recognizes.
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
        VolumeContents::Interrupted => CreationStep::Format { force: true },
        found if *erase == ErasePolicy::Exactly(found.clone()) => CreationStep::Format { force: true },
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
        self.lifecycle.unmount(|| self.mounter.unmount(&self.target).map_err(VolumeError::Mount))
    }

    fn state(&self) -> MountState {
        self.lifecycle.state()
    }
}
