//! A disk: probed, claimed and formatted.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Advice, FlockOperation, OFlags, fadvise, flock};

use super::VolumeError;
use super::claim::{DiskClaim, SECTOR_BYTES, claim_offset, encode_claim};
use super::places;
use super::probe::{VolumeContents, is_unchanged_but_for_claim, probe_with_readahead};
use super::uuid::Uuid;

/// An open disk with an advisory lock: udev does not probe it meanwhile.
///
/// *Source:* systemd, "Locking Block Device Access".
#[derive(Debug)]
pub(super) struct Disk {
    path: PathBuf,
    file: File,
    size: u64,
}

/// The access mode of a disk. udev probes a disk that was open for writing when it is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskAccess {
    Read,
    Write,
}

impl Disk {
    /// Opens a block device or a disk image.
    pub(super) fn open(path: &Path, access: DiskAccess) -> Result<Disk, VolumeError> {
        let to_error = |source| device_error("open", path)(source);
        let write = access == DiskAccess::Write;
        let file = OpenOptions::new().read(true).write(write).open(path).map_err(to_error)?;
        let kind = file.metadata().map_err(to_error)?.file_type();
        if !kind.is_block_device() && !kind.is_file() {
            return Err(to_error(io::Error::new(io::ErrorKind::InvalidInput, "not a block device")));
        }
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|errno| to_error(errno.into()))?;
        let size = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(to_error)?;
        Ok(Disk { path: path.to_owned(), file, size })
    }

    pub(super) fn probe_contents(&self) -> Result<VolumeContents, VolumeError> {
        let readahead = |offsets: &[u64]| self.start_reading(offsets);
        probe_with_readahead(&mut &self.file, readahead)
            .map_err(device_error("probe the contents of", &self.path))
    }

    /// Starts to read blocks, so that the disk works on many of them at a time, in the best order. A failure
    /// shows when they are read.
    fn start_reading(&self, offsets: &[u64]) {
        for offset in offsets {
            let _ = fadvise(&self.file, *offset, NonZeroU64::new(places::BLOCK_BYTES), Advice::WillNeed);
        }
    }

    /// The major and minor number, if it is a device.
    pub(super) fn device_numbers(&self) -> Result<Option<(u32, u32)>, VolumeError> {
        let metadata = self.file.metadata().map_err(device_error("inspect", &self.path))?;
        let device = metadata.rdev();
        let numbers = (rustix::fs::major(device), rustix::fs::minor(device));
        Ok(metadata.file_type().is_block_device().then_some(numbers))
    }

    /// Formats the disk as XFS, so that an interrupted format is detected.
    ///
    /// The claim is written before the first byte of the file system, and removed after the last one. While
    /// it is present, the file system cannot contain data: it is formatted again. A format that failed before
    /// it wrote anything leaves no claim, which would cover what another program writes later.
    pub(super) fn format_xfs(
        &self,
        format: &XfsFormat<'_>,
        erased: &VolumeContents,
    ) -> Result<(), VolumeError> {
        self.check_unused()?;
        // An interrupted format has left a claim, which also names the contents to erase.
        let uuid = match *erased == VolumeContents::Interrupted {
            true => DiskClaim::parse(&self.read_claim_sector()?).and_then(DiskClaim::uuid),
            false => None,
        };
        let uuid = match uuid {
            Some(uuid) => uuid,
            None => {
                let uuid = Uuid::new_v4()
                    .map_err(|errno| device_error("generate a UUID for", &self.path)(errno.into()))?;
                let claim = encode_claim(uuid, format.label, erased);
                self.write_claim_sector(&claim)
                    .map_err(device_error("write the marker of a started format to", &self.path))?;
                uuid
            }
        };
        self.check_claimed(erased)?;
        if let Err(error) = format.run_mkfs(&self.path, uuid) {
            let readahead = |offsets: &[u64]| self.start_reading(offsets);
            if is_unchanged_but_for_claim(&mut &self.file, erased, readahead).unwrap_or(false) {
                // The first error is the useful one.
                let _ = self.release_claim();
            }
            return Err(error);
        }
        self.release_claim()
    }

    /// Decides again, right before the first byte of the file system, that nothing is erased to which nobody has
    /// agreed: another program may have written since the disk was probed. A disk that was blank is then left
    /// as that program left it.
    fn check_claimed(&self, erased: &VolumeContents) -> Result<(), VolumeError> {
        if !matches!(erased, VolumeContents::Blank | VolumeContents::Interrupted) {
            return Ok(());
        }
        let found = self.probe_contents()?;
        if found == VolumeContents::Interrupted {
            return Ok(());
        }
        if *erased == VolumeContents::Blank {
            self.release_claim()?;
        }
        Err(VolumeError::Occupied { path: self.path.clone(), found })
    }

    fn release_claim(&self) -> Result<(), VolumeError> {
        let sector = self.read_claim_sector()?;
        // mkfs.xfs does not write to the sector of the claim. Should that change, no claim is left to remove.
        if DiskClaim::parse(&sector).is_some() {
            self.write_claim_sector(&[0; SECTOR_BYTES])
                .map_err(device_error("clear the marker of a started format on", &self.path))?;
        }
        Ok(())
    }

    fn claim_offset(&self) -> u64 {
        claim_offset(self.size)
    }

    fn read_claim_sector(&self) -> Result<[u8; SECTOR_BYTES], VolumeError> {
        let mut sector = [0; SECTOR_BYTES];
        self.file
            .read_exact_at(&mut sector, self.claim_offset())
            .map_err(device_error("read", &self.path))?;
        Ok(sector)
    }

    fn write_claim_sector(&self, sector: &[u8; SECTOR_BYTES]) -> io::Result<()> {
        self.file.write_all_at(sector, self.claim_offset())?;
        self.file.sync_all()
    }

    /// Checks that the disk is neither mounted nor part of another device. *Source:* open(2), `O_EXCL`.
    fn check_unused(&self) -> Result<(), VolumeError> {
        let flags = OFlags::EXCL.bits().cast_signed();
        let exclusive = OpenOptions::new().read(true).custom_flags(flags).open(&self.path);
        exclusive.map(drop).map_err(device_error("get exclusive use of", &self.path))
    }
}

/// Unlocks at once. Closing alone would not: a child that another thread is starting has the descriptor until
/// it executes its program, and the lock with it.
impl Drop for Disk {
    fn drop(&mut self) {
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

fn device_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
    move |source| VolumeError::Device { step, path: path.to_owned(), source }
}

/// The parameters of a format.
#[derive(Debug)]
pub(super) struct XfsFormat<'a> {
    pub(super) mkfs: &'a Path,
    pub(super) label: &'a str,
    /// Whether mkfs.xfs may overwrite contents that it recognizes.
    pub(super) force: bool,
}

impl XfsFormat<'_> {
    /// Runs mkfs.xfs, without a shell.
    fn run_mkfs(&self, disk: &Path, uuid: Uuid) -> Result<(), VolumeError> {
        // -K: do not discard the blocks first, which takes minutes on some disks and fails on others.
        let mut command = Command::new(self.mkfs);
        command.args(["-q", "-K", "-L", self.label, "-m"]).arg(format!("uuid={uuid}"));
        command.args(self.force.then_some("-f")).arg("--").arg(disk);
        command.env("LC_ALL", "C").stdin(Stdio::null());
        let to_error = |source, stderr| VolumeError::Format { path: disk.to_owned(), stderr, source };
        let output = command.output().map_err(|source| {
            let text = format!("can't run {}: {source}; install xfsprogs", self.mkfs.display());
            to_error(io::Error::new(source.kind(), text), String::new())
        })?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        Err(to_error(
            io::Error::other(format!("{} failed with {}", self.mkfs.display(), output.status)),
            first_meaningful_line(&stderr).to_owned(),
        ))
    }
}

/// The first line of an error output. The usage text that mkfs.xfs prints behind some errors helps nobody.
fn first_meaningful_line(stderr: &str) -> &str {
    stderr
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with("Usage:"))
        .unwrap_or_default()
}
