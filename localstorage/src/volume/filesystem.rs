//! The file system of a volume: XFS with project quotas, on a device that is known to be fresh.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::VolumeError;
use super::identity::device_numbers;
use super::uuid::Uuid;
use crate::dir::Dir;
use crate::mount::{MountInfo, MountSpec, Mounter};
use crate::sys;

/// The label of a volume, unless the caller chooses another.
pub(super) const DEFAULT_LABEL: &str = "nodekeel";

/// The longest label of an XFS, in bytes. *Source:* `XFSLABEL_MAX` in Linux `xfs_format.h`.
const MAX_LABEL_BYTES: usize = 12;

/// A label that XFS accepts: other characters are replaced by dashes, and longer labels are truncated. None if
/// nothing remains.
pub(super) fn clean_label(label: &str) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let plain: String =
        label.chars().map(|c| if is_plain(c) { c } else { '-' }).take(MAX_LABEL_BYTES).collect();
    (!plain.is_empty()).then_some(plain)
}

/// The parameters of a format.
#[derive(Debug)]
pub(super) struct XfsFormat<'a> {
    pub(super) mkfs: &'a Path,
    pub(super) label: &'a str,
    /// True if mkfs.xfs may overwrite contents that it recognizes.
    pub(super) force: bool,
}

impl XfsFormat<'_> {
    /// Runs mkfs.xfs, without a shell, on an open device. Its path is for errors alone.
    pub(super) fn run_mkfs(
        &self,
        device: BorrowedFd<'_>,
        path: &Path,
        uuid: Uuid,
    ) -> Result<(), VolumeError> {
        // -K: do not discard the blocks first, which takes minutes on some disks and fails on others.
        let mut command = Command::new(self.mkfs);
        command.args(["-q", "-K", "-L", self.label, "-m"]).arg(format!("uuid={uuid}"));
        let inherited = sys::inherit(&mut command, device);
        command.args(self.force.then_some("-f")).arg("--").arg(inherited);
        run_xfs_program(command, |stderr, source| VolumeError::Format {
            path: path.to_owned(),
            stderr,
            source,
        })
    }
}

/// Runs a program of xfsprogs.
fn run_xfs_program(
    mut command: Command,
    to_error: impl Fn(String, io::Error) -> VolumeError,
) -> Result<(), VolumeError> {
    let program = command.get_program().to_owned();
    let program = Path::new(&program).display();
    command.env("LC_ALL", "C").stdin(Stdio::null());
    let output = command.output().map_err(|source| {
        let text = format!("can't run {program}: {source}; install xfsprogs");
        to_error(String::new(), io::Error::new(source.kind(), text))
    })?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(to_error(
        first_meaningful_line(&stderr).to_owned(),
        io::Error::other(format!("{program} failed with {}", output.status)),
    ))
}

/// The first line of an error output. The usage text that mkfs.xfs prints after some errors explains nothing.
fn first_meaningful_line(stderr: &str) -> &str {
    stderr
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with("Usage:"))
        .unwrap_or_default()
}

/// A device to mount.
#[derive(Debug)]
pub(super) struct MountSource {
    pub(super) path: PathBuf,
    /// The numbers of the device that has to be mounted; none for an image.
    pub(super) device: Option<(u32, u32)>,
}

impl MountSource {
    /// Checks that the path is still that of the device.
    fn check(&self) -> Result<(), VolumeError> {
        let metadata = fs::metadata(&self.path);
        match metadata.map(|metadata| device_numbers(&metadata)) {
            Ok(found) if found == self.device => Ok(()),
            _ => Err(self.replaced()),
        }
    }

    fn replaced(&self) -> VolumeError {
        VolumeError::Replaced { path: self.path.clone() }
    }
}

/// The mount point of a volume, and its mounter.
#[derive(Debug)]
pub(super) struct VolumeMount {
    pub(super) target: PathBuf,
    pub(super) mounter: Arc<dyn Mounter>,
}

impl VolumeMount {
    /// Mounts the device and checks its contents; unmounts it again if the check fails.
    pub(super) fn mount_and_check(
        &self,
        source: &MountSource,
        check: impl FnOnce(&Dir) -> Result<(), VolumeError>,
    ) -> Result<Dir, VolumeError> {
        // A failed check does not undo a mount that another call has made.
        let was_mounted = self.info()?.is_some();
        source.check()?;
        self.mounter.mount(&MountSpec::DATA, Some(&source.path), &self.target).map_err(VolumeError::Mount)?;
        let checked = Dir::open(&self.target).map_err(VolumeError::Finish).and_then(|top| {
            // The name may have become that of another device after the check.
            if source.device.is_some() && !self.is_mounted_from(source.device)? {
                return Err(source.replaced());
            }
            check(&top)?;
            Ok(top)
        });
        // The first error is the useful one. If the unmount fails, the next attempt finds the volume mounted.
        if checked.is_err() && !was_mounted {
            let _ = self.mounter.unmount(&self.target);
        }
        checked
    }

    pub(super) fn unmount(&self) -> Result<(), VolumeError> {
        self.mounter.unmount(&self.target).map_err(VolumeError::Mount)
    }

    pub(super) fn info(&self) -> Result<Option<MountInfo>, VolumeError> {
        self.mounter.mount_info(&self.target).map_err(VolumeError::Mount)
    }

    /// Returns whether this device is mounted there as a volume.
    pub(super) fn is_mounted_from(&self, device: Option<(u32, u32)>) -> Result<bool, VolumeError> {
        Ok(self.info()?.is_some_and(|info| info.matches_but_flags(&MountSpec::DATA, device)))
    }

    /// Grows the mounted file system to the size of its device, by the program in the directory of this mkfs.xfs.
    pub(super) fn grow_file_system(&self, mkfs: &Path) -> Result<(), VolumeError> {
        let top = Dir::open(&self.target).map_err(VolumeError::Finish)?;
        let mut command = Command::new(mkfs.with_file_name("xfs_growfs"));
        let inherited = sys::inherit(&mut command, top.as_fd());
        command.arg("-d").arg("--").arg(inherited);
        run_xfs_program(command, |stderr, source| VolumeError::Grow {
            path: self.target.clone(),
            stderr,
            source,
        })
    }
}
