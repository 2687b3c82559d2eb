//! Faults of block devices and of the file systems on them, as the kernel's log names them: a reader gets `EIO` for each, and
//! nobody else is told.

use std::time::Instant;

use nodekeel_logtree::LogEntry;
use tokio::sync::broadcast;

use crate::kernel_kills::kernel_message;

/// The faults that may wait for a receiver. The kernel limits the rate of their lines, too.
const QUEUED: usize = 256;

/// The faults, to whoever subscribes. Cheap to clone; all clones are one channel.
#[derive(Debug, Clone)]
pub(crate) struct DeviceFaults(broadcast::Sender<DatedFault>);

impl Default for DeviceFaults {
    fn default() -> Self {
        Self(broadcast::channel(QUEUED).0)
    }
}

/// A fault of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceFault {
    /// The kernel's name of the device: `dm-1`, `vdb`.
    pub(crate) device: String,
    pub(crate) kind: FaultKind,
    /// The sector of 512 bytes on the device, where the line names one.
    pub(crate) sector: Option<u64>,
}

/// When the kernel logged a fault, which may be long before this program read it.
pub(crate) type DatedFault = (Instant, DeviceFault);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FaultKind {
    /// Data without the tag that only the key can have made.
    Unauthentic,
    /// A read or write failed.
    Failed,
    /// The file system found itself damaged, or stopped writing.
    FileSystem,
}

impl FaultKind {
    pub(crate) const ALL: [Self; 3] = [Self::Unauthentic, Self::Failed, Self::FileSystem];

    /// Its name in metrics and records.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Unauthentic => "unauthentic",
            Self::Failed => "failed",
            Self::FileSystem => "file-system",
        }
    }
}

impl DeviceFaults {
    /// Passes on the fault that an entry of the kernel's log names, if it names one.
    pub(crate) fn record(&self, entry: &LogEntry) {
        if let Some((message, age)) = kernel_message(entry)
            && let (Some(fault), Some(at)) = (parse_fault(message), Instant::now().checked_sub(age))
        {
            // Without a receiver, there is no volume whose fault it could be.
            let _ = self.0.send((at, fault));
        }
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<DatedFault> {
        self.0.subscribe()
    }
}

/// What the kernel calls an error of a block device that failed, and not one that lacks an operation.
///
/// *Source:* Linux `block/blk-core.c`, `blk_errors`.
const BLOCK_FAILURES: [&str; 7] = [
    "I/O",
    "timeout",
    "recoverable transport",
    "critical target",
    "critical medium",
    "critical space allocation",
    "protection",
];

/// The fault in a line of the kernel.
///
/// *Source:* Linux: `drivers/md/dm-crypt.c` and `dm-integrity.c` (`DMERR_LIMIT`), `block/blk-mq.c` (`blk_print_req_error`),
/// `fs/xfs/xfs_message.c` with `xfs_fsops.c`, `xfs_error.c`, `xfs_buf.c` and `xfs_log.c`, `fs/iomap/buffered-io.c`,
/// `fs/buffer.c`, `fs/ext4/super.c` and `page-io.c`, `fs/jbd2/journal.c`. A device of the device mapper reports no error of its
/// own: only the file system on it does.
fn parse_fault(line: &str) -> Option<DeviceFault> {
    let fault = |device: &str, kind, sector| {
        let is_name =
            !device.is_empty() && device.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_!.".contains(&b));
        is_name.then(|| DeviceFault { device: device.to_owned(), kind, sector })
    };
    if let Some((device, rest)) = line.split_once(": writeback error on inode ") {
        let sector = rest.split_once(", sector ").and_then(|(_, sector)| leading_number(sector));
        return fault(device, FaultKind::Failed, sector);
    }
    let line = without_module(line);
    if let Some(rest) = line.strip_prefix("Buffer I/O error on dev ") {
        // Its blocks have a size that the line does not tell.
        let (device, _) = rest.split_once(", logical block ")?;
        return fault(device, FaultKind::Failed, None);
    }
    if let Some(journal) = line.strip_prefix("Aborting journal on device ") {
        // The device, and the inode of the journal.
        let (device, _) = journal.trim_end_matches('.').rsplit_once('-')?;
        return fault(device, FaultKind::FileSystem, None);
    }
    if let Some(rest) = line.strip_prefix("device-mapper: crypt: ") {
        let (device, sector) = rest.split_once(": INTEGRITY AEAD ERROR, sector ")?;
        return fault(device, FaultKind::Unauthentic, leading_number(sector));
    }
    if let Some(rest) = line.strip_prefix("device-mapper: integrity: ") {
        let (device, sector) = rest.split_once(": Checksum failed at sector 0x")?;
        return fault(device, FaultKind::Unauthentic, u64::from_str_radix(sector.trim(), 16).ok());
    }
    if let Some((what, rest)) = line.split_once(" error, dev ") {
        let (device, sector) = rest.split_once(", sector ")?;
        let is_failure = BLOCK_FAILURES.contains(&what);
        return if is_failure { fault(device, FaultKind::Failed, leading_number(sector)) } else { None };
    }
    if let Some((device, what)) = line.strip_prefix("XFS (").and_then(|rest| rest.split_once("): ")) {
        if let Some((_, place)) = what.split_once(" at daddr 0x")
            && what.starts_with("metadata I/O error in ")
        {
            let sector = place.split(' ').next().and_then(|sector| u64::from_str_radix(sector, 16).ok());
            return fault(device, FaultKind::Failed, sector);
        }
        let is_damage = [
            "log I/O error",
            "Metadata corruption",
            "Metadata CRC error",
            "Corruption ",
            "shut down",
            "Shutting down",
        ]
        .iter()
        .any(|words| what.contains(words));
        return if is_damage { fault(device, FaultKind::FileSystem, None) } else { None };
    }
    if let Some((device, _)) =
        line.strip_prefix("EXT4-fs error (device ").and_then(|rest| rest.split_once("): "))
    {
        return fault(device, FaultKind::FileSystem, None);
    }
    if let Some((device, what)) =
        line.strip_prefix("EXT4-fs warning (device ").and_then(|rest| rest.split_once("): "))
    {
        let is_failure = what.starts_with("ext4_end_bio:") && what.contains(": I/O error ");
        return if is_failure { fault(device, FaultKind::Failed, None) } else { None };
    }
    let (device, what) = line.strip_prefix("EXT4-fs (")?.split_once("): ")?;
    if what.starts_with("Remounting filesystem read-only") {
        return fault(device, FaultKind::FileSystem, None);
    }
    None
}

/// The line without the name that a header's `pr_fmt` may put before it: Linux 6.1 writes `trusted_key: device-mapper: crypt:
/// …`. A word, so that no path in another line gets here.
fn without_module(line: &str) -> &str {
    match line.split_once(": ") {
        Some((module, rest))
            if module != "device-mapper" && module.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') =>
        {
            rest
        }
        _ => line,
    }
}

/// The number at the start of a text.
fn leading_number(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_line_is_a_fault_of_a_named_device_or_none(
            start in prop::sample::select(vec![
                "", "x: ", "Buffer I/O error on dev ", "Aborting journal on device ", "device-mapper: crypt: ", "device-mapper: integrity: ", "I/O error, dev ", "XFS (", "EXT4-fs (",
                "EXT4-fs error (device ",
            ]),
            device in "\\PC{0,12}",
            middle in prop::sample::select(vec![
                ": INTEGRITY AEAD ERROR, sector ", ": Checksum failed at sector 0x", ", sector ", "): Corruption ", "): ",
            ]),
            end in "\\PC{0,30}",
        ) {
            if let Some(fault) = parse_fault(&format!("{start}{device}{middle}{end}")) {
                prop_assert!(!fault.device.is_empty() && !fault.device.contains('/'), "{fault:?}");
            }
        }
    }

    #[test]
    fn the_kernels_lines_name_device_kind_and_sector() {
        use FaultKind::{Failed, FileSystem, Unauthentic};
        for (line, expected) in [
            (
                "device-mapper: crypt: dm-1: INTEGRITY AEAD ERROR, sector 4096",
                Some(("dm-1", Unauthentic, Some(4096))),
            ),
            (
                "device-mapper: integrity: dm-0: Checksum failed at sector 0x1a0",
                Some(("dm-0", Unauthentic, Some(416))),
            ),
            (
                "I/O error, dev vdb, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
                Some(("vdb", Failed, Some(2048))),
            ),
            ("blk_update_request: critical medium error, dev sda, sector 7", Some(("sda", Failed, Some(7)))),
            (
                "XFS (dm-1): Metadata CRC error detected at xfs_agf_read_verify+0x1",
                Some(("dm-1", FileSystem, None)),
            ),
            (
                "XFS (dm-1): Corruption of in-memory data (0x8) detected at x. Shutting down filesystem.",
                Some(("dm-1", FileSystem, None)),
            ),
            (
                "EXT4-fs error (device dm-1): ext4_lookup:1: inode #2: comm ls: iget",
                Some(("dm-1", FileSystem, None)),
            ),
            ("EXT4-fs (vdb1): Remounting filesystem read-only", Some(("vdb1", FileSystem, None))),
            ("sda: writeback error on inode 131, offset 0, sector 264", Some(("sda", Failed, Some(264)))),
            (
                "XFS (dm-1): metadata I/O error in \"xfs_imap_to_bp+0x5a/0x80 [xfs]\" at daddr 0x1a0 len 32 error 5",
                Some(("dm-1", Failed, Some(416))),
            ),
            ("XFS (dm-1): log I/O error -5", Some(("dm-1", FileSystem, None))),
            (
                "Buffer I/O error on dev dm-1, logical block 8193, lost async page write",
                Some(("dm-1", Failed, None)),
            ),
            ("Aborting journal on device dm-1-8.", Some(("dm-1", FileSystem, None))),
            (
                "EXT4-fs warning (device dm-1): ext4_end_bio:343: I/O error 10 writing to inode 13 starting block 8705)",
                Some(("dm-1", Failed, None)),
            ),
            ("EXT4-fs warning (device dm-1): ext4_clear_journal_err:5: Marking fs", None),
            ("XFS (dm-1): Ending clean mount", None),
            ("XFS (dm-1): Unmounting Filesystem", None),
            ("EXT4-fs (vdb1): mounted filesystem with ordered data mode", None),
            ("device-mapper: crypt: xts(aes) using implementation \"xts-aes-aesni\"", None),
            ("device-mapper: crypt: ../x: INTEGRITY AEAD ERROR, sector 1", None),
            ("I/O error, dev , sector 1", None),
            ("operation not supported error, dev loop0, sector 0 op 0x9:(WRITE_ZEROES)", None),
            ("process '/tmp/a error, dev vdb, sector 5' started with executable stack", None),
            (
                "trusted_key: device-mapper: crypt: dm-1: INTEGRITY AEAD ERROR, sector 192",
                Some(("dm-1", Unauthentic, Some(192))),
            ),
            ("process '/tmp/a: device-mapper: crypt: dm-1: INTEGRITY AEAD ERROR, sector 192", None),
        ] {
            let found = parse_fault(line);
            let found = found.as_ref().map(|fault| (fault.device.as_str(), fault.kind, fault.sector));
            assert_eq!(found, expected, "{line}");
        }
    }
}
