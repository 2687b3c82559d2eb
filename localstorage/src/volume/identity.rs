//! The identity of a disk: another disk that gets its name has another one.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::sys;

/// The attributes in sysfs that name a disk, below the directory of the whole disk.
///
/// *Source:* Linux `Documentation/ABI/stable/sysfs-block`; the drivers virtio_blk, nvme, scsi, dm and md.
const NAMES: [&str; 7] =
    ["serial", "wwid", "device/serial", "device/wwid", "dm/uuid", "md/uuid", "loop/backing_file"];

/// The identity of a disk or disk image: the device, the number of its attachment (`diskseq`), the serial number and
/// WWN, and of a partition its start and UUID. It does not have the size, which grows.
///
/// It does not outlast the boot: a disk that was attached again has a new one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskIdentity(String);

impl DiskIdentity {
    /// The identity of an open disk or image.
    pub(super) fn of(disk: &File) -> io::Result<DiskIdentity> {
        let metadata = disk.metadata()?;
        let Some(directory) = device_directory(disk)? else {
            return Ok(DiskIdentity(format!("file {}:{}", metadata.dev(), metadata.ino())));
        };
        let mut text = format!("device {}", metadata.rdev());
        // Linux 5.15 and newer.
        if let Ok(sequence) = sys::disk_sequence(disk) {
            text += &format!("\ndiskseq {sequence}");
        }
        // A partition is a directory within that of its disk.
        let is_partition = directory.join("partition").exists();
        let whole = if is_partition { directory.join("..") } else { directory.clone() };
        let named = NAMES.map(|name| (name, whole.join(name)));
        let of_partition = ["partition", "start"].map(|name| (name, directory.join(name)));
        for (name, path) in named.into_iter().chain(of_partition) {
            // No disk has all of them.
            if let Ok(value) = fs::read_to_string(path) {
                text += &format!("\n{name} {}", value.trim());
            }
        }
        let uevent = fs::read_to_string(directory.join("uevent")).unwrap_or_default();
        text.extend(
            uevent.lines().filter(|line| line.starts_with("PARTUUID=")).map(|line| format!("\n{line}")),
        );
        Ok(DiskIdentity(text))
    }

    /// The identity as text, to compare it in a later process.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// The major and minor number of a block device; none for an image.
pub(super) fn device_numbers(metadata: &Metadata) -> Option<(u32, u32)> {
    let numbers = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    metadata.file_type().is_block_device().then_some(numbers)
}

/// The directory of a block device in sysfs; none for an image.
pub(super) fn device_directory(disk: &File) -> io::Result<Option<PathBuf>> {
    let metadata = disk.metadata()?;
    let directory =
        |(major, minor)| Path::new("/sys/dev/block").join(format!("{major}:{minor}")).canonicalize();
    device_numbers(&metadata).map(directory).transpose()
}
