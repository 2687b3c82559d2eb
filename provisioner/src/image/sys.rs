//! The module's only unsafe code: ioctls that rustix does not wrap.
#![allow(unsafe_code, reason = "ioctls of loop devices and of file systems")]

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr;

use linux_raw_sys::loop_device as raw;
use rustix::io::Errno;
use rustix::ioctl::{Getter, Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl, opcode};

/// *Source:* `EXT4_IOC_RESIZE_FS` in Linux `include/uapi/linux/ext4.h`.
const EXT4_RESIZE_FS: Opcode = opcode::write::<u64>(b'f', 16);

/// *Source:* `XFS_IOC_FSGEOMETRY_V1` in Linux `fs/xfs/libxfs/xfs_fs.h`.
const XFS_FS_GEOMETRY: Opcode = opcode::read::<XfsGeometry>(b'X', 100);

/// *Source:* `XFS_IOC_FSGROWFSDATA`, as above.
const XFS_FS_GROW_DATA: Opcode = opcode::write::<XfsGrowth>(b'X', 110);

// The numbers contain the sizes of the structures. *Source:* as above, on a 64-bit machine.
const _: () = assert!(EXT4_RESIZE_FS == 0x4008_6610);
const _: () = assert!(XFS_FS_GEOMETRY == 0x8070_5864);
const _: () = assert!(XFS_FS_GROW_DATA == 0x4010_586e);

/// Settings and state of a loop device: the flags and the file of `loop_info64`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LoopStatus {
    /// The number in its name.
    pub(super) number: u32,
    /// The device number of the file's file system, as the kernel encodes it.
    pub(super) device: u64,
    /// The inode number of the file.
    pub(super) inode: u64,
    /// The part of the file: its first byte, and its size if that is limited.
    pub(super) offset: u64,
    pub(super) size_limit: u64,
    /// `LO_FLAGS_*`.
    pub(super) flags: u32,
    /// A name for people, padded by NUL.
    pub(super) name: [u8; raw::LO_NAME_SIZE as usize],
}

pub(super) const READ_ONLY: u32 = raw::LO_FLAGS_READ_ONLY as u32;
pub(super) const AUTOCLEAR: u32 = raw::LO_FLAGS_AUTOCLEAR as u32;
pub(super) const DIRECT_IO: u32 = raw::LO_FLAGS_DIRECT_IO as u32;

impl LoopStatus {
    /// A status to set: all of the file, with these flags and this name.
    pub(super) fn to_set(flags: u32, name: [u8; raw::LO_NAME_SIZE as usize]) -> Self {
        Self { number: 0, device: 0, inode: 0, offset: 0, size_limit: 0, flags, name }
    }

    fn to_raw(self) -> raw::loop_info64 {
        raw::loop_info64 {
            lo_device: 0,
            lo_inode: 0,
            lo_rdevice: 0,
            lo_offset: self.offset,
            lo_sizelimit: self.size_limit,
            lo_number: 0,
            lo_encrypt_type: 0,
            lo_encrypt_key_size: 0,
            lo_flags: self.flags,
            lo_file_name: self.name,
            lo_crypt_name: [0; 64],
            lo_encrypt_key: [0; 32],
            lo_init: [0; 2],
        }
    }
}

/// The number of a free loop device; the kernel adds one if none is free.
pub(super) fn find_free_device(control: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: the call takes no argument, and writes nothing.
    Ok(unsafe { ioctl(control, FreeDevice) }?)
}

/// `LOOP_CTL_GET_FREE`, whose result is the number.
struct FreeDevice;

// SAFETY: the call takes no argument: no memory is read or written.
unsafe impl Ioctl for FreeDevice {
    type Output = u32;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        raw::LOOP_CTL_GET_FREE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        ptr::null_mut()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<u32> {
        u32::try_from(out).map_err(|_| Errno::INVAL)
    }
}

/// Gives a free device this file.
pub(super) fn configure(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    block_size: u32,
    status: LoopStatus,
) -> io::Result<()> {
    let fd = u32::try_from(file.as_raw_fd()).map_err(|_| Errno::BADF)?;
    let config = raw::loop_config { fd, block_size, info: status.to_raw(), __reserved: [0; 8] };
    // SAFETY: the call reads a `loop_config`.
    Ok(unsafe { ioctl(device, Setter::<{ raw::LOOP_CONFIGURE }, _>::new(config)) }?)
}

/// # Errors
/// `ENXIO` if the device has no file.
pub(super) fn read_status(device: BorrowedFd<'_>) -> io::Result<LoopStatus> {
    // SAFETY: the call writes a `loop_info64`.
    let read = unsafe { ioctl(device, Getter::<{ raw::LOOP_GET_STATUS64 }, raw::loop_info64>::new()) }?;
    Ok(LoopStatus {
        number: read.lo_number,
        device: read.lo_device,
        inode: read.lo_inode,
        offset: read.lo_offset,
        size_limit: read.lo_sizelimit,
        flags: read.lo_flags,
        name: read.lo_file_name,
    })
}

/// Changes the flags that can be changed: whether the device disappears with its last user.
pub(super) fn set_status(device: BorrowedFd<'_>, status: LoopStatus) -> io::Result<()> {
    // SAFETY: the call reads a `loop_info64`.
    Ok(unsafe { ioctl(device, Setter::<{ raw::LOOP_SET_STATUS64 }, _>::new(status.to_raw())) }?)
}

/// Gives the device the size of its file.
pub(super) fn update_size(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the call ignores its argument.
    Ok(unsafe { ioctl(device, NoArg::<{ raw::LOOP_SET_CAPACITY }>::new()) }?)
}

/// Detaches the file, at once or when the last user closes the device.
pub(super) fn clear(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the call ignores its argument.
    Ok(unsafe { ioctl(device, NoArg::<{ raw::LOOP_CLR_FD }>::new()) }?)
}

/// Grows a mounted ext4 to this many blocks. It does nothing if it has as many.
///
/// # Errors
/// `EPERM` without `CAP_SYS_RESOURCE`.
pub(super) fn resize_ext4(root: BorrowedFd<'_>, blocks: u64) -> io::Result<()> {
    // SAFETY: the call reads a `u64`.
    Ok(unsafe { ioctl(root, Setter::<EXT4_RESIZE_FS, u64>::new(blocks)) }?)
}

/// The size of an XFS: the first version of its geometry.
///
/// *Source:* `struct xfs_fsop_geom_v1` in Linux `fs/xfs/libxfs/xfs_fs.h`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct XfsGeometry {
    /// Bytes of a block.
    pub(super) block_size: u32,
    _rt_extent_size: u32,
    /// Blocks of an allocation group.
    pub(super) group_blocks: u32,
    _group_count: u32,
    _log_blocks: u32,
    _sector_size: u32,
    _inode_size: u32,
    /// The part of the space that inodes can have, in percent.
    pub(super) inode_percent: u32,
    /// Blocks of the file system.
    pub(super) data_blocks: u64,
    /// Three numbers of 64 bits, the UUID, and seven numbers of 32 bits.
    _rest: [u32; 17],
}

/// *Source:* `struct xfs_growfs_data`, as above.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct XfsGrowth {
    blocks: u64,
    inode_percent: u32,
}

pub(super) fn xfs_geometry(root: BorrowedFd<'_>) -> io::Result<XfsGeometry> {
    // SAFETY: the call writes a structure of the size that its number contains.
    Ok(unsafe { ioctl(root, Getter::<XFS_FS_GEOMETRY, XfsGeometry>::new()) }?)
}

/// Grows a mounted XFS to this many blocks.
pub(super) fn grow_xfs(root: BorrowedFd<'_>, blocks: u64, inode_percent: u32) -> io::Result<()> {
    let growth = XfsGrowth { blocks, inode_percent };
    // SAFETY: the call reads a structure of the size that its number contains.
    Ok(unsafe { ioctl(root, Setter::<XFS_FS_GROW_DATA, XfsGrowth>::new(growth)) }?)
}
