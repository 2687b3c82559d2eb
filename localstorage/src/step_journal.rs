//! A small state that survives a kill at any point, and resumable step lists on top of it.
//!
//! A [`StepJournal`] keeps one record in two files, `NAME.0` and `NAME.1`, which are written in turn, in
//! place, with a sync after each write. The newest complete record is the state; a record that was being
//! written at a power cut is ignored, and the older one is the state, also if the other file can't be read.
//! Nothing is ever renamed, so this also holds on vfat, where a rename is not atomic. Both files get 64 KiB
//! when they are created and keep their blocks: a commit of a record that fits changes neither their sizes
//! nor, on vfat, their chains of clusters, and a full disk stops only a longer one. Where a longer record
//! extends a file on vfat, a power cut at that moment may make the file system read-only until it is checked
//! with fsck; the state is kept.
//!
//! While the files are created, the empty file `NAME.new` exists. Only then a journal without a complete
//! record is a new one; otherwise empty or unknown files are damaged, and are not changed.
//!
//! ```text
//!  offset  0        8        12       16           24         28
//!          magic    version  length   generation   checksum   content, `length` bytes; what follows is older
//!          NKEELJNL 1        u32      u64          u32        all little-endian
//! ```
//!
//! The generation grows by one with each record, and its lowest bit is the number of the file. The checksum
//! is the CRC-32C of all other fields. It has to detect cut or torn writes, as the write-ahead logs of etcd
//! and the metadata of XFS and ext4 do with the same sum: it detects each run of up to 32 wrong bits, and
//! accepts a random mix once in 2³². It does not protect against an attacker, and neither would a longer hash
//! without a key.
//!
//! [`StepList`] is a list of named steps, each of which may be repeated; the journal records the next one.
//!
//! ```
//! use nodekeel_localstorage::Dir;
//! use nodekeel_localstorage::step_journal::{StepJournal, StepList};
//!
//! # let temporary = tempfile::tempdir()?;
//! let dir = Dir::open(temporary.path())?;
//! let steps = StepList::try_new(["format", "mount"])?;
//! // After a crash the same lines resume at the unrecorded step, with the recorded state.
//! let mut run = steps.start_run(StepJournal::open(&dir, "setup")?, b"")?;
//! while let Some(step) = run.current_step() {
//!     let state = match step {
//!         "format" => b"formatted".to_vec(),
//!         _ => [run.recorded_state(), b", mounted"].concat(),
//!     };
//!     run.complete_step(state)?;
//! }
//! assert_eq!(run.recorded_state(), b"formatted, mounted");
//! run.remove_journal()?;
//! # Ok::<(), anyhow::Error>(())
//! ```

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::io::Errno;
use thiserror::Error;

use crate::dir::Dir;
use crate::error::{RejectReason, resolve_error};
use crate::file_name::{FileName, InvalidName};
use crate::metadata::{FileKind, Metadata};
use crate::syscalls;

mod record;
mod step_list;

pub use record::{JournalRecord, MAX_CONTENT_BYTES, RecordFormatError};
#[cfg(any(test, feature = "testing"))]
pub(crate) use step_list::parse_step_progress;
pub use step_list::{InvalidStepList, StepEvent, StepList, StepListError, StepRun};

/// Why a step journal could not be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The name is not a valid file name, or too long for four more bytes.
    #[error("invalid step journal name {name:?}")]
    InvalidName {
        /// The requested name.
        name: String,
        /// Why it is invalid.
        source: InvalidName,
    },
    /// It cannot be opened, created or read.
    #[error("can't open step journal {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process, or another part of this one, has it open.
    #[error("step journal {} is in use by another process: stop that process", .path.display())]
    InUse {
        /// The locked file.
        path: PathBuf,
    },
    /// Both records are damaged, empty or missing. A crash cannot cause this: the disk did, or another program.
    /// Nothing was changed. Restore the files, or remove both to start over, if the steps may be started over.
    #[error(
        "both copies (.0 and .1) of step journal {} are damaged: restore both files, or remove both to start \
         over",
        .path.display()
    )]
    Damaged {
        /// The file with the first record; the name of the second differs in its last byte.
        path: PathBuf,
    },
    /// A newer release has written it: run that release.
    #[error(
        "step journal {} was written by a newer release (format {version}): run that release",
        .path.display()
    )]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// Its format version.
        version: u32,
    },
    /// It cannot be written. The state is the old one or the new one; a retry may help.
    #[error("can't write step journal {}", .path.display())]
    Commit {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A record is longer than [`MAX_CONTENT_BYTES`].
    #[error(
        "can't write {length} bytes into step journal {}: its records are limited to {MAX_CONTENT_BYTES} \
         bytes",
        .path.display()
    )]
    RecordTooLong {
        /// The file.
        path: PathBuf,
        /// The length of the record.
        length: usize,
    },
    /// Its files cannot be removed. Its state is removed all the same; a retry may help.
    #[error("can't remove step journal {}", .path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl JournalError {
    /// The file system or the quota has no free space. A retry helps after something was removed.
    pub fn is_full(&self) -> bool {
        let (Self::Open { source, .. } | Self::Commit { source, .. }) = self else { return false };
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Another process, or another part of this one, has it open. A retry helps after it was closed.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse { .. })
    }
}

/// The size in bytes of a new file, and the unit in which it grows: far more than the state of a few steps.
const SLOT_BYTES: usize = 64 << 10;

/// A small state that survives a kill at any point. The [module](self) describes the format.
///
/// An open journal is locked: one process at a time can open it, and only once.
pub struct StepJournal {
    dir: Dir,
    slots: [JournalSlot; 2],
    /// The generation of the newest complete record.
    generation: u64,
    content: Vec<u8>,
}

#[derive(Debug)]
struct JournalSlot {
    name: OsString,
    /// None if the file does not exist yet.
    file: Option<OwnedFd>,
}

impl JournalSlot {
    /// Its record; no bytes if the file does not exist.
    fn read(&self) -> io::Result<Vec<u8>> {
        self.file.as_ref().map_or_else(|| Ok(Vec::new()), read_slot)
    }

    /// Writes a record at the start of the file, durably.
    fn write(&mut self, dir: &Dir, bytes: &[u8]) -> io::Result<()> {
        let file = self.allocate(dir, bytes.len())?;
        syscalls::write_at(file, bytes, 0)?;
        syscalls::sync(file)?;
        Ok(())
    }

    /// Creates the file if it does not exist, and gives it blocks for this many bytes, durably.
    fn allocate(&mut self, dir: &Dir, bytes: usize) -> io::Result<&OwnedFd> {
        let file = match self.file.take() {
            Some(file) => file,
            // The file may exist: a sync after its creation may have failed.
            None => match open_slot(dir, &self.name)? {
                Some(file) => file,
                None => syscalls::create_new_file(dir, &self.name)?,
            },
        };
        let file = self.file.insert(file);
        if syscalls::stat(&*file)?.st_size < bytes as i64 {
            syscalls::allocate(&*file, bytes.next_multiple_of(SLOT_BYTES) as u64)?;
            // vfat writes the chain of clusters by the first sync, and the new size by the second: in between, a
            // power cut leaves a file that can be read.
            syscalls::sync(dir)?;
            syscalls::sync(&*file)?;
        }
        Ok(file)
    }
}

/// Unlocks at once. Closing alone would not: a child that another thread is starting has the descriptor, and
/// the lock with it, until it executes its program.
impl Drop for JournalSlot {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            syscalls::unlock(file);
        }
    }
}

impl StepJournal {
    /// Opens the journal with this name, or creates it without a state. The reported state is durable.
    ///
    /// # Errors
    /// [`JournalError::InUse`] while it is open elsewhere; [`JournalError::Damaged`] and
    /// [`JournalError::NewerFormat`], with nothing changed; [`JournalError::InvalidName`];
    /// [`JournalError::Open`].
    pub fn open(dir: &Dir, name: &str) -> Result<Self, JournalError> {
        let names = JournalNames::try_new(name)?;
        let path = dir.path().join(&names.slots[0]);
        let open_error = |source: io::Error| JournalError::Open { path: path.clone(), source };
        let dir = dir.open_dir("").map_err(|error| open_error(io::Error::other(error)))?;
        let Some(file) = lock_first_slot(&dir, &names)? else {
            return Err(JournalError::InUse { path });
        };
        let [first, second] = names.slots;
        let first = JournalSlot { name: first, file: Some(file) };
        let second = JournalSlot { file: open_slot(&dir, &second).map_err(open_error)?, name: second };
        let is_being_created = open_slot(&dir, &names.marker).map_err(open_error)?.is_some();
        let slots = [first, second];
        let contents = [slots[0].read(), slots[1].read()];
        let newest = newest_record(contents, is_being_created, &path)?;
        let (generation, content) = newest.unwrap_or_default();
        let mut journal = Self { dir, slots, generation, content };
        journal.sync_newest_record().map_err(open_error)?;
        if is_being_created {
            for slot in &mut journal.slots {
                slot.allocate(&journal.dir, SLOT_BYTES).map_err(open_error)?;
            }
            journal.unlink_file(&names.marker).map_err(open_error)?;
        }
        Ok(journal)
    }

    /// The last committed state; none in a new journal.
    pub fn committed_state(&self) -> Option<&[u8]> {
        (!self.content.is_empty()).then_some(self.content.as_slice())
    }

    /// The file with the first record.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join(&self.slots[0].name)
    }

    /// Makes `content` the state, durably. Empty content removes the state.
    ///
    /// # Errors
    /// [`JournalError::RecordTooLong`], and [`JournalError::Commit`], after which the journal keeps
    /// the old state, and a later open finds the old one or the new one.
    pub fn commit(&mut self, content: &[u8]) -> Result<(), JournalError> {
        let record = JournalRecord { generation: self.generation + 1, content };
        let bytes = record
            .to_bytes()
            .ok_or_else(|| JournalError::RecordTooLong { path: self.path(), length: content.len() })?;
        self.write_record(record.generation, &bytes)
            .map_err(|source| JournalError::Commit { path: self.path(), source })?;
        self.generation = record.generation;
        self.content = content.to_vec();
        Ok(())
    }

    /// Removes both files, durably: a kill at any point leaves the old state or none.
    ///
    /// # Errors
    /// [`JournalError::Commit`] with the state as it was, [`JournalError::Remove`] where only files are left.
    pub fn remove_files(mut self) -> Result<(), JournalError> {
        // Twice, so that neither file restores a state without the other.
        self.commit(b"")?;
        self.commit(b"")?;
        self.unlink_files().map_err(|source| JournalError::Remove { path: self.path(), source })
    }

    /// Removes the first file last: it holds the lock.
    fn unlink_files(&self) -> io::Result<()> {
        self.slots.iter().rev().try_for_each(|slot| self.unlink_file(&slot.name))
    }

    fn unlink_file(&self, name: &OsStr) -> io::Result<()> {
        match syscalls::unlink(&self.dir, name) {
            Ok(()) | Err(Errno::NOENT) => Ok(syscalls::sync(&self.dir)?),
            Err(source) => Err(source.into()),
        }
    }

    /// Writes the newest record once more in place. The record that was read may not be on the disk: its
    /// writer may have been killed before the sync, or the sync may have failed. The next record overwrites
    /// the older one, so this one must be durable first. A torn write does no harm: the bytes are the same,
    /// or the older record is complete.
    fn sync_newest_record(&mut self) -> io::Result<()> {
        // The process that created or extended the files may have been killed before this.
        syscalls::sync(&self.dir)?;
        let content = std::mem::take(&mut self.content);
        let record = JournalRecord { generation: self.generation, content: &content };
        let written = match record.to_bytes() {
            Some(bytes) => self.write_record(self.generation, &bytes),
            None => Ok(()),
        };
        self.content = content;
        written
    }

    fn write_record(&mut self, generation: u64, bytes: &[u8]) -> io::Result<()> {
        self.slots[usize::from(generation % 2 == 1)].write(&self.dir, bytes)
    }
}

/// Omits the state, which may be a secret.
impl fmt::Debug for StepJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("path", &self.path())
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// The generation and the content of the newest complete record; none in a new journal.
///
/// A file that can't be read counts as a torn one if the other has a complete record: on vfat, a power cut
/// while a file grows can leave it longer than its chain of clusters.
fn newest_record(
    contents: [io::Result<Vec<u8>>; 2],
    is_being_created: bool,
    path: &Path,
) -> Result<Option<(u64, Vec<u8>)>, JournalError> {
    let mut newest: Option<(u64, Vec<u8>)> = None;
    let mut unreadable = None;
    for (slot, content) in (0..).zip(contents) {
        let bytes = match content {
            Ok(bytes) => bytes,
            Err(source) => {
                unreadable = Some(JournalError::Open { path: path.to_owned(), source });
                continue;
            }
        };
        match JournalRecord::from_bytes(&bytes) {
            // A record in the wrong file was copied there.
            Ok(JournalRecord { generation, content })
                if generation % 2 == slot && newest.as_ref().is_none_or(|newest| newest.0 < generation) =>
            {
                newest = Some((generation, content.to_vec()));
            }
            Err(RecordFormatError::NewerVersion { version }) => {
                return Err(JournalError::NewerFormat { path: path.to_owned(), version });
            }
            Ok(_) | Err(_) => {}
        }
    }
    match (newest, unreadable) {
        (Some(newest), _) => Ok(Some(newest)),
        (None, Some(unreadable)) => Err(unreadable),
        (None, None) if is_being_created => Ok(None),
        (None, None) => Err(JournalError::Damaged { path: path.to_owned() }),
    }
}

/// The names of a journal's files.
#[derive(Debug)]
struct JournalNames {
    slots: [OsString; 2],
    /// Exists while the slots are being created.
    marker: OsString,
}

impl JournalNames {
    fn try_new(name: &str) -> Result<Self, JournalError> {
        let with_suffix = |suffix| match FileName::try_new(format!("{name}.{suffix}")) {
            Ok(name) => Ok(name.as_os_str().to_owned()),
            Err(source) => Err(JournalError::InvalidName { name: name.to_owned(), source }),
        };
        Ok(Self { slots: [with_suffix("0")?, with_suffix("1")?], marker: with_suffix("new")? })
    }
}

/// Opens or creates the first file, and locks it. None if it is locked already.
fn lock_first_slot(dir: &Dir, names: &JournalNames) -> Result<Option<OwnedFd>, JournalError> {
    let [first, second] = &names.slots;
    let path = dir.path().join(first);
    let open_error = |source| JournalError::Open { path: path.clone(), source };
    loop {
        let file = match open_slot(dir, first).map_err(open_error)? {
            Some(file) => file,
            None => {
                match open_slot(dir, second).map_err(open_error)? {
                    None => create_marker(dir, &names.marker).map_err(open_error)?,
                    // The first file was lost.
                    Some(file) => drop(newest_record([Ok(Vec::new()), read_slot(&file)], false, &path)?),
                }
                match syscalls::create_new_file(dir, first) {
                    Err(Errno::EXIST) => continue,
                    created => created.map_err(|source| open_error(source.into()))?,
                }
            }
        };
        if !syscalls::try_lock(&file).map_err(|source| open_error(source.into()))? {
            return Ok(None);
        }
        // Another process may have removed the journal since the file was opened.
        if syscalls::stat(&file).map_err(|source| open_error(source.into()))?.st_nlink > 0 {
            return Ok(Some(file));
        }
    }
}

/// Creates the marker, durably before the files: a power cut may leave those in any state. It may exist
/// already, and does no harm beside a complete record.
fn create_marker(dir: &Dir, name: &OsStr) -> io::Result<()> {
    match syscalls::create_new_file(dir, name) {
        Ok(_) | Err(Errno::EXIST) => Ok(syscalls::sync(dir)?),
        Err(source) => Err(source.into()),
    }
}

fn open_slot(dir: &Dir, name: &OsString) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY;
    match syscalls::open_beneath(dir, Path::new(name), flags) {
        Ok(file) if Metadata::from_stat(&syscalls::stat(&file)?).kind == FileKind::File => Ok(Some(file)),
        Ok(_) => Err(RejectReason::NotAFile.into()),
        Err(Errno::NOENT) => Ok(None),
        Err(source) => Err(resolve_error(source)),
    }
}

/// Reads the record. What follows does not belong to it, and on vfat may not even be readable.
fn read_slot(file: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for length in [|_: &[u8]| record::HEADER_BYTES, record::record_bytes] {
        let length = length(&bytes);
        while bytes.len() < length {
            let read = bytes.len();
            bytes.resize(length, 0);
            match syscalls::read(file.as_fd(), &mut bytes[read..])? {
                0 => {
                    bytes.truncate(read);
                    return Ok(bytes);
                }
                n => bytes.truncate(read + n),
            }
        }
    }
    Ok(bytes)
}
