//! The reading of a whole disk: only a disk of which every byte was read, and is zero, is blank.
//!
//! ```text
//!  disk ──▶ direct reads of 4 MiB ──▶ zeros? ──▶ first data, digest
//!           a thread ahead            progress; each 4 GiB ──▶ a record in memory, for the next call
//! ```
//!
//! The record counts while the kernel vouches for what was read before: in the same boot, of the same disk, to which
//! nothing was written since. After a restart of the machine a disk is read again.

use std::fmt::Write as _;
use std::fs::{self, File, read_to_string};
use std::io;
use std::ops::{ControlFlow, Deref, DerefMut};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::{fmt, iter};

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::identity::{DiskIdentity, device_directory};
use super::places::BLOCK_BYTES;
use crate::dir::Dir;
use crate::metadata::FileMode;

/// The bytes of one read: large enough for the full speed of a disk, small enough to cancel at once.
const CHUNK_BYTES: usize = 4 << 20;
/// The chunks that are in memory: on a busy host, the reading does not wait for the thread that visits them.
const BUFFERS: usize = 4;
/// The bytes between two records: a minute's work of a slow disk is lost at most.
const RECORD_BYTES: u64 = 4 << 30;
/// The alignment of direct reads, a multiple of every sector size.
const ALIGNMENT: usize = 4096;

const RECORD_NAME: &str = "disk-reading";
const RECORD_HEADER: &str = "nodekeel disk reading, format 1";

/// The progress of the reading of a whole disk, which shows whether it is blank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReadingProgress {
    /// The bytes that were read, also by an earlier call.
    pub read_bytes: u64,
    /// The size of the disk, in bytes.
    pub disk_bytes: u64,
    /// The offset of the first byte other than zero. The rest is read for the token that names the contents.
    pub first_data: Option<u64>,
}

impl ReadingProgress {
    /// The progress of a reading, as in a test of what is shown of it.
    pub fn new(read_bytes: u64, disk_bytes: u64, first_data: Option<u64>) -> ReadingProgress {
        ReadingProgress { read_bytes, disk_bytes, first_data }
    }
}

/// Receives the progress of a reading, some times a second, and may cancel it.
#[derive(Clone)]
pub(super) struct ReadingHook(pub(super) Arc<dyn Fn(ReadingProgress) -> ControlFlow<()> + Send + Sync>);

impl fmt::Debug for ReadingHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadingHook")
    }
}

/// How a whole disk is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskReader<'a> {
    pub(super) hook: Option<&'a ReadingHook>,
    /// The directory of the record.
    pub(super) directory: Option<&'a Dir>,
}

/// What a reading has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiskContents {
    /// The offset of the first unexplained byte other than zero.
    pub(super) first_data: Option<u64>,
    /// A digest of all blocks other than zeros, with their offsets.
    pub(super) chain: [u8; 32],
}

impl DiskReader<'_> {
    /// Reads an open disk to its end. `explain` clears what does not count in a block at an offset, and returns whether the
    /// rest of it counts as data; a record of another purpose explains other blocks. None if the hook has canceled it:
    /// the next call resumes it.
    pub(super) fn read(
        self,
        disk: &File,
        size: u64,
        purpose: &[u8],
        explain: impl Fn(u64, &mut [u8]) -> bool,
    ) -> io::Result<Option<DiskContents>> {
        let witness = Witness::of(disk, purpose)?;
        let mut record = self.recorded(&witness, size).unwrap_or(Record {
            witness,
            read_bytes: 0,
            found: DiskContents { first_data: None, chain: [0; 32] },
        });
        let resumed = record.read_bytes;
        let mut recorded = resumed;
        let mut is_counted = false;
        let canceled = read_chunks(disk, resumed, size, disk.metadata()?.is_file(), |offset, chunk| {
            // The usual chunk is looked at once.
            let blocks: &mut [u8] = if is_zero(chunk) { &mut [] } else { &mut *chunk };
            for (at, block) in
                (offset..).step_by(BLOCK_BYTES as usize).zip(blocks.chunks_mut(BLOCK_BYTES as usize))
            {
                if is_zero(block) {
                    continue;
                }
                let is_data = explain(at, block);
                let Some(first) = block.iter().position(|byte| *byte != 0) else { continue };
                let found = &mut record.found;
                let mut hash = Sha256::new();
                hash.update(found.chain);
                hash.update(at.to_le_bytes());
                hash.update(&*block);
                found.chain = hash.finalize().into();
                if is_data {
                    found.first_data.get_or_insert(at + first as u64);
                }
            }
            record.read_bytes = offset + chunk.len() as u64;
            // At once, and not at the end of a reading of hours.
            if !is_counted {
                record.check_counters(&Witness::of(disk, purpose)?, resumed, disk)?;
                is_counted = true;
            }
            let progress = ReadingProgress::new(record.read_bytes, size, record.found.first_data);
            let flow = self.hook.map_or(ControlFlow::Continue(()), |hook| (hook.0)(progress));
            if flow.is_break() || record.read_bytes - recorded >= RECORD_BYTES {
                recorded = record.read_bytes;
                self.keep(&record, &Witness::of(disk, purpose)?)?;
            }
            Ok(flow)
        })?
        .is_break();
        if canceled {
            return Ok(None);
        }
        record.read_bytes = size;
        self.keep(&record, &Witness::of(disk, purpose)?)?;
        Ok(Some(record.found))
    }

    /// Removes the record: the disk is about to change.
    pub(super) fn forget(self) {
        if let Some(directory) = self.directory {
            // A record that stays is of a disk that has changed, and does not count.
            let _ = directory.remove_file(RECORD_NAME);
        }
    }

    /// The record of an earlier call, if it still counts.
    fn recorded(self, now: &Witness, size: u64) -> Option<Record> {
        let text = self.directory?.read_at_most(RECORD_NAME, 4096).ok()?;
        let record = Record::parse(std::str::from_utf8(&text).ok()?, now)?;
        (record.read_bytes <= size).then_some(record)
    }

    /// Records the progress, for the next call. An error if something was written to the disk since the reading began.
    fn keep(self, record: &Record, now: &Witness) -> io::Result<()> {
        if now.text != record.witness.text {
            return Err(io::Error::other("another program wrote to it while it was read: stop that program"));
        }
        if let Some(directory) = self.directory {
            // Without a record, the next call reads the disk from its start.
            let _ = directory.write(RECORD_NAME, record.encode().as_bytes(), FileMode::PRIVATE_FILE);
        }
        Ok(())
    }
}

/// What the kernel says of a disk: the same text later means that nothing was written to it in between.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Witness {
    /// A digest of purpose, boot, disk, and the kernel's counters of writes and discards, or an image's times.
    text: String,
    /// The kernel's counter; none for an image.
    sectors_read: Option<u64>,
}

impl Witness {
    fn of(disk: &File, purpose: &[u8]) -> io::Result<Witness> {
        let boot = read_to_string("/proc/sys/kernel/random/boot_id")?;
        let (changes, sectors_read) = match device_directory(disk)? {
            Some(directory) => {
                // What other programs have written is counted once it is on the disk.
                disk.sync_all()?;
                let [sectors_read, changes @ ..] = read_counters(&directory)?;
                let mut text = format!("{changes:?}");
                if directory.join("partition").exists() {
                    // Writes by way of the whole disk have its page cache, and its counters alone.
                    rustix::fs::sync();
                    write!(text, " {:?}", count_writes_beside_partitions(&directory.join(".."))?)
                        .expect("a String takes it");
                }
                (text, Some(sectors_read))
            }
            None => {
                let image = disk.metadata()?;
                let times = [image.mtime(), image.mtime_nsec(), image.ctime(), image.ctime_nsec()];
                (format!("{times:?}"), None)
            }
        };
        let mut hash = Sha256::new();
        for part in [purpose, boot.as_bytes(), DiskIdentity::of(disk)?.as_bytes(), changes.as_bytes()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Ok(Witness { text: encode_hex(&hash.finalize()), sectors_read })
    }
}

/// The sectors of a disk or partition that were read, written and discarded. The device mapper counts each flush as a
/// write without sectors.
///
/// *Source:* Linux `Documentation/block/stat.rst`.
fn read_counters(directory: &Path) -> io::Result<[u64; 3]> {
    let stat = read_to_string(directory.join("stat"))?;
    let fields: Vec<_> = stat.split_whitespace().collect();
    // A kernel before 4.18 counts no discards.
    let field = |index: usize| fields.get(index).and_then(|field| field.parse().ok()).unwrap_or_default();
    Ok([2, 6, 13].map(field))
}

/// The written and discarded sectors of a whole disk that came by way of none of its partitions, which the kernel counts for both.
fn count_writes_beside_partitions(disk: &Path) -> io::Result<[u64; 2]> {
    for _ in 0..1000 {
        let [_, before @ ..] = read_counters(disk)?;
        let mut beside = before;
        for entry in fs::read_dir(disk)? {
            let partition = entry?.path();
            if partition.join("partition").exists() {
                let [_, counters @ ..] = read_counters(&partition)?;
                for (sum, counter) in beside.iter_mut().zip(counters) {
                    *sum = sum.wrapping_sub(counter);
                }
            }
        }
        // The files are not read at one instant.
        if read_counters(disk)?[1..] == before {
            return Ok(beside);
        }
    }
    Err(io::Error::other("other partitions of its disk are written to without a pause"))
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    witness: Witness,
    read_bytes: u64,
    found: DiskContents,
}

impl Record {
    /// Checks that the kernel has counted what was read. One that counts no reads counts no writes either, and nothing vouches
    /// for what was read before.
    fn check_counters(&self, now: &Witness, resumed: u64, disk: &File) -> io::Result<()> {
        match (self.witness.sectors_read, now.sectors_read) {
            (Some(before), Some(now)) if now.wrapping_sub(before) * 512 < self.read_bytes - resumed => {
                let directory = device_directory(disk)?.unwrap_or_default();
                let whole =
                    if directory.join("partition").exists() { directory.join("..") } else { directory };
                let switch = whole.canonicalize()?.join("queue/iostats");
                Err(io::Error::other(format!(
                    "the kernel does not count its reads and writes, so that a write during the reading would go unnoticed: \
                     type: echo 1 > {}",
                    switch.display()
                )))
            }
            _ => Ok(()),
        }
    }

    fn encode(&self) -> String {
        let DiskContents { first_data, chain } = &self.found;
        let first = first_data.map_or("none".to_owned(), |offset| offset.to_string());
        let (witness, read, chain) = (&self.witness.text, self.read_bytes, encode_hex(chain));
        format!(
            "{RECORD_HEADER}\ndisk = {witness}\nread_bytes = {read}\nfirst_data = {first}\ndigest = {chain}\n"
        )
    }

    /// `None` unless it is complete, and of this disk.
    fn parse(text: &str, now: &Witness) -> Option<Record> {
        let mut lines = text.strip_suffix('\n')?.lines();
        let mut value = |key: &str| lines.next()?.strip_prefix(key);
        value(RECORD_HEADER)?;
        (value("disk = ")? == now.text).then_some(())?;
        let read_bytes = value("read_bytes = ")?.parse().ok()?;
        let first_data = match value("first_data = ")? {
            "none" => None,
            offset => Some(offset.parse().ok()?),
        };
        let chain = decode_hex(value("digest = ")?)?;
        Some(Record { witness: now.clone(), read_bytes, found: DiskContents { first_data, chain } })
    }
}

fn encode_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn decode_hex(text: &str) -> Option<[u8; 32]> {
    let bytes: Option<Vec<u8>> =
        (0..text.len() / 2).map(|at| u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()).collect();
    bytes?.try_into().ok()
}

fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    bytes.chunks(ZEROS.len()).all(|chunk| *chunk == ZEROS[..chunk.len()])
}

/// Memory for direct reads and writes, of zeros at first.
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    pub(super) fn new() -> Buffer {
        let bytes = vec![0; CHUNK_BYTES + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        Buffer { bytes, start }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + CHUNK_BYTES]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + CHUNK_BYTES]
    }
}

/// Reads a disk in chunks, in the order of their offsets; of a sparse image, one that is a hole is not visited. The next chunks
/// are read while one is visited.
pub(super) fn read_chunks(
    disk: &File,
    start: u64,
    size: u64,
    is_sparse: bool,
    mut visit: impl FnMut(u64, &mut [u8]) -> io::Result<ControlFlow<()>>,
) -> io::Result<ControlFlow<()>> {
    let (empty, to_fill) = mpsc::channel();
    let (full, to_visit) = mpsc::sync_channel(BUFFERS);
    for buffer in iter::repeat_with(Buffer::new).take(BUFFERS) {
        let _ = empty.send(buffer);
    }
    // All ends of the channels are moved: a thread that waits at one notices when the caller stops.
    thread::scope(move |scope| {
        scope.spawn(move || {
            let mut offset = start;
            while offset < size {
                // The caller has stopped.
                let Ok(mut buffer) = to_fill.recv() else { return };
                let read = match next_data(disk, is_sparse, offset) {
                    Ok(Some(data)) if data < size => {
                        offset = data;
                        let length = (size - offset).min(CHUNK_BYTES as u64) as usize;
                        disk.read_exact_at(&mut buffer[..length], offset).map(|()| length)
                    }
                    Ok(_) => return,
                    Err(error) => Err(error),
                };
                let next = read.as_ref().map_or(size, |length| offset + *length as u64);
                if full.send(read.map(|length| (offset, length, buffer))).is_err() {
                    return;
                }
                offset = next;
            }
        });
        for read in to_visit {
            let (offset, length, mut buffer) = read?;
            let flow = visit(offset, &mut buffer[..length])?;
            if flow.is_break() {
                return Ok(flow);
            }
            // The last buffers are not filled again.
            let _ = empty.send(buffer);
        }
        Ok(ControlFlow::Continue(()))
    })
}

/// The next offset with data: of an image, the kernel knows its holes, which are zeros. None if there is none.
fn next_data(disk: &File, is_sparse: bool, offset: u64) -> io::Result<Option<u64>> {
    if !is_sparse {
        return Ok(Some(offset));
    }
    match rustix::fs::seek(disk, SeekFrom::Data(offset)) {
        Ok(data) => Ok(Some(data / BLOCK_BYTES * BLOCK_BYTES)),
        Err(Errno::NXIO) => Ok(None),
        // A file system that does not know its holes.
        Err(Errno::INVAL | Errno::NOTSUP) => Ok(Some(offset)),
        Err(errno) => Err(errno.into()),
    }
}
