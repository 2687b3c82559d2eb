//! The disks of this host and their partitions, as the kernel knows them.
//!
//! *Source:* Linux `Documentation/ABI/stable/sysfs-block`; sizes and starts count sectors of 512 bytes, for any
//! disk's blocks are.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::dir::Dir;
use crate::error::{Error, FileOperation};
use crate::syscalls;

const SECTOR_BYTES: u64 = 512;

/// More than any attribute that is read here has.
const MAX_ATTRIBUTE_BYTES: u64 = 4096;

/// The major and minor number of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceNumber {
    pub(super) major: u32,
    pub(super) minor: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KernelDisk {
    pub(super) name: DeviceName,
    pub(super) number: DeviceNumber,
    pub(super) size_bytes: u64,
    /// The size of its logical blocks, in bytes.
    pub(super) block_bytes: u64,
    /// In the order of their numbers.
    pub(super) partitions: Vec<KernelPartition>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KernelPartition {
    pub(super) name: DeviceName,
    pub(super) number: DeviceNumber,
    /// The number in the partition table, from 1.
    pub(super) index: u32,
    pub(super) start_bytes: u64,
    pub(super) size_bytes: u64,
}

/// The name of a device in sysfs, which has `!` for each `/` of the path below `/dev`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceName(pub(super) String);

impl DeviceName {
    pub(super) fn device_path(&self, dev: &Path) -> PathBuf {
        dev.join(self.0.replace('!', "/"))
    }
}

/// Reads all disks that have a medium, in the order of their names. A disk that is removed during the scan is left out.
pub(super) fn read_disks(sys: &Dir) -> Result<Vec<KernelDisk>, Error> {
    let block = sys.open_dir("block")?;
    let mut disks = Vec::new();
    for entry in block.list()? {
        match read_disk(sys, &block, entry.name.as_os_str()) {
            Ok(disk) => disks.extend(disk),
            Err(error) if is_removed(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(disks)
}

/// An attribute of a device that was removed is absent, or can no longer be read.
fn is_removed(error: &Error) -> bool {
    const ENODEV: i32 = 19;
    error.is_not_found() || error.raw_os_error() == Some(ENODEV)
}

/// None for a drive without a medium, and for a path of a multipath device, which has a disk.
fn read_disk(sys: &Dir, block: &Dir, name: &OsStr) -> Result<Option<KernelDisk>, Error> {
    let to_error = |source: io::Error| Error::new(FileOperation::Read, block.path().join(name), source);
    // `Dir` follows no link, and all entries of `block` are links: the target is opened beneath the root of
    // sysfs.
    let link = syscalls::read_link(block, name).map_err(|errno| to_error(errno.into()))?;
    let Some(device) = device_directory(link.as_bytes()) else {
        return Err(to_error(io::Error::new(
            io::ErrorKind::InvalidData,
            "the link does not lead to a device",
        )));
    };
    let device = sys.open_dir(device)?;
    let attributes = DeviceAttributes::read(&device)?;
    if !attributes.is_disk_with_medium() {
        return Ok(None);
    }
    let mut partitions = Vec::new();
    for entry in device.list()? {
        // A partition is a directory within that of its disk, under any name.
        if entry.kind == crate::FileKind::Dir && device.exists(Path::new(&entry.name).join("partition"))? {
            let attributes = DeviceAttributes::read(&device.open_dir(&entry.name)?)?;
            partitions.extend(attributes.partition(entry.name.as_os_str()));
        }
    }
    partitions.sort_by_key(|partition| partition.index);
    Ok(attributes.disk(name, partitions))
}

/// The path below the root of sysfs to which a link in `block` leads. None if it leads anywhere else.
fn device_directory(link: &[u8]) -> Option<PathBuf> {
    let path = link.strip_prefix(b"../")?;
    path.starts_with(b"devices/").then(|| PathBuf::from(OsStr::from_bytes(path)))
}

/// The text of each attribute that is read; none if the device does not have it.
#[derive(Debug, Default)]
struct DeviceAttributes {
    dev: Option<Vec<u8>>,
    size: Option<Vec<u8>>,
    hidden: Option<Vec<u8>>,
    logical_block_size: Option<Vec<u8>>,
    partition: Option<Vec<u8>>,
    start: Option<Vec<u8>>,
}

impl DeviceAttributes {
    fn read(device: &Dir) -> Result<DeviceAttributes, Error> {
        let read = |name: &str| match device.read_at_most(name, MAX_ATTRIBUTE_BYTES) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        };
        Ok(DeviceAttributes {
            dev: read("dev")?,
            size: read("size")?,
            hidden: read("hidden")?,
            logical_block_size: read("queue/logical_block_size")?,
            partition: read("partition")?,
            start: read("start")?,
        })
    }

    fn is_disk_with_medium(&self) -> bool {
        let is_hidden = parse_number(self.hidden.as_deref()).is_some_and(|hidden| hidden != 0);
        !is_hidden && parse_size(self.size.as_deref()).is_some_and(|size| size > 0)
    }

    /// None if the kernel's attributes are incomplete: the device is being removed.
    fn disk(&self, name: &OsStr, partitions: Vec<KernelPartition>) -> Option<KernelDisk> {
        Some(KernelDisk {
            name: DeviceName(name.to_str()?.to_owned()),
            number: parse_device_number(self.dev.as_deref())?,
            size_bytes: parse_size(self.size.as_deref())?,
            block_bytes: parse_number(self.logical_block_size.as_deref())?,
            partitions,
        })
    }

    fn partition(&self, name: &OsStr) -> Option<KernelPartition> {
        Some(KernelPartition {
            name: DeviceName(name.to_str()?.to_owned()),
            number: parse_device_number(self.dev.as_deref())?,
            index: parse_number(self.partition.as_deref())?.try_into().ok()?,
            start_bytes: parse_size(self.start.as_deref())?,
            size_bytes: parse_size(self.size.as_deref())?,
        })
    }
}

/// A number in its line.
fn parse_number(text: Option<&[u8]>) -> Option<u64> {
    let text = text?.strip_suffix(b"\n").or(text)?;
    // `parse` would accept a plus sign, which the kernel never writes.
    let is_number = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    if is_number { std::str::from_utf8(text).ok()?.parse().ok() } else { None }
}

/// A number of sectors, in bytes.
fn parse_size(text: Option<&[u8]>) -> Option<u64> {
    parse_number(text)?.checked_mul(SECTOR_BYTES)
}

/// `8:1`
fn parse_device_number(text: Option<&[u8]>) -> Option<DeviceNumber> {
    let (major, minor) = text?.split_at_checked(text?.iter().position(|byte| *byte == b':')?)?;
    let number = |text: &[u8]| parse_number(Some(text))?.try_into().ok();
    Some(DeviceNumber { major: number(major)?, minor: number(&minor[1..])? })
}

/// Checks that no attribute and no link makes the parsers panic, and that a link leads nowhere but to a device.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_sysfs_attributes(bytes: &[u8]) {
    let mut fields = bytes.split(|byte| *byte == 0).map(<[u8]>::to_vec);
    let attributes = DeviceAttributes {
        dev: fields.next(),
        size: fields.next(),
        hidden: fields.next(),
        logical_block_size: fields.next(),
        partition: fields.next(),
        start: fields.next(),
    };
    let name = OsStr::new("sda");
    let partitions: Vec<_> = attributes.partition(name).into_iter().collect();
    if let Some(disk) = attributes.disk(name, partitions).filter(|_| attributes.is_disk_with_medium()) {
        let DeviceNumber { major, minor } = disk.number;
        assert_eq!(parse_device_number(Some(format!("{major}:{minor}").as_bytes())), Some(disk.number));
        assert!(disk.size_bytes > 0 && disk.size_bytes.is_multiple_of(SECTOR_BYTES));
    }
    if let Some(path) = device_directory(bytes) {
        assert!(path.starts_with("devices") && path.is_relative(), "{}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_sizes_and_devices_are_parsed_as_the_kernel_prints_them() {
        assert_eq!(parse_number(Some(b"4096\n")), Some(4096));
        assert_eq!(parse_size(Some(b"2048\n")), Some(1 << 20));
        assert_eq!(parse_device_number(Some(b"259:12\n")), Some(DeviceNumber { major: 259, minor: 12 }));
        for text in [&b""[..], b"\n", b"-1\n", b"+1", b" 1", b"1 ", b"18446744073709551616\n"] {
            assert_eq!(parse_number(Some(text)), None, "{text:?}");
        }
        assert_eq!(parse_size(Some(b"18446744073709551615")), None);
        for text in [&b"8"[..], b"8:", b":1", b"8:1:2", b"8:4294967296"] {
            assert_eq!(parse_device_number(Some(text)), None, "{text:?}");
        }
    }

    #[test]
    fn a_link_that_leaves_the_devices_is_rejected() {
        let path = device_directory(b"../devices/pci0000:00/block/sda");
        assert_eq!(path, Some("devices/pci0000:00/block/sda".into()));
        for link in [&b"/sys/devices/sda"[..], b"devices/sda", b"../../devices/sda", b"../class/sda", b""] {
            assert_eq!(device_directory(link), None, "{link:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_attributes_never_panic(bytes: Vec<u8>) {
            fuzz_sysfs_attributes(&bytes);
        }
    }
}
