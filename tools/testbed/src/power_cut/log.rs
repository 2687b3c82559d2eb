//! The log that dm-log-writes keeps of a disk's writes.
//!
//! *Source:* Linux `drivers/md/dm-log-writes.c`: `struct log_write_super`, `struct log_write_entry`.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, ensure};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
/// The mark that ends a log. A log device that is full ends without it.
const END_MARK: &str = "dm-log-writes-end";
/// The bytes of an entry before its inline data.
const ENTRY_BYTES: usize = 32;
/// The largest logical block of a log device.
const MAX_SECTOR_BYTES: u64 = 4096;

/// What the log records, in the order in which it became durable.
///
/// A write that was not durable by itself comes right before the flush that made it durable, also if other writes
/// and marks were recorded between both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LogEntry {
    Mark(String),
    Write(LoggedWrite),
}

/// A write, a discard, or a flush without data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoggedWrite {
    /// Where on the disk, in bytes.
    pub(super) offset: u64,
    /// How many bytes; 0 for a flush alone.
    pub(super) length: u64,
    /// Where in the log its bytes are; none for a discard, after which the disk reads as zeros.
    pub(super) data_offset: Option<u64>,
    /// All earlier writes are durable.
    pub(super) is_flush: bool,
    /// This write is durable itself (FUA).
    pub(super) is_durable: bool,
}

impl LogEntry {
    pub(super) fn is_flush(&self) -> bool {
        matches!(self, Self::Write(write) if write.is_flush)
    }

    /// Whether a power cut right behind this entry may lose it.
    pub(super) fn can_be_lost(&self) -> bool {
        matches!(self, Self::Write(write) if !write.is_durable && write.length > 0)
    }
}

/// Reads all entries of a complete log, without its end mark.
pub(super) fn read_log(log: &File) -> Result<Vec<LogEntry>> {
    let mut header = [0; ENTRY_BYTES];
    log.read_exact_at(&mut header, 0).context("read the log's header")?;
    ensure!(number_at(&header, 0) == MAGIC && number_at(&header, 1) == VERSION, "not a log of dm-log-writes");
    let (count, sector_bytes) = (number_at(&header, 2), number_at(&header, 3) & u64::from(u32::MAX));
    ensure!((512..=MAX_SECTOR_BYTES).contains(&sector_bytes), "the log has sectors of {sector_bytes} bytes");
    let mut entries = Vec::new();
    let mut offset = sector_bytes;
    for number in 0..count {
        let (entry, next) = read_entry(log, offset, sector_bytes)
            .with_context(|| format!("read entry {number} of the log"))?;
        entries.push(entry);
        offset = next;
    }
    let is_complete = entries.pop() == Some(LogEntry::Mark(END_MARK.into()));
    ensure!(is_complete, "the log has no end: its disk is too small for all writes");
    Ok(entries)
}

/// The entry at an offset of the log, and the offset of the next one.
fn read_entry(log: &File, offset: u64, sector_bytes: u64) -> Result<(LogEntry, u64)> {
    const FLUSH: u64 = 1;
    const FUA: u64 = 1 << 1;
    const DISCARD: u64 = 1 << 2;
    const MARK: u64 = 1 << 3;
    let mut sector = vec![0; usize::try_from(sector_bytes)?];
    log.read_exact_at(&mut sector, offset)?;
    let [start, sectors, flags, inline_bytes] = [0, 1, 2, 3].map(|index| number_at(&sector, index));
    let data_offset = offset + sector_bytes;
    if flags & MARK != 0 {
        let text = sector.get(ENTRY_BYTES..ENTRY_BYTES + usize::try_from(inline_bytes)?);
        let text = String::from_utf8_lossy(text.context("a mark is longer than its sector")?);
        return Ok((LogEntry::Mark(text.trim_end_matches('\0').to_owned()), data_offset));
    }
    let length = sectors * sector_bytes;
    let has_data = flags & DISCARD == 0;
    let write = LoggedWrite {
        offset: start * sector_bytes,
        length,
        data_offset: has_data.then_some(data_offset),
        is_flush: flags & FLUSH != 0,
        is_durable: flags & FUA != 0,
    };
    let next = if has_data { data_offset + length } else { data_offset };
    Ok((LogEntry::Write(write), next))
}

fn number_at(bytes: &[u8], index: usize) -> u64 {
    let number = bytes.chunks_exact(8).nth(index).and_then(|bytes| bytes.try_into().ok());
    number.map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A log in a file, as the kernel writes it.
    pub(in crate::power_cut) struct LogFile {
        pub(in crate::power_cut) file: File,
        bytes: Vec<u8>,
        count: u64,
    }

    impl LogFile {
        pub(in crate::power_cut) fn new() -> Self {
            Self { file: tempfile::tempfile().unwrap(), bytes: vec![0; 512], count: 0 }
        }

        fn add_entry(&mut self, numbers: [u64; 4], inline: &[u8], data: &[u8]) {
            let mut sector: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            sector.extend(inline);
            sector.resize(512, 0);
            self.bytes.extend(sector);
            self.bytes.extend(data);
            self.count += 1;
        }

        /// Sectors filled with one byte.
        pub(in crate::power_cut) fn write(&mut self, sector: u64, sectors: u64, flags: u64, byte: u8) {
            let data = vec![byte; 512 * sectors as usize];
            self.add_entry([sector, sectors, flags, 0], &[], &data);
        }

        pub(in crate::power_cut) fn discard(&mut self, sector: u64, sectors: u64) {
            self.add_entry([sector, sectors, 4, 0], &[], &[]);
        }

        pub(in crate::power_cut) fn mark(&mut self, text: &str) {
            self.add_entry([0, 0, 8, text.len() as u64], text.as_bytes(), &[]);
        }

        pub(in crate::power_cut) fn finish(&mut self) -> Result<Vec<LogEntry>> {
            for (index, number) in [MAGIC, VERSION, self.count, 512].iter().enumerate() {
                self.bytes[index * 8..][..8].copy_from_slice(&number.to_le_bytes());
            }
            self.file.write_all_at(&self.bytes, 0).unwrap();
            read_log(&self.file)
        }
    }

    #[test]
    fn writes_flushes_discards_and_marks_are_read() {
        let mut log = LogFile::new();
        log.write(8, 2, 2, 7);
        log.write(0, 0, 1, 0);
        log.mark("created");
        log.discard(16, 1 << 30);
        log.mark(END_MARK);
        let write = |offset, length, data_offset, is_flush, is_durable| {
            LogEntry::Write(LoggedWrite { offset, length, data_offset, is_flush, is_durable })
        };
        let expected = vec![
            write(4096, 1024, Some(1024), false, true),
            write(0, 0, Some(2560), true, false),
            LogEntry::Mark("created".into()),
            write(8192, 512 << 30, None, false, false),
        ];
        assert_eq!(log.finish().unwrap(), expected);
    }

    #[test]
    fn a_log_that_was_cut_off_is_an_error() {
        let mut log = LogFile::new();
        log.write(0, 1, 0, 1);
        assert!(log.finish().unwrap_err().to_string().contains("too small"));
        let empty = tempfile::tempfile().unwrap();
        assert!(read_log(&empty).is_err());
        empty.set_len(4096).unwrap();
        assert!(read_log(&empty).unwrap_err().to_string().contains("not a log"));
    }
}
