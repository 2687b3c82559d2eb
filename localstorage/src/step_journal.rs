//! A small state that survives a kill at any point, and resumable step lists on top of it.
//!
//! A [`StepJournal`] keeps one record in two files, `NAME.0` and `NAME.1`, which are written in turn, in
//! place, with a sync after each write. The newest complete record is the state; a record that was being
//! written at a power cut is ignored, and the older one is the state. Nothing is ever renamed, so this also
//! holds on vfat, where a rename is not atomic. Both files keep their blocks, so a full disk stops only a
//! record that is longer than any before it.
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

use std::ffi::OsString;
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
    /// The name is not a valid file name, or too long for two more bytes.
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
    #[error("step journal {} is in use", .path.display())]
    InUse {
        /// The locked file.
        path: PathBuf,
    },
    /// Both records are damaged. A crash cannot cause this: the disk did, or another program. Nothing was
    /// changed. Restore the files, or remove both to start over, if the steps may be started over.
    #[error("both records of step journal {} are damaged", .path.display())]
    Damaged {
        /// The file with the first record; the name of the second differs in its last byte.
        path: PathBuf,
    },
    /// A newer release has written it: run that release.
    #[error("step journal {} was written by a newer release (format {version})", .path.display())]
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
    #[error("record of {length} bytes is too long for step journal {}", .path.display())]
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
        let names = [slot_name(name, 0)?, slot_name(name, 1)?];
        let path = dir.path().join(&names[0]);
        let open_error = |source: io::Error| JournalError::Open { path: path.clone(), source };
        let dir = dir.open_dir("").map_err(|error| open_error(io::Error::other(error)))?;
        let [first, second] = names;
        let Some(file) = lock_first_slot(&dir, &first).map_err(open_error)? else {
            return Err(JournalError::InUse { path });
        };
        let first = JournalSlot { name: first, file: Some(file) };
        let file = open_slot(&dir, &second).map_err(open_error)?;
        let slots = [first, JournalSlot { name: second, file }];
        let mut contents = [Vec::new(), Vec::new()];
        for (content, slot) in contents.iter_mut().zip(&slots) {
            if let Some(file) = &slot.file {
                *content = read_slot(file).map_err(open_error)?;
            }
        }
        let newest = newest_record(&contents, &path)?;
        let (generation, content) =
            newest.map_or((0, Vec::new()), |record| (record.generation, record.content.to_vec()));
        let mut journal = Self { dir, slots, generation, content };
        journal.sync_newest_record().map_err(open_error)?;
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
        for slot in self.slots.iter().rev() {
            match syscalls::unlink(&self.dir, &slot.name) {
                Ok(()) | Err(Errno::NOENT) => syscalls::sync(&self.dir)?,
                Err(source) => return Err(source.into()),
            }
        }
        Ok(())
    }

    /// Writes the newest record once more in place. The record that was read may not be on the disk: its
    /// writer may have been killed before the sync, or the sync may have failed. The next record overwrites
    /// the older one, so this one must be durable first. A torn write does no harm: the bytes are the same,
    /// or the older record is complete.
    fn sync_newest_record(&mut self) -> io::Result<()> {
        let content = std::mem::take(&mut self.content);
        let record = JournalRecord { generation: self.generation, content: &content };
        let written = match record.to_bytes() {
            Some(bytes) => self.write_record(self.generation, &bytes),
            None => Ok(()),
        };
        self.content = content;
        written?;
        // The process that created the files may have been killed before this.
        syscalls::sync(&self.dir)?;
        Ok(())
    }

    fn write_record(&mut self, generation: u64, bytes: &[u8]) -> io::Result<()> {
        let slot = &mut self.slots[usize::from(generation % 2 == 1)];
        let file = match &slot.file {
            Some(file) => file,
            None => {
                // The file may exist: a sync after its creation may have failed.
                let file = match open_slot(&self.dir, &slot.name)? {
                    Some(file) => file,
                    None => syscalls::create_new_file(&self.dir, &slot.name)?,
                };
                syscalls::sync(&self.dir)?;
                slot.file.insert(file)
            }
        };
        syscalls::write_at(file, bytes, 0)?;
        syscalls::sync(file)?;
        Ok(())
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

/// The newest complete record; none in a new journal.
fn newest_record<'a>(
    contents: &'a [Vec<u8>; 2],
    path: &Path,
) -> Result<Option<JournalRecord<'a>>, JournalError> {
    let mut newest: Option<JournalRecord<'a>> = None;
    for (slot, content) in (0..).zip(contents) {
        match JournalRecord::from_bytes(content) {
            // A record in the wrong file was copied there.
            Ok(record) if record.generation % 2 != slot => {}
            Ok(record) if newest.is_none_or(|other| other.generation < record.generation) => {
                newest = Some(record)
            }
            Ok(_) => {}
            Err(RecordFormatError::NewerVersion { version }) => {
                return Err(JournalError::NewerFormat { path: path.to_owned(), version });
            }
            Err(_) => {}
        }
    }
    // If the creation was killed, the first file has no more than its header. The second is empty, since it
    // is written only after the first is durable.
    let is_new = contents[0].len() <= record::HEADER_BYTES && contents[1].is_empty();
    if newest.is_none() && !is_new {
        return Err(JournalError::Damaged { path: path.to_owned() });
    }
    Ok(newest)
}

fn slot_name(name: &str, slot: u8) -> Result<OsString, JournalError> {
    match FileName::try_new(format!("{name}.{slot}")) {
        Ok(name) => Ok(name.as_os_str().to_owned()),
        Err(source) => Err(JournalError::InvalidName { name: name.to_owned(), source }),
    }
}

/// Opens or creates the first file, and locks it. None if it is locked already.
fn lock_first_slot(dir: &Dir, name: &OsString) -> io::Result<Option<OwnedFd>> {
    loop {
        let file = match open_slot(dir, name)? {
            Some(file) => file,
            None => match syscalls::create_new_file(dir, name) {
                Err(Errno::EXIST) => continue,
                created => created?,
            },
        };
        if !syscalls::try_lock(&file)? {
            return Ok(None);
        }
        // Another process may have removed the journal since the file was opened.
        if syscalls::stat(&file)?.st_nlink > 0 {
            return Ok(Some(file));
        }
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

fn read_slot(file: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut buffer = [0; 4096];
    // Bytes beyond the longest record do not belong to a record.
    while content.len() < record::HEADER_BYTES + MAX_CONTENT_BYTES {
        match syscalls::read(file.as_fd(), &mut buffer)? {
            0 => break,
            n => content.extend_from_slice(&buffer[..n]),
        }
    }
    Ok(content)
}
