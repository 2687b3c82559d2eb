//! The disk after a cut, made of the log.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result};
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, memfd_create, seek};
use rustix::io::Errno;

use super::choice::CutPoint;
use super::log::{LogEntry, LoggedWrite};

/// How much is copied to the disk at once.
const MAX_RUN_BYTES: usize = 1 << 20;

/// The pieces of some bytes that lie in different units, with their offsets.
fn split_at_units(offset: u64, bytes: &[u8], unit: u64) -> impl Iterator<Item = (u64, &[u8])> {
    let (mut at, mut rest) = (offset, bytes);
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let length = rest.len().min((unit - at % unit) as usize);
        let (piece, behind) = rest.split_at(length);
        let found = (at, piece);
        (at, rest) = (at + length as u64, behind);
        Some(found)
    })
}

/// Makes the disk after one cut after another.
#[derive(Debug)]
pub(super) struct Replay<'a> {
    log: &'a File,
    entries: &'a [LogEntry],
    /// The size of the disk in bytes.
    disk_bytes: u64,
    /// The unit in which a write is torn, in bytes.
    torn_bytes: u64,
    /// The disk before the last flush that was replayed, as a file in memory with holes for zeros.
    durable: File,
    /// How many entries it contains.
    replayed: usize,
}

impl<'a> Replay<'a> {
    pub(super) fn new(
        log: &'a File,
        entries: &'a [LogEntry],
        (disk_bytes, torn_bytes): (u64, u64),
    ) -> Result<Self> {
        let durable = memfd_create("durable", MemfdFlags::CLOEXEC).context("make a file in memory")?.into();
        Ok(Self { log, entries, disk_bytes, torn_bytes, durable, replayed: 0 })
    }

    /// Makes a disk what the cut leaves. It is fast where cuts come in ascending order.
    pub(super) fn write_disk(&mut self, disk: &File, cut: CutPoint) -> Result<()> {
        let entries = &self.entries[..cut.position];
        let last_flush = entries.iter().rposition(LogEntry::is_flush).unwrap_or(0);
        if last_flush < self.replayed {
            self.durable.set_len(0).context("forget what is durable")?;
            self.replayed = 0;
        }
        for entry in &entries[self.replayed..last_flush] {
            self.replay_durable(entry)?;
        }
        self.replayed = last_flush;
        clear(disk, 0, self.disk_bytes).context("clear the disk")?;
        copy_data(&self.durable, disk).context("write what is durable")?;
        for (index, entry) in entries.iter().enumerate().skip(last_flush) {
            if let LogEntry::Write(write) = entry {
                self.write_volatile(disk, (cut, index), write).context("write what is not durable")?;
            }
        }
        disk.sync_all().context("sync the disk")
    }

    fn replay_durable(&self, entry: &LogEntry) -> Result<()> {
        let LogEntry::Write(write) = entry else { return Ok(()) };
        match self.read_data(write)?.filter(|bytes| bytes.iter().any(|byte| *byte != 0)) {
            Some(bytes) => Ok(self.durable.write_all_at(&bytes, write.offset)?),
            None if write.length == 0 => Ok(()),
            None => clear(&self.durable, write.offset, write.length),
        }
    }

    fn write_volatile(
        &self,
        disk: &File,
        (cut, index): (CutPoint, usize),
        write: &LoggedWrite,
    ) -> Result<()> {
        let is_kept = |offset: u64| write.is_durable || cut.keeps(index, offset / self.torn_bytes);
        match self.read_data(write)? {
            Some(bytes) => {
                for (offset, piece) in split_at_units(write.offset, &bytes, self.torn_bytes) {
                    if is_kept(offset) {
                        disk.write_all_at(piece, offset)?;
                    }
                }
            }
            None if is_kept(write.offset) => clear(disk, write.offset, write.length)?,
            None => {}
        }
        Ok(())
    }

    fn read_data(&self, write: &LoggedWrite) -> Result<Option<Vec<u8>>> {
        let Some(offset) = write.data_offset else { return Ok(None) };
        let mut bytes = vec![0; usize::try_from(write.length)?];
        self.log.read_exact_at(&mut bytes, offset).context("read a logged write")?;
        Ok(Some(bytes))
    }
}

/// Makes these bytes zeros.
fn clear(file: &File, offset: u64, length: u64) -> Result<()> {
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, length)?)
}

/// Copies what is no hole to a disk that has only zeros.
fn copy_data(from: &File, to: &File) -> Result<()> {
    let (mut run, mut end) = (vec![0; MAX_RUN_BYTES], 0);
    loop {
        let mut start = match seek(from, SeekFrom::Data(end)) {
            // No data is left.
            Err(Errno::NXIO) => return Ok(()),
            start => start?,
        };
        end = seek(from, SeekFrom::Hole(start))?;
        while start < end {
            let piece = &mut run[..MAX_RUN_BYTES.min((end - start) as usize)];
            from.read_exact_at(piece, start)?;
            to.write_all_at(piece, start)?;
            start += piece.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::tests::LogFile;
    use super::*;

    const DISK_BYTES: u64 = 1 << 20;
    const FLUSH: u64 = 1;
    const FUA: u64 = 2;

    /// The first byte of these sectors after a cut.
    fn sectors_after(log: &mut LogFile, cuts: &[(usize, u64)], sectors: &[u64]) -> Vec<Vec<u8>> {
        log.mark("dm-log-writes-end");
        let entries = log.finish().unwrap();
        let disk = tempfile::tempfile().unwrap();
        disk.set_len(DISK_BYTES).unwrap();
        let mut replay = Replay::new(&log.file, &entries, (DISK_BYTES, 512)).unwrap();
        let states = cuts.iter().map(|&(position, way)| {
            replay.write_disk(&disk, CutPoint { position, way, seed: 1 }).unwrap();
            let first_byte = |sector: &u64| {
                let mut byte = [0];
                disk.read_exact_at(&mut byte, sector * 512).unwrap();
                byte[0]
            };
            sectors.iter().map(first_byte).collect()
        });
        states.collect()
    }

    #[test]
    fn a_cut_loses_only_what_was_written_behind_the_last_flush() {
        let mut log = LogFile::new();
        log.write(1, 1, 0, 1);
        log.write(2, 1, FUA, 2);
        log.write(9, 0, FLUSH, 0);
        log.write(1, 1, 0, 3);
        log.write(3, 1, FLUSH | FUA, 4);
        log.write(1, 1, 0, 5);
        // The last one comes before the others.
        let cuts = [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (4, 1), (5, 0), (6, 0), (6, 1), (2, 0)];
        let expected = [
            [0, 0, 0],
            [0, 0, 0],
            [1, 0, 0],
            [0, 2, 0],
            [1, 2, 0],
            [1, 2, 0],
            [3, 2, 0],
            [3, 2, 4],
            [3, 2, 4],
            [5, 2, 4],
            [0, 2, 0],
        ];
        assert_eq!(sectors_after(&mut log, &cuts, &[1, 2, 3]), expected);
    }

    #[test]
    fn discarded_sectors_read_as_zeros_once_a_flush_has_made_that_durable() {
        let mut log = LogFile::new();
        log.write(0, 32, FUA, 7);
        log.write(0, 0, FLUSH, 0);
        log.discard(1, 15);
        log.write(0, 0, FLUSH, 0);
        let cuts = [(2, 0), (3, 0), (3, 1), (4, 0)];
        let states = sectors_after(&mut log, &cuts, &[0, 1, 8, 15, 16]);
        let (before, after) = (vec![7, 7, 7, 7, 7], vec![7, 0, 0, 0, 7]);
        assert_eq!(states, [before.clone(), before, after.clone(), after]);
    }

    #[test]
    fn a_torn_write_leaves_some_of_its_sectors() {
        let mut log = LogFile::new();
        for _ in 0..20 {
            log.write(0, 100, 0, 1);
        }
        let sectors: Vec<u64> = (0..100).collect();
        let kept = |state: Vec<u8>| state.iter().filter(|byte| **byte == 1).count();
        let counts: Vec<_> = sectors_after(
            &mut log,
            &[(1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (1, 9)],
            &sectors,
        )
        .into_iter()
        .map(kept)
        .collect();
        assert!(counts.iter().any(|count| (20..80).contains(count)), "{counts:?}");
        assert!(counts.contains(&0) && counts.contains(&100), "{counts:?}");
    }
}
