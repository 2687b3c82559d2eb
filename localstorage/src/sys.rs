//! All unsafe code of the crate: the ioctls of partitions, which no library wraps, and what a child does before it executes its
//! program.
#![allow(
    unsafe_code,
    reason = "an ioctl takes a pointer to a structure, and a child of fork must not allocate"
)]

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use rustix::io::{self, FdFlags};
#[cfg(feature = "luks")]
use rustix::ioctl::Updater;
use rustix::ioctl::{self, Getter, NoArg, Opcode, Setter, opcode};

use crate::{failpoints, syscalls};

/// *Source:* linux/fs.h, `BLKRRPART`.
const REREAD_PARTITIONS: Opcode = opcode::none(0x12, 95);
/// *Source:* linux/blkpg.h, `BLKPG`.
const CHANGE_PARTITION: Opcode = opcode::none(0x12, 105);
/// *Source:* linux/fs.h, `BLKGETDISKSEQ`.
const DISK_SEQUENCE: Opcode = opcode::read::<u64>(0x12, 128);
/// *Source:* linux/blkpg.h, `BLKPG_RESIZE_PARTITION`.
const RESIZE: c_int = 3;

/// *Source:* linux/blkpg.h, `struct blkpg_ioctl_arg`.
#[repr(C)]
#[derive(Debug)]
struct PartitionRequest {
    operation: c_int,
    flags: c_int,
    data_length: c_int,
    data: *const PartitionRange,
}

/// *Source:* linux/blkpg.h, `struct blkpg_partition`.
#[repr(C)]
#[derive(Debug)]
struct PartitionRange {
    start: i64,
    length: i64,
    number: c_int,
    names: [u8; 128],
}
const _: () = assert!(size_of::<PartitionRange>() == 152);

/// Changes the size of a partition that may be in use, in the kernel alone: its start, and its new size, in bytes.
pub(crate) fn resize_partition(disk: impl AsFd, number: u32, (start, size): (u64, u64)) -> io::Result<()> {
    failpoints::check_failpoint("ioctl")?;
    let to_signed = |bytes: u64| i64::try_from(bytes).map_err(|_| io::Errno::INVAL);
    let range = PartitionRange {
        start: to_signed(start)?,
        length: to_signed(size)?,
        number: number.try_into().map_err(|_| io::Errno::INVAL)?,
        // The kernel ignores both names. *Source:* Linux `block/ioctl.c`, `blkpg_do_ioctl`.
        names: [0; 128],
    };
    let request = PartitionRequest {
        operation: RESIZE,
        flags: 0,
        data_length: size_of::<PartitionRange>() as c_int,
        data: &raw const range,
    };
    // SAFETY: the kernel reads the request, and the range to which it points, which lives until the call returns.
    unsafe { ioctl::ioctl(disk, Setter::<CHANGE_PARTITION, _>::new(request)) }
}

/// The number that the kernel gave to the medium in a disk when it was attached, and to no other since the machine
/// started.
pub(crate) fn disk_sequence(disk: impl AsFd) -> io::Result<u64> {
    // SAFETY: the kernel writes one number of 64 bits.
    unsafe { ioctl::ioctl(disk, Getter::<DISK_SEQUENCE, u64>::new()) }
}

/// Has the program of this command inherit an open file, and returns its path there. The file must be open until the
/// program is started.
pub(crate) fn inherit(command: &mut Command, file: BorrowedFd<'_>) -> PathBuf {
    let number = file.as_raw_fd();
    // SAFETY: between fork and exec, the closure makes one system call, on a file that the caller keeps open.
    unsafe {
        command.pre_exec(move || {
            rustix::io::fcntl_setfd(BorrowedFd::borrow_raw(number), FdFlags::empty()).map_err(Into::into)
        })
    };
    syscalls::proc_path(file)
}

/// Has the kernel read the partition table of a disk again. None of its partitions may be in use.
pub(crate) fn reread_partitions(disk: impl AsFd) -> io::Result<()> {
    failpoints::check_failpoint("ioctl")?;
    // SAFETY: the call has no argument.
    unsafe { ioctl::ioctl(disk, NoArg::<REREAD_PARTITIONS>::new()) }
}

/// *Source:* linux/dm-ioctl.h, `struct dm_ioctl`.
#[cfg(feature = "luks")]
#[repr(C)]
#[derive(Debug)]
struct MappingRequest {
    version: [u32; 3],
    data_size: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event_number: u32,
    padding: u32,
    device: u64,
    name: [u8; 128],
    identifier: [u8; 129],
    data: [u8; 7],
}
#[cfg(feature = "luks")]
const _: () = assert!(size_of::<MappingRequest>() == 312);

#[cfg(feature = "luks")]
impl MappingRequest {
    fn new(identifier: &str) -> io::Result<MappingRequest> {
        let mut request = MappingRequest {
            // The oldest version of the interface that the kernel still speaks.
            version: [4, 0, 0],
            data_size: size_of::<MappingRequest>() as u32,
            data_start: 0,
            target_count: 0,
            open_count: 0,
            flags: 0,
            event_number: 0,
            padding: 0,
            device: 0,
            name: [0; 128],
            identifier: [0; 129],
            data: [0; 7],
        };
        // The last byte stays zero.
        if identifier.len() >= request.identifier.len() {
            return Err(io::Errno::INVAL);
        }
        request.identifier[..identifier.len()].copy_from_slice(identifier.as_bytes());
        Ok(request)
    }
}

/// A request with a table of one target. *Source:* linux/dm-ioctl.h, `struct dm_target_spec`.
#[cfg(feature = "luks")]
#[repr(C)]
#[derive(Debug)]
struct TableRequest {
    request: MappingRequest,
    start: u64,
    sectors: u64,
    status: i32,
    next: u32,
    target: [u8; 16],
    parameters: [u8; 8],
}
#[cfg(feature = "luks")]
const _: () = assert!(size_of::<TableRequest>() == 312 + 40 + 8);

/// Lets all reads and writes of a mapping of so many sectors fail from now on, also those that wait since it was suspended.
#[cfg(feature = "luks")]
pub(crate) fn fail_mapping(control: impl AsFd, identifier: &str, sectors: u64) -> io::Result<()> {
    /// *Source:* linux/dm-ioctl.h, `DM_DEV_SUSPEND`, which resumes without its flag.
    const RESUME: Opcode = opcode::read_write::<MappingRequest>(0xfd, 6);
    /// *Source:* linux/dm-ioctl.h, `DM_TABLE_LOAD`.
    const LOAD: Opcode = opcode::read_write::<MappingRequest>(0xfd, 9);
    failpoints::check_failpoint("ioctl")?;
    let mut request = MappingRequest::new(identifier)?;
    request.data_size = size_of::<TableRequest>() as u32;
    request.data_start = size_of::<MappingRequest>() as u32;
    request.target_count = 1;
    let mut table = TableRequest {
        request,
        start: 0,
        sectors,
        status: 0,
        next: (size_of::<TableRequest>() - size_of::<MappingRequest>()) as u32,
        target: *b"error\0\0\0\0\0\0\0\0\0\0\0",
        parameters: [0; 8],
    };
    // SAFETY: the kernel reads and writes one request with its table, of the size that it names.
    unsafe { ioctl::ioctl(&control, Updater::<LOAD, _>::new(&mut table)) }?;
    let mut request = MappingRequest::new(identifier)?;
    // SAFETY: the kernel reads and writes one request, of the size that it names.
    unsafe { ioctl::ioctl(&control, Updater::<RESUME, _>::new(&mut request)) }
}

/// Removes the mapping with this identifier from the kernel's device-mapper, unless something has it open. The identifier is
/// all that names it: another mapping that gets its name by then stays.
#[cfg(feature = "luks")]
pub(crate) fn remove_mapping(control: impl AsFd, identifier: &str) -> io::Result<()> {
    /// *Source:* linux/dm-ioctl.h, `DM_DEV_REMOVE`.
    const REMOVE: Opcode = opcode::read_write::<MappingRequest>(0xfd, 4);
    failpoints::check_failpoint("ioctl")?;
    let mut request = MappingRequest::new(identifier)?;
    // SAFETY: the kernel reads and writes one request, of the size that it names.
    unsafe { ioctl::ioctl(control, Updater::<REMOVE, _>::new(&mut request)) }
}

/// Has the kernel send this signal to the program of this command when this program is killed, or the thread ends that starts
/// it.
#[cfg(feature = "luks")]
pub(crate) fn end_with_parent(command: &mut Command, signal: rustix::process::Signal) {
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};

    let parent = getpid();
    // SAFETY: between fork and exec, the closure makes two system calls, and neither allocates nor locks.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(signal))?;
            // The parent may have been killed before.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::Errno::SRCH.into()) }
        })
    };
}
