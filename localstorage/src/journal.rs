//! A small state that survives being killed at any point, and resumable lists of steps on top of it.
//!
//! A [`Journal`] keeps one record in two files, `NAME.0` and `NAME.1`, which are written in turn, in place, each with a
//! sync after it. The newest record that is whole is the state; one that was being written when the power went is as
//! good as not there, and the older one is the state. Nothing is ever renamed, so this also holds on vfat, where a
//! rename is not atomic; and since both files keep their blocks, a full disk stops only a record that is longer than
//! any before it.
//!
//! ```text
//!  offset  0        8        12       16           24         28
//!          magic    version  length   generation   checksum   content, `length` bytes; what follows is older
//!          NKEELJNL 1        u32      u64          u32        all little-endian
//! ```
//!
//! The generation grows by one with each record, and its lowest bit is the number of the file. The checksum is the
//! CRC-32C of all else. It has to find writes that were cut or torn, as the write-ahead logs of etcd and the metadata of
//! XFS and ext4 do with the same sum: it finds each run of up to 32 wrong bits, and lets a random mix pass once in 2³².
//! It is no defence against an attacker, and neither would a longer hash without a key be.
//!
//! [`Steps`] is a list of named steps, each of which may be done twice; the journal records the next one.
//!
//! ```
//! use nodekeel_localstorage::Dir;
//! use nodekeel_localstorage::journal::{Journal, Steps};
//!
//! # let temporary = tempfile::tempdir()?;
//! let dir = Dir::open(temporary.path())?;
//! let steps = Steps::try_new(["format", "mount"])?;
//! // After a crash the same lines go on with the step that was not done, and with the state that was recorded.
//! let mut run = steps.start(Journal::open(&dir, "setup")?, b"")?;
//! while let Some(step) = run.step() {
//!     let state = match step {
//!         "format" => b"formatted".to_vec(),
//!         _ => [run.state(), b", mounted"].concat(),
//!     };
//!     run.done(state)?;
//! }
//! assert_eq!(run.state(), b"formatted, mounted");
//! run.finish()?;
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

use crate::calls;
use crate::dir::Dir;
use crate::error::{Refusal, resolved};
use crate::metadata::{FileKind, Metadata};
use crate::name::{InvalidName, Name};

mod record;
mod steps;

pub use record::{MAX_CONTENT, Record, Torn};
#[cfg(any(test, feature = "testing"))]
pub(crate) use steps::parse_steps;
pub use steps::{InvalidSteps, Point, Run, Steps, StepsError};

/// What keeps a journal from being read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// No file can have that name, or it is too long for two more bytes.
    #[error("name a journal {name:?}")]
    Name {
        /// What was asked for.
        name: String,
        /// What is wrong with it.
        source: InvalidName,
    },
    /// It can't be opened, created or read. The source says why.
    #[error("open journal {}", .path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process, or another part of this one, has it open.
    #[error("journal {} is in use", .path.display())]
    InUse {
        /// The file that is locked.
        path: PathBuf,
    },
    /// Both records are damaged. No crash does that: the disk has, or somebody. Nothing was changed; restore the files,
    /// or remove both to begin anew, if what they were about may be begun anew.
    #[error("both records of journal {} are damaged", .path.display())]
    Damaged {
        /// The file with the first record; the second one's differs in its last byte.
        path: PathBuf,
    },
    /// A newer program has written it: run that one.
    #[error("journal {} has format {version}, which is newer than this program", .path.display())]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// It can't be written. The state is the old one, or the new one; a retry may help.
    #[error("write journal {}", .path.display())]
    Commit {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A record is longer than [`MAX_CONTENT`].
    #[error("a record of {length} bytes is too long for journal {}", .path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The length of the record.
        length: usize,
    },
    /// Its files can't be removed. Its state is gone all the same; a retry may help.
    #[error("remove journal {}", .path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl Error {
    /// The file system, or the quota, has no space left. A retry helps once something was removed.
    pub fn is_full(&self) -> bool {
        let (Self::Open { source, .. } | Self::Commit { source, .. }) = self else { return false };
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }

    /// Another process, or another part of this one, has it open. A retry helps when that is done.
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse { .. })
    }
}

/// A small state that survives being killed at any point. Its module's text has the format.
///
/// Open journals are locked: one process at a time, and once within it.
pub struct Journal {
    dir: Dir,
    slots: [Slot; 2],
    /// The newest whole record.
    generation: u64,
    content: Vec<u8>,
}

#[derive(Debug)]
struct Slot {
    name: OsString,
    /// None where there is no such file yet.
    file: Option<OwnedFd>,
}

/// Unlocks at once. Closing alone would not: a child that another thread is starting has the descriptor until it
/// executes its program, and the lock with it.
impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            calls::unlock(file);
        }
    }
}

impl Journal {
    /// Opens the journal of that name, or creates it with no state. What it reports as its state is durable.
    ///
    /// # Errors
    /// [`Error::InUse`] while it is open elsewhere; [`Error::Damaged`] and [`Error::Newer`], with nothing changed;
    /// [`Error::Name`]; [`Error::Open`].
    pub fn open(dir: &Dir, name: &str) -> Result<Self, Error> {
        let names = [slot_name(name, 0)?, slot_name(name, 1)?];
        let path = dir.path().join(&names[0]);
        let wrong = |source: io::Error| Error::Open { path: path.clone(), source };
        let dir = dir.open_dir("").map_err(|error| wrong(io::Error::other(error)))?;
        let [first, second] = names;
        let Some(file) = lock(&dir, &first).map_err(wrong)? else { return Err(Error::InUse { path }) };
        let first = Slot { name: first, file: Some(file) };
        let file = open_slot(&dir, &second).map_err(wrong)?;
        let slots = [first, Slot { name: second, file }];
        let mut contents = [Vec::new(), Vec::new()];
        for (content, slot) in contents.iter_mut().zip(&slots) {
            if let Some(file) = &slot.file {
                *content = read_slot(file).map_err(wrong)?;
            }
        }
        let newest = newest(&contents, &path)?;
        let (generation, content) = newest.map_or((0, Vec::new()), |it| (it.generation, it.content.to_vec()));
        let mut journal = Self { dir, slots, generation, content };
        journal.settle().map_err(wrong)?;
        Ok(journal)
    }

    /// What was last committed; nothing in a new journal.
    pub fn state(&self) -> Option<&[u8]> {
        (!self.content.is_empty()).then_some(self.content.as_slice())
    }

    /// The file with the first record.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join(&self.slots[0].name)
    }

    /// Makes this the state, durably. No bytes are no state.
    ///
    /// # Errors
    /// [`Error::TooLong`], and [`Error::Commit`], after which the journal goes on with the old state, and a later open
    /// finds the old one or the new one.
    pub fn commit(&mut self, content: &[u8]) -> Result<(), Error> {
        let record = Record { generation: self.generation + 1, content };
        let bytes =
            record.to_bytes().ok_or_else(|| Error::TooLong { path: self.path(), length: content.len() })?;
        self.put(record.generation, &bytes).map_err(|source| Error::Commit { path: self.path(), source })?;
        self.generation = record.generation;
        self.content = content.to_vec();
        Ok(())
    }

    /// Removes both files, durably: whenever it is killed, there is the old state or none.
    ///
    /// # Errors
    /// [`Error::Commit`] with the state as it was, [`Error::Remove`] where only files are left.
    pub fn remove(mut self) -> Result<(), Error> {
        // Twice, so that neither file brings a state back without the other.
        self.commit(b"")?;
        self.commit(b"")?;
        self.unlink().map_err(|source| Error::Remove { path: self.path(), source })
    }

    /// The first file goes last: it holds the lock.
    fn unlink(&self) -> io::Result<()> {
        for slot in self.slots.iter().rev() {
            match calls::unlink(&self.dir, &slot.name) {
                Ok(()) | Err(Errno::NOENT) => calls::sync(&self.dir)?,
                Err(source) => return Err(source.into()),
            }
        }
        Ok(())
    }

    /// Writes the newest record once more where it is. What was read may not be on the disk: its writer may have been
    /// killed before the sync, or the sync may have failed. The next record takes the place of the older one, so this one
    /// has to be there first. A write that is torn does no harm: the bytes are the same, or the older record is whole.
    fn settle(&mut self) -> io::Result<()> {
        let content = std::mem::take(&mut self.content);
        let record = Record { generation: self.generation, content: &content };
        let settled = match record.to_bytes() {
            Some(bytes) => self.put(self.generation, &bytes),
            None => Ok(()),
        };
        self.content = content;
        settled?;
        // Whoever created the files may have been killed before this.
        calls::sync(&self.dir)?;
        Ok(())
    }

    fn put(&mut self, generation: u64, bytes: &[u8]) -> io::Result<()> {
        let slot = &mut self.slots[usize::from(generation % 2 == 1)];
        let file = match &slot.file {
            Some(file) => file,
            None => {
                // It may be there: a sync after its creation may have failed.
                let file = match open_slot(&self.dir, &slot.name)? {
                    Some(file) => file,
                    None => calls::create_new(&self.dir, &slot.name)?,
                };
                calls::sync(&self.dir)?;
                slot.file.insert(file)
            }
        };
        calls::write_at(file, bytes, 0)?;
        calls::sync(file)?;
        Ok(())
    }
}

/// Without its state, which may be a secret.
impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("path", &self.path())
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}

/// The newest whole record, unless the journal is new.
fn newest<'a>(contents: &'a [Vec<u8>; 2], path: &Path) -> Result<Option<Record<'a>>, Error> {
    let mut newest: Option<Record<'a>> = None;
    for (slot, content) in (0..).zip(contents) {
        match Record::parse(content) {
            // A record in the other's file was copied there.
            Ok(record) if record.generation % 2 != slot => {}
            Ok(record) if newest.is_none_or(|other| other.generation < record.generation) => {
                newest = Some(record)
            }
            Ok(_) => {}
            Err(Torn::Newer { version }) => return Err(Error::Newer { path: path.to_owned(), version }),
            Err(_) => {}
        }
    }
    // Where the creation was killed, the first file has no more than its header, and there is nothing in the second,
    // which is written only once the first is durable.
    let is_new = contents[0].len() <= record::HEADER && contents[1].is_empty();
    if newest.is_none() && !is_new {
        return Err(Error::Damaged { path: path.to_owned() });
    }
    Ok(newest)
}

fn slot_name(name: &str, slot: u8) -> Result<OsString, Error> {
    match Name::try_new(format!("{name}.{slot}")) {
        Ok(name) => Ok(name.as_os_str().to_owned()),
        Err(source) => Err(Error::Name { name: name.to_owned(), source }),
    }
}

/// Opens the first file, or creates it, and locks it. None where it is locked.
fn lock(dir: &Dir, name: &OsString) -> io::Result<Option<OwnedFd>> {
    loop {
        let file = match open_slot(dir, name)? {
            Some(file) => file,
            None => match calls::create_new(dir, name) {
                Err(Errno::EXIST) => continue,
                created => created?,
            },
        };
        if !calls::try_lock(&file)? {
            return Ok(None);
        }
        // Somebody may have removed the journal since it was opened.
        if calls::stat(&file)?.st_nlink > 0 {
            return Ok(Some(file));
        }
    }
}

fn open_slot(dir: &Dir, name: &OsString) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY;
    match calls::open_beneath(dir, Path::new(name), flags) {
        Ok(file) if Metadata::of(&calls::stat(&file)?).kind == FileKind::File => Ok(Some(file)),
        Ok(_) => Err(Refusal::NotAFile.into()),
        Err(Errno::NOENT) => Ok(None),
        Err(source) => Err(resolved(source)),
    }
}

fn read_slot(file: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut buffer = [0; 4096];
    // What is beyond the longest record is none of ours.
    while content.len() < record::HEADER + MAX_CONTENT {
        match calls::read(file.as_fd(), &mut buffer)? {
            0 => break,
            n => content.extend_from_slice(&buffer[..n]),
        }
    }
    Ok(content)
}
