//! A disk: probed, claimed and formatted.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::fs::{Advice, FlockOperation, OFlags, fadvise, flock};
use rustix::io::{Errno, retry_on_intr};

use super::claim::{DiskClaim, SECTOR_BYTES, claim_offset, encode_claim};
use super::digest::{ContentsDigest, DigestScope};
use super::filesystem::{MountSource, XfsFormat};
use super::holders::describe_users;
use super::identity::{DiskIdentity, device_numbers};
use super::places::{self, identify_block};
#[cfg(feature = "luks")]
use super::probe::has_only_claimed_data;
use super::probe::{VolumeContents, is_unchanged_but_for_claim, probe_with_readahead};
use super::reading::{DiskContents, DiskReader};
use super::uuid::Uuid;
use super::{ErasePolicy, VolumeError};
use crate::syscalls;

/// The unit of direct reads, a multiple of every sector size. The offset of a claim is a multiple of it.
const DIRECT_BYTES: usize = 4096;

/// An open disk with an advisory lock: udev does not probe it while it is open.
///
/// *Source:* systemd, "Locking Block Device Access".
#[derive(Debug)]
pub(super) struct Disk {
    path: PathBuf,
    file: File,
    size: u64,
    identity: DiskIdentity,
}

/// The disk of a volume, by its path.
#[derive(Clone, Debug)]
pub(super) struct VolumeDevice {
    pub(super) path: PathBuf,
    /// The disk that has to be at this path; none for any.
    pub(super) identity: Option<DiskIdentity>,
}

impl VolumeDevice {
    pub(super) fn new(path: PathBuf) -> VolumeDevice {
        VolumeDevice { path, identity: None }
    }

    pub(super) fn open(&self, access: DiskAccess) -> Result<Disk, VolumeError> {
        let disk = Disk::open(&self.path, access)?;
        match &self.identity {
            Some(expected) if *expected != disk.identity => {
                Err(VolumeError::Replaced { path: self.path.clone() })
            }
            _ => Ok(disk),
        }
    }

    /// Reads the whole disk, if only that shows whether it is blank, and fails if it is not.
    pub(super) fn read_disk(&self, reading: DiskReader<'_>) -> Result<(), VolumeError> {
        let disk = self.open(DiskAccess::Read)?;
        let probed = disk.probe_contents()?;
        match disk.read_undecided(probed, &ErasePolicy::Nothing, reading)? {
            VolumeContents::Blank | VolumeContents::Interrupted => Ok(()),
            found => Err(VolumeError::Occupied { path: self.path.clone(), found }),
        }
    }
}

/// The longest wait for other holders of the lock. udev locks a disk while it probes it, which takes milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The access mode of a disk. udev probes a disk that was open for writing when it is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskAccess {
    Read,
    Write,
}

impl Disk {
    /// Opens a block device or a disk image.
    pub(super) fn open(path: &Path, access: DiskAccess) -> Result<Disk, VolumeError> {
        Disk::try_open(path, access).map_err(|(step, source)| device_error(step, path)(source))
    }

    /// Like [`open`](Self::open); fails with the step.
    pub(super) fn try_open(path: &Path, access: DiskAccess) -> Result<Disk, (&'static str, io::Error)> {
        let to_error = |source| ("open", source);
        let write = access == DiskAccess::Write;
        let file = OpenOptions::new().read(true).write(write).open(path).map_err(to_error)?;
        let kind = file.metadata().map_err(to_error)?.file_type();
        if !kind.is_block_device() && !kind.is_file() {
            return Err(to_error(io::Error::new(io::ErrorKind::InvalidInput, "not a block device")));
        }
        lock(&file).map_err(|source| ("lock", source))?;
        // The metadata of a block device have size 0: its end is found by a seek.
        let size = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(to_error)?;
        let identity = DiskIdentity::of(&file).map_err(|source| ("identify", source))?;
        Ok(Disk { path: path.to_owned(), file, size, identity })
    }

    pub(super) fn identity(&self) -> &DiskIdentity {
        &self.identity
    }

    /// The open file, for a program that inherits it.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The same disk, for a program that works longer than the lock is to be held.
    #[cfg(feature = "luks")]
    pub(super) fn reopen_unlocked(&self) -> Result<File, VolumeError> {
        let reopened = syscalls::reopen(&self.file, OFlags::RDWR).map(File::from);
        reopened.map_err(|errno| device_error("open", &self.path)(errno.into()))
    }

    /// Checks, after a program has used the open disk, that it is still the one that was opened.
    pub(super) fn check_identity(&self) -> Result<(), VolumeError> {
        let now = DiskIdentity::of(&self.file).map_err(device_error("identify", &self.path))?;
        if now == self.identity { Ok(()) } else { Err(VolumeError::Replaced { path: self.path.clone() }) }
    }

    /// The path to mount the disk by. The kernel shows it in its table of mounts, for all programs: it is that of the
    /// device, without links.
    pub(super) fn mount_source(&self) -> Result<MountSource, VolumeError> {
        let path =
            fs::read_link(syscalls::proc_path(self.as_fd())).map_err(device_error("find", &self.path))?;
        Ok(MountSource { path, device: self.device_numbers()? })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Writes bytes, and returns when they are on the disk.
    pub(super) fn write_durably(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        syscalls::write_at(&self.file, bytes, offset)?;
        Ok(syscalls::sync(&self.file)?)
    }

    pub(super) fn probe_contents(&self) -> Result<VolumeContents, VolumeError> {
        let readahead = |offsets: &[u64]| self.start_reading(offsets);
        let contents = probe_with_readahead(&mut &self.file, readahead)
            .map_err(device_error("probe the contents of", &self.path))?;
        Ok(contents.bound_to(&self.digested_identity()))
    }

    /// Reads the whole disk where the places that were probed decide nothing: no data was found there, or only what
    /// an interrupted format of a blank disk has written. Contents that the caller has agreed to erase decide
    /// already.
    pub(super) fn read_undecided(
        &self,
        found: VolumeContents,
        erase: &ErasePolicy,
        reading: DiskReader<'_>,
    ) -> Result<VolumeContents, VolumeError> {
        if *erase == ErasePolicy::Exactly(found.clone()) {
            return Ok(found);
        }
        let sector = self.read_claim_sector()?;
        let claim = DiskClaim::parse(&sector);
        let blank = match (&found, claim) {
            (VolumeContents::Unread { .. }, _) => VolumeContents::Blank,
            (VolumeContents::Interrupted, Some(claim)) if claim.erases_nothing() => {
                VolumeContents::Interrupted
            }
            _ => return Ok(found),
        };
        // Of a claim without its data, nothing is explained.
        let is_data = |_: u64, block: &[u8]| !claim.is_some_and(|claim| claim.explains_block(block));
        let read = self.read_whole(reading, b"blank", is_data)?;
        let Some(offset) = read.first_data else { return Ok(blank) };
        let start = offset / places::BLOCK_BYTES * places::BLOCK_BYTES;
        let mut block = vec![0; places::BLOCK_BYTES.min(self.size - start) as usize];
        self.file.read_exact_at(&mut block, start).map_err(device_error("read", &self.path))?;
        let digest =
            ContentsDigest::new(DigestScope::Read, &[&read.chain]).bound_to(&self.digested_identity());
        Ok(VolumeContents::Occupied { found: identify_block(start, &block).into_iter().collect(), digest })
    }

    /// Reads every byte of the disk, of which no other program gets exclusive use until then.
    fn read_whole(
        &self,
        reading: DiskReader<'_>,
        purpose: &[u8],
        is_data: impl Fn(u64, &[u8]) -> bool,
    ) -> Result<DiskContents, VolumeError> {
        // Past the cache: the disk is read at its speed, and the memory of the host is left to its programs.
        let flags = if self.is_image() { OFlags::RDONLY } else { OFlags::DIRECT | OFlags::EXCL };
        let disk = syscalls::reopen(&self.file, flags).map_err(|errno| self.exclusive_error(errno))?;
        let explain = |offset: u64, block: &mut [u8]| {
            if offset == self.claim_offset() && DiskClaim::parse(&block[..SECTOR_BYTES]).is_some() {
                block[..SECTOR_BYTES].fill(0);
            }
            is_data(offset, block)
        };
        let read = reading.read(&disk.into(), self.size, purpose, explain);
        read.map_err(device_error("read all of", &self.path))?
            .ok_or_else(|| VolumeError::ReadingCanceled { path: self.path.clone() })
    }

    /// The identity and the size, as they are part of a digest.
    fn digested_identity(&self) -> Vec<u8> {
        [self.identity.as_bytes(), &self.size.to_le_bytes()].concat()
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
        self.file
            .metadata()
            .map(|metadata| device_numbers(&metadata))
            .map_err(device_error("inspect", &self.path))
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
        let uuid = self.claim(format.label, erased)?;
        if let Err(error) = format.run_mkfs(self.as_fd(), &self.path, uuid) {
            self.release_unused_claim(erased);
            return Err(error);
        }
        self.check_identity()?;
        self.release_claim()
    }

    /// Claims the disk for a format, whose UUID this returns. An interrupted format has left a claim, which also
    /// names the contents to erase.
    pub(super) fn claim(&self, label: &str, erased: &VolumeContents) -> Result<Uuid, VolumeError> {
        self.check_unused()?;
        // The claim of an interrupted format stays: a new one would no longer name the contents to erase.
        let interrupted = if *erased == VolumeContents::Interrupted { self.claimed_uuid()? } else { None };
        let uuid = match interrupted {
            Some(uuid) => uuid,
            None => {
                let uuid = Uuid::new_v4()
                    .map_err(|errno| device_error("generate a UUID for", &self.path)(errno.into()))?;
                let claim = encode_claim(uuid, label, erased);
                self.write_claim_sector(&claim)
                    .map_err(device_error("write the marker of a started format to", &self.path))?;
                uuid
            }
        };
        self.check_claimed(erased)?;
        Ok(uuid)
    }

    /// The UUID in the claim; none if the disk has no claim.
    pub(super) fn claimed_uuid(&self) -> Result<Option<Uuid>, VolumeError> {
        Ok(DiskClaim::parse(&self.read_claim_sector()?).and_then(DiskClaim::uuid))
    }

    /// Returns whether the disk has a claim whose format erases contents.
    pub(super) fn is_claimed_to_erase(&self) -> Result<bool, VolumeError> {
        let sector = self.read_claim_sector()?;
        Ok(DiskClaim::parse(&sector).is_some_and(|claim| !claim.erases_nothing()))
    }

    /// Releases the claim if nothing was formatted. The error that led here is the useful one.
    pub(super) fn release_unused_claim(&self, erased: &VolumeContents) {
        let readahead = |offsets: &[u64]| self.start_reading(offsets);
        // A disk that can't be read keeps its claim: it may have half a file system.
        if is_unchanged_but_for_claim(&mut &self.file, erased, readahead).unwrap_or(false) {
            let _ = self.release_claim();
        }
    }

    /// Returns whether the disk holds only the remains of an interrupted LUKS format with this claim, which wrote
    /// before `end`. Behind that, the whole disk is read, unless the claim erases contents.
    #[cfg(feature = "luks")]
    pub(super) fn has_only_claimed_data(
        &self,
        uuid: Uuid,
        end: u64,
        reading: DiskReader<'_>,
    ) -> Result<bool, VolumeError> {
        let readahead = |offsets: &[u64]| self.start_reading(offsets);
        let is_claimed = has_only_claimed_data(&mut &self.file, uuid, end, readahead)
            .map_err(device_error("probe the contents of", &self.path))?;
        let sector = self.read_claim_sector()?;
        if !is_claimed || !DiskClaim::parse(&sector).is_some_and(DiskClaim::erases_nothing) {
            return Ok(is_claimed);
        }
        Ok(self.read_whole(reading, &end.to_le_bytes(), |offset, _| offset >= end)?.first_data.is_none())
    }

    /// The first bytes of the disk; fewer if it is smaller.
    #[cfg(feature = "luks")]
    pub(super) fn read_start(&self, length: u64) -> Result<Vec<u8>, VolumeError> {
        let mut bytes = vec![0; length.min(self.size) as usize];
        self.file.read_exact_at(&mut bytes, 0).map_err(device_error("read", &self.path))?;
        Ok(bytes)
    }

    /// The size, in bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Returns whether it is a file, not a block device.
    pub(super) fn is_image(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.is_file())
    }

    /// Checks again, right before the first byte of the file system, that the caller has agreed to erase the contents:
    /// another program may have written since the disk was probed. A disk that was blank is then left as that program
    /// left it.
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

    pub(super) fn release_claim(&self) -> Result<(), VolumeError> {
        let sector = self.read_claim_past_cache()?;
        // mkfs.xfs and luksFormat do not write to the sector of the claim, but an earlier release wiped an authenticated
        // volume within its format: if that was cut off, no claim may be left to remove, and the sector has data.
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

    /// The sector of the claim as it is on the disk. The page cache of the disk still has the claim after
    /// device-mapper has written over it.
    fn read_claim_past_cache(&self) -> Result<[u8; SECTOR_BYTES], VolumeError> {
        if !self.file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device()) {
            return self.read_claim_sector();
        }
        let to_error = |source| device_error("read", &self.path)(source);
        let direct: File =
            syscalls::reopen(&self.file, OFlags::DIRECT).map_err(|errno| to_error(errno.into()))?.into();
        // Direct reads need aligned memory.
        let mut buffer = vec![0; 2 * DIRECT_BYTES];
        let start = buffer.as_ptr().align_offset(DIRECT_BYTES);
        let block = &mut buffer[start..start + DIRECT_BYTES];
        direct.read_exact_at(block, self.claim_offset()).map_err(to_error)?;
        let mut sector = [0; SECTOR_BYTES];
        sector.copy_from_slice(&block[..SECTOR_BYTES]);
        Ok(sector)
    }

    fn write_claim_sector(&self, sector: &[u8; SECTOR_BYTES]) -> io::Result<()> {
        self.write_durably(self.claim_offset(), sector)
    }

    /// Checks that the disk is neither mounted nor part of another device. *Source:* open(2), `O_EXCL`.
    pub(super) fn check_unused(&self) -> Result<(), VolumeError> {
        let exclusive = syscalls::reopen(&self.file, OFlags::EXCL);
        exclusive.map(drop).map_err(|errno| self.exclusive_error(errno))
    }

    /// The mounts and devices that use it, for people; none if the kernel names nobody.
    pub(super) fn describe_users(&self) -> Option<String> {
        describe_users(&self.file).ok().flatten()
    }

    /// The error names who uses a disk that is in use.
    fn exclusive_error(&self, errno: Errno) -> VolumeError {
        match self.describe_users().filter(|_| errno == Errno::BUSY) {
            Some(users) => VolumeError::InUse { path: self.path.clone(), users },
            None => device_error("get exclusive use of", &self.path)(errno.into()),
        }
    }
}

/// Unlocks at once. Closing alone would not: a child that another thread is starting has the descriptor until
/// it executes its program, and the lock with it.
impl Drop for Disk {
    fn drop(&mut self) {
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

fn lock(file: &File) -> io::Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {}
        done => return Ok(done?),
    }
    // flock(2) has no timeout. A thread that waits in vain has the only descriptor in the end, and so releases the
    // lock as soon as it gets it.
    let waiting = file.try_clone()?;
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(retry_on_intr(|| flock(&waiting, FlockOperation::LockExclusive))));
    match receiver.recv_timeout(LOCK_TIMEOUT) {
        Ok(done) => Ok(done?),
        Err(_) => Err(io::Error::new(
            io::ErrorKind::WouldBlock,
            "another operation or process has locked it: wait for it, or stop the process that lslocks names",
        )),
    }
}

fn device_error(step: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
    move |source| VolumeError::Device { step, path: path.to_owned(), source }
}
