//! Gives files to free loop devices.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::loops::{LoopDevice, device_path, open_device, open_file, path_error};
use super::sys;

const CONTROL: &str = "/dev/loop-control";

/// Bytes of a sector, where nothing else is known.
const SECTOR: u32 = 512;

/// How often another process may be faster to use the device that was free.
const ATTEMPTS: u32 = 64;

/// How a file becomes a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LoopOptions {
    /// The device can't be written.
    pub(crate) read_only: bool,
    /// The kernel detaches the file once nobody uses the device.
    pub(crate) autoclear: bool,
    /// Bytes of a block of the device; `None`: those of the disk that the file is on, whatever the kernel would choose. It
    /// chooses 512 before Linux 6.14, and then by whether the file shares blocks.
    pub(crate) block_size: Option<u32>,
}

/// Attaches a file to a free device, with direct IO where the file's disk can do that.
///
/// # Errors
/// The kernel's error: loop devices are not available, or the caller is not root.
pub(crate) fn attach(file: BorrowedFd<'_>, options: LoopOptions) -> io::Result<LoopDevice> {
    let control =
        open_file(Path::new(CONTROL), OFlags::RDWR).map_err(|errno| path_error(Path::new(CONTROL), errno))?;
    for _ in 0..ATTEMPTS {
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
    match sys::configure(device.as_fd(), file, block_size, status) {
        // The kernel of some systems mounts no device that is open for writing: this one is not, and keeps the file when
        // the other is closed.
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
    Ok(sizes.into_iter().flatten().next().unwrap_or(SECTOR))
}

fn is_busy(error: &io::Error) -> bool {
    let codes = [Errno::BUSY, Errno::NXIO].map(Errno::raw_os_error);
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// What `losetup` shows of the file: the volume is the name of its directory.
pub(super) fn file_name(file: BorrowedFd<'_>) -> [u8; 64] {
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    let directory = path.parent().and_then(Path::file_name).unwrap_or_default();
    let mut name = [0; 64];
    // The last byte stays NUL.
    name.iter_mut().take(63).zip(directory.as_bytes()).for_each(|(to, byte)| *to = *byte);
    name
}
