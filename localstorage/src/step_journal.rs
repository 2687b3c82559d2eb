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
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use self::slot::{JournalSlot, SLOT_BYTES, open_slot, read_slot};
use crate::dir::Dir;
use crate::file_name::FileName;
use crate::syscalls;

mod error;
mod record;
mod slot;
mod step_list;

pub use error::JournalError;
pub use record::{JournalRecord, MAX_CONTENT_BYTES, RecordFormatError};
#[cfg(any(test, feature = "testing"))]
pub(crate) use step_list::parse_step_progress;
pub use step_list::{InvalidStepList, StepEvent, StepList, StepListError, StepRun};

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
        // Before anything is read: this process would not see what another one commits after its read.
        let Some(file) = lock_first_slot(&dir, &names)? else {
            return Err(JournalError::InUse { path });
        };
        let [first, second] = names.slots;
        let first = JournalSlot { name: first, file: Some(file) };
        let second = JournalSlot { file: open_slot(&dir, &second).map_err(open_error)?, name: second };
        // Under the lock: the process that creates a journal holds it until it has removed the marker.
        let is_being_created = open_slot(&dir, &names.marker).map_err(open_error)?.is_some();
        let slots = [first, second];
        let contents = [slots[0].read(), slots[1].read()];
        let newest = newest_record(contents, is_being_created, &path)?;
        let (generation, content) = newest.unwrap_or_default();
        let mut journal = Self { dir, slots, generation, content };
        journal.sync_newest_record().map_err(open_error)?;
        if is_being_created {
            for slot in &mut journal.slots {
                // Later commits neither change the sizes of the files nor fail on a full disk.
                slot.allocate(&journal.dir, SLOT_BYTES).map_err(open_error)?;
            }
            // A complete record is durable by now, if only one without content: files without any are damaged
            // from here on.
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
        // Only now that the record is durable: after an error, the next commit writes the same file again.
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
            // Also if it is missing: a killed call may have removed it without a sync.
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
        // A torn write hits the file of the older record, and never the newest complete one.
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
            // Even if the other record can be read: it is older, and a commit would overwrite the newer state.
            Err(RecordFormatError::NewerVersion { version }) => {
                return Err(JournalError::NewerFormat { path: path.to_owned(), version });
            }
            // A record that is older, torn, or in the wrong file.
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
                    // Neither file exists: this is a new journal.
                    None => create_marker(dir, &names.marker).map_err(open_error)?,
                    // The first file was lost.
                    Some(file) => drop(newest_record([Ok(Vec::new()), read_slot(&file)], false, &path)?),
                }
                match syscalls::create_new_file(dir, first) {
                    // Another process has created it in between: its file is opened and its lock is tried.
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
/// already, and does no harm next to a complete record.
fn create_marker(dir: &Dir, name: &OsStr) -> io::Result<()> {
    match syscalls::create_new_file(dir, name) {
        Ok(_) | Err(Errno::EXIST) => Ok(syscalls::sync(dir)?),
        Err(source) => Err(source.into()),
    }
}
