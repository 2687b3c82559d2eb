//! The bytes of a disk: looked at, claimed, formatted.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::VolumeError;
use super::probe::{Contents, SECTOR, claim, claim_offset, claimed, is_claim, probe};
use super::uuid::Uuid;

/// A disk that is held open, and locked against others that keep to locks: udev doesn't probe it meanwhile.
///
/// *Source:* systemd, "Locking Block Device Access".
#[derive(Debug)]
pub(super) struct Disk {
    path: PathBuf,
    file: File,
    size: u64,
}

/// What a disk is opened for. One that was written to is probed by udev when it is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

impl Disk {
    /// Opens a block device, or the image of one.
    pub(super) fn open(path: &Path, access: Access) -> Result<Disk, VolumeError> {
        let wrong = |source| failed("open", path)(source);
        let write = access == Access::Write;
        let file = OpenOptions::new().read(true).write(write).open(path).map_err(wrong)?;
        let kind = file.metadata().map_err(wrong)?.file_type();
        if !kind.is_block_device() && !kind.is_file() {
            return Err(wrong(io::Error::new(io::ErrorKind::InvalidInput, "it is no block device")));
        }
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|errno| wrong(errno.into()))?;
        let size = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(wrong)?;
        Ok(Disk { path: path.to_owned(), file, size })
    }

    pub(super) fn contents(&self) -> Result<Contents, VolumeError> {
        probe(&mut &self.file).map_err(failed("probe", &self.path))
    }

    /// Major and minor number, if it is a device.
    pub(super) fn device(&self) -> Result<Option<(u32, u32)>, VolumeError> {
        let metadata = self.file.metadata().map_err(failed("inspect", &self.path))?;
        let device = metadata.rdev();
        let numbers = (rustix::fs::major(device), rustix::fs::minor(device));
        Ok(metadata.file_type().is_block_device().then_some(numbers))
    }

    /// Formats it as XFS, so that being killed at any point is known for what it is.
    ///
    /// A claim is on the disk before the first byte of a file system, and leaves it after the last one. While it is
    /// there, nothing can have been stored in what it is about: that is formatted anew.
    pub(super) fn format(&self, format: &Format<'_>, given_up: &Contents) -> Result<(), VolumeError> {
        self.check_unused()?;
        // An interrupted format has left one, which also names what it was allowed to erase.
        let uuid = match *given_up == Contents::Interrupted {
            true => claimed(&self.read_sector()?),
            false => None,
        };
        let uuid = match uuid {
            Some(uuid) => uuid,
            None => {
                let uuid = Uuid::random().map_err(|errno| failed("name", &self.path)(errno.into()))?;
                let claim = claim(uuid, format.label, given_up);
                self.write_sector(&claim).map_err(failed("claim", &self.path))?;
                uuid
            }
        };
        format.run(&self.path, uuid)?;
        let sector = self.read_sector()?;
        // It lies in what mkfs.xfs leaves free; should that change one day, there is nothing to take away.
        if is_claim(&sector) {
            self.write_sector(&[0; SECTOR]).map_err(failed("release", &self.path))?;
        }
        Ok(())
    }

    fn claim_offset(&self) -> u64 {
        claim_offset(self.size)
    }

    fn read_sector(&self) -> Result<[u8; SECTOR], VolumeError> {
        let mut sector = [0; SECTOR];
        self.file.read_exact_at(&mut sector, self.claim_offset()).map_err(failed("read", &self.path))?;
        Ok(sector)
    }

    fn write_sector(&self, sector: &[u8; SECTOR]) -> io::Result<()> {
        self.file.write_all_at(sector, self.claim_offset())?;
        self.file.sync_all()
    }

    /// Nothing on it is mounted, and no other device is made of it. *Source:* open(2), `O_EXCL`.
    fn check_unused(&self) -> Result<(), VolumeError> {
        let flags = OFlags::EXCL.bits().cast_signed();
        let exclusive = OpenOptions::new().read(true).custom_flags(flags).open(&self.path);
        exclusive.map(drop).map_err(failed("open for itself", &self.path))
    }
}

/// Unlocks at once. Closing alone would not: a child that another thread is starting has the descriptor until it
/// executes its program, and the lock with it.
impl Drop for Disk {
    fn drop(&mut self) {
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

fn failed(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
    move |source| VolumeError::Device { step, path: path.to_owned(), source }
}

/// How a disk is formatted.
#[derive(Debug)]
pub(super) struct Format<'a> {
    pub(super) mkfs: &'a Path,
    pub(super) label: &'a str,
    /// Whether what mkfs.xfs itself recognizes on the disk may go.
    pub(super) force: bool,
}

impl Format<'_> {
    /// Runs mkfs.xfs, without a shell.
    fn run(&self, disk: &Path, uuid: Uuid) -> Result<(), VolumeError> {
        // -K: what lies on the disk is not discarded first, which takes minutes on some and fails on others.
        let mut command = Command::new(self.mkfs);
        command.args(["-q", "-K", "-L", self.label, "-m"]).arg(format!("uuid={uuid}"));
        command.args(self.force.then_some("-f")).arg("--").arg(disk);
        command.env("LC_ALL", "C").stdin(Stdio::null());
        let wrong = |source, stderr| VolumeError::Format { path: disk.to_owned(), stderr, source };
        let output = command.output().map_err(|source| wrong(source, String::new()))?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
        Err(wrong(io::Error::other(format!("{} ended with {}", self.mkfs.display(), output.status)), stderr))
    }
}
