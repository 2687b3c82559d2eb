//! The disk after a cut, made of the log.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result};
use rustix::fs::{FallocateFlags, fallocate};

use super::choice::CutPoint;
use super::log::{LogEntry, LoggedWrite};

const BLOCK_BYTES: u64 = 4096;
/// How much is written to the disk at once.
const MAX_RUN_BYTES: usize = 1 << 20;

/// The bytes of a disk that are not zero, in blocks.
#[derive(Debug, Default)]
struct SparseImage {
    blocks: BTreeMap<u64, Box<[u8]>>,
}

impl SparseImage {
    fn write(&mut self, offset: u64, bytes: &[u8]) {
        for (at, piece) in split_at_units(offset, bytes, BLOCK_BYTES) {
            let is_zero = piece.iter().all(|byte| *byte == 0);
            if is_zero && !self.blocks.contains_key(&(at / BLOCK_BYTES)) {
                continue;
            }
            let empty = || vec![0; BLOCK_BYTES as usize].into_boxed_slice();
            let block = self.blocks.entry(at / BLOCK_BYTES).or_insert_with(empty);
            block[(at % BLOCK_BYTES) as usize..][..piece.len()].copy_from_slice(piece);
        }
    }

    fn discard(&mut self, offset: u64, length: u64) {
        let end = offset.saturating_add(length);
        let covered: Vec<u64> = self
            .blocks
            .range(offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES))
            .map(|(number, _)| *number)
            .collect();
        for number in covered {
            let start = number * BLOCK_BYTES;
            let (first, last) = (offset.max(start) - start, end.min(start + BLOCK_BYTES) - start);
            if let Some(block) = self.blocks.get_mut(&number) {
                block[first as usize..last as usize].fill(0);
            }
            if last - first == BLOCK_BYTES {
                self.blocks.remove(&number);
            }
        }
    }

    /// Writes all blocks to a disk that has only zeros.
    fn write_to(&self, disk: &File) -> Result<()> {
        let mut run = Vec::new();
        let mut start = 0;
        for (number, block) in &self.blocks {
            let offset = number * BLOCK_BYTES;
            if start + run.len() as u64 != offset || run.len() >= MAX_RUN_BYTES {
                disk.write_all_at(&run, start)?;
                run.clear();
                start = offset;
            }
            run.extend_from_slice(block);
        }
        Ok(disk.write_all_at(&run, start)?)
    }
}

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
    /// The disk before the last flush that was replayed.
    durable: SparseImage,
    /// How many entries it contains.
    replayed: usize,
}

impl<'a> Replay<'a> {
    pub(super) fn new(log: &'a File, entries: &'a [LogEntry], (disk_bytes, torn_bytes): (u64, u64)) -> Self {
        Self { log, entries, disk_bytes, torn_bytes, durable: SparseImage::default(), replayed: 0 }
    }

    /// Makes a disk what the cut leaves. It is fast where cuts come in ascending order.
    pub(super) fn write_disk(&mut self, disk: &File, cut: CutPoint) -> Result<()> {
        let entries = &self.entries[..cut.position];
        let last_flush = entries.iter().rposition(LogEntry::is_flush).unwrap_or(0);
        if last_flush < self.replayed {
            (self.durable, self.replayed) = (SparseImage::default(), 0);
        }
        for entry in &entries[self.replayed..last_flush] {
            self.replay_durable(entry)?;
        }
        self.replayed = last_flush;
        fallocate(disk, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, self.disk_bytes)
            .context("clear the disk")?;
        self.durable.write_to(disk).context("write what is durable")?;
        for (index, entry) in entries.iter().enumerate().skip(last_flush) {
            if let LogEntry::Write(write) = entry {
                self.write_volatile(disk, (cut, index), write).context("write what is not durable")?;
            }
        }
        disk.sync_all().context("sync the disk")
    }

    fn replay_durable(&mut self, entry: &LogEntry) -> Result<()> {
        let LogEntry::Write(write) = entry else { return Ok(()) };
        match self.read_data(write)? {
            Some(bytes) => self.durable.write(write.offset, &bytes),
            None => self.durable.discard(write.offset, write.length),
        }
        Ok(())
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
            None if is_kept(write.offset) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(disk, flags, write.offset, write.length)?;
            }
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
        let mut replay = Replay::new(&log.file, &entries, (DISK_BYTES, 512));
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
