//! Loop devices: block devices whose content is a file.
//!
//! Nothing of them is kept in memory: the kernel knows which device has which file, so that all are found again after a
//! restart.
//!
//! *Source:* loop(4); Linux `drivers/block/loop.c`.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nodekeel_localstorage::mount::{MountEntry, mount_table};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use super::{mounts, sys};

/// All block devices, each with a directory or a link.
const BLOCK_DEVICES: &str = "/sys/block";

/// The major device number. *Source:* `LOOP_MAJOR` in Linux `include/uapi/linux/major.h`.
const LOOP_MAJOR: u32 = 7;

/// Time for which a detached file may keep its device because a process looks at it, and interval of the checks.
const DETACH_WITHIN: Duration = Duration::from_millis(500);
const DETACH_INTERVAL: Duration = Duration::from_millis(2);

const CONTROL: &str = "/dev/loop-control";

/// Bytes of a sector, where nothing else is known.
const SECTOR_BYTES: u32 = 512;

/// Number of free devices that are tried: another process may be faster to use one.
const ATTACH_ATTEMPTS: u32 = 64;

/// The file of a device, as `stat` identifies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackingFile {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl BackingFile {
    fn from_fd(file: BorrowedFd<'_>) -> io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// The major and minor number of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceNumbers {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl DeviceNumbers {
    /// Returns whether they are those of a loop device.
    pub(crate) fn is_loop(self) -> bool {
        self.major == LOOP_MAJOR
    }

    fn of_node(stat: &Stat) -> Self {
        Self { major: rustix::fs::major(stat.st_rdev), minor: rustix::fs::minor(stat.st_rdev) }
    }
}

/// Options of a new loop device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoopOptions {
    /// The device can't be written.
    pub(crate) read_only: bool,
    /// The kernel detaches the file once the device has no user.
    pub(crate) autoclear: bool,
    /// Bytes of a block of the device; `None`: those of the disk that the file is on, and not the kernel's choice. It
    /// chooses 512 before Linux 6.14, and then by whether the file shares blocks.
    pub(crate) block_size: Option<u32>,
}

/// A loop device with a file, open for reading. While it is open, it keeps its file.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    device: OwnedFd,
    numbers: DeviceNumbers,
    status: sys::LoopStatus,
}

impl LoopDevice {
    /// Opens the device with this number; `None` if it does not exist or has no file.
    fn open(number: u32) -> io::Result<Option<Self>> {
        let path = device_path(number);
        let opened = open_device(&path, OFlags::RDONLY);
        let device = match opened {
            // The device was removed after it was listed.
            Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => return Ok(None),
            opened => opened.map_err(|errno| path_error(&path, errno))?,
        };
        let stat = rustix::fs::fstat(&device)?;
        let numbers = DeviceNumbers::of_node(&stat);
        // In a container, the name may be that of another file, for which the ioctls mean something else.
        if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice || !numbers.is_loop() {
            return Err(other_device(&path));
        }
        match sys::read_status(device.as_fd()) {
            Ok(status) if status.number != number => Err(other_device(&path)),
            Ok(status) => Ok(Some(Self { device, numbers, status })),
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Opens the device with these device numbers; `None` if that is not a loop device, or has no file.
    pub(crate) fn open_numbers(numbers: DeviceNumbers) -> io::Result<Option<Self>> {
        let DeviceNumbers { major, minor } = numbers;
        if !numbers.is_loop() {
            return Ok(None);
        }
        // With partitions, the minor number is not that of the name.
        let link = match fs::read_link(format!("/sys/dev/block/{major}:{minor}")) {
            Ok(link) => link,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        link.file_name().and_then(loop_number).map_or(Ok(None), Self::open)
    }

    /// Path of its node below `/dev`.
    pub(crate) fn path(&self) -> PathBuf {
        device_path(self.status.number)
    }

    /// The file that it shows.
    pub(crate) fn backing_file(&self) -> BackingFile {
        BackingFile { device: decode_device(self.status.device), inode: self.status.inode }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.status.flags & sys::READ_ONLY != 0
    }

    /// Returns whether the kernel detaches the file once the device has no user.
    pub(crate) fn is_autoclear(&self) -> bool {
        self.status.flags & sys::AUTOCLEAR != 0
    }

    /// Returns whether it reads and writes the file without a second cache.
    pub(crate) fn has_direct_io(&self) -> bool {
        self.status.flags & sys::DIRECT_IO != 0
    }

    /// Returns whether it shows all of its file.
    pub(crate) fn is_complete(&self) -> bool {
        (self.status.offset, self.status.size_limit) == (0, 0)
    }

    /// The name that it was attached with.
    pub(crate) fn name(&self) -> String {
        let name = self.status.name.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(name).into_owned()
    }

    /// Size in bytes.
    pub(crate) fn size(&self) -> io::Result<u64> {
        Ok(rustix::fs::seek(&self.device, SeekFrom::End(0))?)
    }

    /// Keeps the file attached, also while the device has no user.
    pub(crate) fn keep_attached(&mut self) -> io::Result<()> {
        // A mount of the node is no user of the device: with autoclear, it loses its file when the last
        // descriptor is closed.
        if self.is_autoclear() {
            let flags = self.status.flags & !sys::AUTOCLEAR;
            sys::set_status(self.device.as_fd(), sys::LoopStatus::to_set(flags, self.status.name))?;
            self.status.flags = flags;
        }
        Ok(())
    }

    /// Gives it the size of its file, if that has grown.
    pub(crate) fn grow(&self) -> io::Result<()> {
        sys::update_size(self.device.as_fd())
    }

    /// Detaches the file: at once, or when the last user closes the device. Waits for a user that only looks at it,
    /// such as another thread that looks for the device of its file, and not for one that keeps it open.
    pub(crate) fn detach(self) -> io::Result<()> {
        let number = self.status.number;
        match sys::clear(self.device.as_fd()) {
            Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => return Ok(()),
            done => done?,
        }
        // This descriptor is a user, too, for which the kernel may keep the file.
        drop(self);
        let deadline = Instant::now() + DETACH_WITHIN;
        while is_attached(number) && Instant::now() < deadline {
            thread::park_timeout(DETACH_INTERVAL);
        }
        Ok(())
    }

    /// Writes its cache into the file, and makes the file durable.
    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.device)?)
    }

    /// Opens the node itself, to mount it.
    pub(crate) fn open_node(&self) -> io::Result<OwnedFd> {
        let node = open_device(&self.path(), OFlags::PATH)?;
        let stat = rustix::fs::fstat(&node)?;
        if DeviceNumbers::of_node(&stat) != self.numbers {
            return Err(other_device(&self.path()));
        }
        Ok(node)
    }

    /// Returns whether a mount is one of the file system on this device.
    pub(crate) fn is_source_of(&self, mount: &MountEntry) -> bool {
        mount.info.device == (self.numbers.major, self.numbers.minor)
    }

    /// Returns whether a mount can be one of its node: by the node's name, which is that of the device in each
    /// directory of devices.
    pub(crate) fn may_be_node_of(&self, mount: &MountEntry) -> bool {
        mount.root.file_name() == self.path().file_name()
    }
}

impl AsFd for LoopDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

/// Attaches a file to a free device, with direct IO where the file's disk can do that.
///
/// # Errors
/// The kernel's error: loop devices are not available, or the caller is not root.
pub(crate) fn attach(file: BorrowedFd<'_>, options: LoopOptions) -> io::Result<LoopDevice> {
    let control =
        open_file(Path::new(CONTROL), OFlags::RDWR).map_err(|errno| path_error(Path::new(CONTROL), errno))?;
    // `LOOP_CTL_GET_FREE` reserves nothing: another process may use the device first.
    for _ in 0..ATTACH_ATTEMPTS {
        let number = sys::find_free_device(control.as_fd())?;
        if let Some(device) = attach_to(number, file, options)? {
            if !device.has_direct_io() {
                tracing::info!(
                    volume = device.name(),
                    "no direct IO on this disk: data of the volume are cached twice"
                );
            }
            return Ok(device);
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "other processes use each free loop device first: retry"))
}

/// Attaches a file to this device; `None` if another process is faster.
fn attach_to(number: u32, file: BorrowedFd<'_>, options: LoopOptions) -> io::Result<Option<LoopDevice>> {
    let path = device_path(number);
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let device = open_device(&path, access).map_err(|errno| path_error(&path, errno))?;
    let flags = [(options.read_only, sys::READ_ONLY), (options.autoclear, sys::AUTOCLEAR)]
        .into_iter()
        .filter(|(is_set, _)| *is_set)
        .fold(sys::DIRECT_IO, |flags, (_, flag)| flags | flag);
    let status = sys::LoopStatus::to_set(flags, file_name(file));
    let block_size = options.block_size.map_or_else(|| disk_block_size(file), Ok)?;
    // The file, the flags and the name in one call: a kill leaves no device with the file and without its
    // name.
    match sys::configure(device.as_fd(), file, block_size, status) {
        // The kernel of some systems mounts no device that is open for writing: this one is not, and keeps the file
        // when the other is closed.
        Ok(()) => LoopDevice::open(number),
        Err(error) if is_busy(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Bytes of a block of the disk that a file is on; 512, which every kernel emulates, if it is not on one.
fn disk_block_size(file: BorrowedFd<'_>) -> io::Result<u32> {
    let device = rustix::fs::fstat(file)?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    // A partition has the queue of its disk, which is above it.
    let sizes = ["queue", "../queue"].map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/logical_block_size");
        fs::read_to_string(path).ok()?.trim().parse().ok()
    });
    Ok(sizes.into_iter().flatten().next().unwrap_or(SECTOR_BYTES))
}

fn is_busy(error: &io::Error) -> bool {
    let codes = [Errno::BUSY, Errno::NXIO].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// The name that `losetup` shows: the volume is the name of its directory.
fn file_name(file: BorrowedFd<'_>) -> [u8; 64] {
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    let directory = path.parent().and_then(Path::file_name).unwrap_or_default();
    let mut name = [0; 64];
    // The last byte stays NUL.
    name.iter_mut().take(63).zip(directory.as_bytes()).for_each(|(to, byte)| *to = *byte);
    name
}

/// All devices that have this file.
///
/// # Errors
/// A device can't be inspected: it may have the file.
pub(crate) fn find(file: BorrowedFd<'_>) -> io::Result<Vec<LoopDevice>> {
    let wanted = BackingFile::from_fd(file)?;
    let mut found = Vec::new();
    for number in attached_numbers()? {
        match LoopDevice::open(number) {
            // Of an ordinary user, none of them has the file: where the file of such a device is, all can read.
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied && has_other_file(number, wanted) => {}
            opened => found.extend(opened?.filter(|device| device.backing_file() == wanted)),
        }
    }
    Ok(found)
}

/// Returns whether the file at the path that the kernel shows of a device is another one.
fn has_other_file(number: u32, wanted: BackingFile) -> bool {
    let shown = fs::read(Path::new(BLOCK_DEVICES).join(format!("loop{number}/loop/backing_file")));
    let path = shown.as_ref().map(|path| OsStr::from_bytes(path.trim_ascii_end()));
    let stat = path.ok().and_then(|path| rustix::fs::stat(path).ok());
    stat.is_some_and(|stat| BackingFile { device: stat.st_dev, inode: stat.st_ino } != wanted)
}

/// The names of all devices that have a file.
///
/// # Errors
/// A device can't be inspected.
pub(crate) fn list_names() -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for number in attached_numbers()? {
        names.extend(LoopDevice::open(number)?.map(|device| device.name()));
    }
    Ok(names)
}

/// The numbers of all devices that have a file.
fn attached_numbers() -> io::Result<Vec<u32>> {
    let directory = Path::new(BLOCK_DEVICES);
    let mut numbers = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        numbers.extend(loop_number(&name).filter(|number| is_attached(*number)));
    }
    Ok(numbers)
}

/// Returns whether a device has a file: with it, the kernel creates this directory.
fn is_attached(number: u32) -> bool {
    Path::new(BLOCK_DEVICES).join(format!("loop{number}/loop")).exists()
}

/// Gives each device of a file the size that the file has now, and the file system that is mounted from it, too. It can
/// be repeated: a device that has the size stays as it is.
///
/// # Errors
/// A device or a file system can't grow. A retry can help.
pub(crate) fn grow_attached(file: BorrowedFd<'_>) -> io::Result<()> {
    for device in find(file)? {
        // The device first: its file system can't be larger.
        device.grow()?;
        if let Some(mount) = mounts::mount_again(&device, &mount_table()?)? {
            mount.grow_to(&device)?;
        }
    }
    Ok(())
}

/// Writes the caches of a file's devices, and of file systems that are mounted from them, into the file.
///
/// # Errors
/// The kernel's error.
pub(crate) fn sync_mounted(file: BorrowedFd<'_>) -> io::Result<()> {
    for device in find(file)? {
        // From the top down: what the file system writes is in the cache of the device then.
        if let Some(mount) = mounts::mount_again(&device, &mount_table()?)? {
            mount.sync()?;
        }
        device.sync()?;
    }
    Ok(())
}

/// Detaches a file from all devices that have it: a device in use when its last user closes it.
///
/// # Errors
/// The kernel's error.
pub(crate) fn detach_all(file: BorrowedFd<'_>) -> io::Result<()> {
    find(file)?.into_iter().try_for_each(LoopDevice::detach)
}

fn device_path(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

/// `loop7` is number 7; a partition of it is not a loop device.
fn loop_number(name: &OsStr) -> Option<u32> {
    let number = name.to_str()?.strip_prefix("loop")?;
    number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())?
}

/// *Source:* `huge_encode_dev` in Linux `include/linux/kdev_t.h`.
fn decode_device(encoded: u64) -> u64 {
    let (major, minor) = (encoded >> 8 & 0xfff, encoded & 0xff | encoded >> 12 & 0xf_ff00);
    let number = |part: u64| u32::try_from(part).unwrap_or_default();
    rustix::fs::makedev(number(major), number(minor))
}

fn open_device(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    open_file(path, flags | OFlags::NOFOLLOW)
}

fn open_file(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
}

fn path_error(path: &Path, errno: Errno) -> io::Error {
    let error = io::Error::from(errno);
    let text = format!(
        "can't open {}: {error}; load the module loop, and in a container, run privileged with the host's /dev",
        path.display()
    );
    io::Error::new(error.kind(), text)
}

fn other_device(path: &Path) -> io::Error {
    let text = format!(
        "{} is not the loop device of that number: in a container, mount the host's /dev",
        path.display()
    );
    io::Error::other(text)
}

#[cfg(test)]
#[path = "loops_test.rs"]
mod tests;
