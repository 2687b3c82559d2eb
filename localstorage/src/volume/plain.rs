//! A disk as a volume, as it is: XFS with project quotas, not encrypted.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::{Access, Disk, Format};
use super::lifecycle::Lifecycle;
use super::marker::Mark;
use super::{Contents, DataVolume, Erase, State, VolumeError};
use crate::dir::Dir;
use crate::mount::{MountSpec, Mounter};

/// Longest label of an XFS, in bytes. *Source:* `XFSLABEL_MAX` in Linux `xfs_format.h`.
const LABEL_MAX: usize = 12;

/// A disk, formatted as XFS and mounted with project quotas.
///
/// # What happens when
/// | What is on the disk | `mount_new` | `mount_existing` |
/// |---|---|---|
/// | nothing but zeros in the first 64 KiB, and no signature in the first and last MiB | claim, format, release, mount, mark | [`Absent`](VolumeError::Absent) |
/// | a claim of ours, and nothing but what it names: killed while formatting | formats again | [`Unfinished`](VolumeError::Unfinished) |
/// | an XFS with our label, without a file and without the mark: killed before the end | mount, mark | [`Unfinished`](VolumeError::Unfinished) |
/// | an XFS with our label and the mark | [`Occupied`](VolumeError::Occupied) | mounts |
/// | anything else | [`Occupied`](VolumeError::Occupied) | [`NotOurs`](VolumeError::NotOurs), and is not mounted |
/// | what can't be read | [`Device`](VolumeError::Device) | [`Device`](VolumeError::Device) |
///
/// The claim is one sector near the end of the disk, synced before the format begins: no other record is needed, and the
/// disk may be moved to another machine halfway. With [`Erase::Exactly`], what was there is given up from the claim on,
/// which names it, and so the file system that is to come, by their [marks](super::Signature::mark); what somebody else has
/// put on the disk since is not covered by it, also where it is of the same kind.
#[derive(Debug)]
pub struct Plain {
    device: PathBuf,
    target: PathBuf,
    mounter: Arc<dyn Mounter>,
    label: String,
    mkfs: PathBuf,
    lifecycle: Lifecycle,
}

impl Plain {
    /// A disk by its device, and where to mount it: an absolute path of a directory that is there.
    pub fn new(device: impl Into<PathBuf>, target: impl Into<PathBuf>, mounter: Arc<dyn Mounter>) -> Plain {
        Plain {
            device: device.into(),
            target: target.into(),
            mounter,
            label: "nodekeel".into(),
            mkfs: "mkfs.xfs".into(),
            lifecycle: Lifecycle::default(),
        }
    }

    /// With another label, by which the volume is known as ours: 1 to 12 bytes of ASCII letters, digits, dash and dot.
    /// A label of another form is cut and changed to one.
    pub fn with_label(self, label: &str) -> Plain {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        let plain: String =
            label.chars().map(|c| if is_plain(c) { c } else { '-' }).take(LABEL_MAX).collect();
        Plain { label: if plain.is_empty() { self.label } else { plain }, ..self }
    }

    /// With `mkfs.xfs` at this path, instead of the first in `PATH`.
    pub fn with_mkfs(self, mkfs: impl Into<PathBuf>) -> Plain {
        Plain { mkfs: mkfs.into(), ..self }
    }

    fn make(&self, erase: &Erase) -> Result<Dir, VolumeError> {
        let disk = Disk::open(&self.device, Access::Write)?;
        let found = disk.contents()?;
        let step = plan(&found, erase, &self.label, self.is_mounted(&disk)?);
        match step {
            Step::Refuse => return Err(VolumeError::Occupied { path: self.device.clone(), found }),
            Step::Format { force } => {
                disk.format(&Format { mkfs: &self.mkfs, label: &self.label, force }, &found)?;
            }
            Step::Finish => {}
        }
        drop(disk);
        self.mount(|top| match Mark::read(top).map_err(VolumeError::Finish)? {
            Mark::Unfinished => Mark::write(top).map_err(VolumeError::Finish),
            Mark::Complete | Mark::Erasing | Mark::Foreign { .. } => {
                Err(VolumeError::Occupied { path: self.device.clone(), found })
            }
        })
    }

    fn open(&self) -> Result<Dir, VolumeError> {
        let path = || self.device.clone();
        match Disk::open(&self.device, Access::Read)?.contents()? {
            Contents::Blank => return Err(VolumeError::Absent { path: path() }),
            Contents::Interrupted => return Err(VolumeError::Unfinished { path: path() }),
            Contents::Xfs { label, .. } if label == self.label => {}
            found => return Err(VolumeError::NotOurs { path: path(), found }),
        }
        self.mount(|top| match Mark::read(top).map_err(VolumeError::Finish)? {
            Mark::Complete => Ok(()),
            Mark::Unfinished | Mark::Erasing => Err(VolumeError::Unfinished { path: path() }),
            Mark::Foreign { entries } => {
                Err(VolumeError::NotOurs { path: path(), found: Contents::Files { entries } })
            }
        })
    }

    /// Mounts it and looks at what is on it; unmounts it again where that is not what it should be.
    fn mount(&self, check: impl FnOnce(&Dir) -> Result<(), VolumeError>) -> Result<Dir, VolumeError> {
        let was_mounted = self.mounter.mounted(&self.target).map_err(VolumeError::Mount)?.is_some();
        self.mounter.mount(&MountSpec::DATA, Some(&self.device), &self.target).map_err(VolumeError::Mount)?;
        let checked = Dir::open(&self.target).map_err(VolumeError::Finish).and_then(|top| {
            check(&top)?;
            Ok(top)
        });
        // The first error is the one to hear of. What could not be unmounted is found mounted by the next attempt.
        if checked.is_err() && !was_mounted {
            let _ = self.mounter.unmount(&self.target);
        }
        checked
    }

    /// Whether a run before this one has mounted it, and was killed.
    fn is_mounted(&self, disk: &Disk) -> Result<bool, VolumeError> {
        let is = self.mounter.mounted(&self.target).map_err(VolumeError::Mount)?;
        let device = disk.device()?;
        Ok(is.is_some_and(|is| is.is(&MountSpec::DATA, device)))
    }

    /// The device.
    pub fn device(&self) -> &Path {
        &self.device
    }
}

/// What making a new volume begins with.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// There is a file system of ours: see whether it was finished.
    Finish,
    /// There is nothing, or nothing that is to be kept.
    Format {
        /// Whether mkfs.xfs is told to overwrite what it recognizes.
        force: bool,
    },
    /// There is something.
    Refuse,
}

fn plan(found: &Contents, erase: &Erase, label: &str, is_mounted: bool) -> Step {
    match found {
        // Formatting under a mounted file system would destroy it twice.
        Contents::Xfs { label: is, .. } if is == label && is_mounted => Step::Finish,
        _ if is_mounted => Step::Refuse,
        Contents::Blank => Step::Format { force: false },
        Contents::Interrupted => Step::Format { force: true },
        found if *erase == Erase::Exactly(found.clone()) => Step::Format { force: true },
        Contents::Xfs { label: is, .. } if is == label => Step::Finish,
        _ => Step::Refuse,
    }
}

impl DataVolume for Plain {
    fn mount_new(&self, erase: Erase) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.make(&erase))
    }

    fn mount_existing(&self) -> Result<Dir, VolumeError> {
        self.lifecycle.mount(|| self.open())
    }

    fn unmount(&self) -> Result<(), VolumeError> {
        self.lifecycle.unmount(|| self.mounter.unmount(&self.target).map_err(VolumeError::Mount))
    }

    fn state(&self) -> State {
        self.lifecycle.state()
    }
}
