//! A file of a step journal: opened, read, written in place.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::record;
use crate::dir::Dir;
use crate::error::{RejectReason, resolve_error};
use crate::metadata::{FileKind, Metadata};
use crate::syscalls;

/// The size in bytes of a new file, and the unit in which it grows: far more than the state of a few steps.
pub(super) const SLOT_BYTES: usize = 64 << 10;

/// One of the two files of a journal.
#[derive(Debug)]
pub(super) struct JournalSlot {
    pub(super) name: OsString,
    /// None if the file does not exist yet.
    pub(super) file: Option<OwnedFd>,
}

impl JournalSlot {
    /// The record; no bytes if the file does not exist.
    pub(super) fn read(&self) -> io::Result<Vec<u8>> {
        self.file.as_ref().map_or_else(|| Ok(Vec::new()), read_slot)
    }

    /// Writes a record at the start of the file, durably.
    pub(super) fn write(&mut self, dir: &Dir, bytes: &[u8]) -> io::Result<()> {
        let file = self.allocate(dir, bytes.len())?;
        syscalls::write_at(file, bytes, 0)?;
        syscalls::sync(file)?;
        Ok(())
    }

    /// Creates the file if it does not exist, and gives it blocks for this many bytes, durably.
    pub(super) fn allocate(&mut self, dir: &Dir, bytes: usize) -> io::Result<&OwnedFd> {
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

/// Opens a file of a journal; `None` if it does not exist.
pub(super) fn open_slot(dir: &Dir, name: &OsString) -> io::Result<Option<OwnedFd>> {
    // A pipe must not block the caller, nor a terminal become its controlling terminal.
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY;
    match syscalls::open_beneath(dir, Path::new(name), flags) {
        Ok(file) if Metadata::from_stat(&syscalls::stat(&file)?).kind == FileKind::File => Ok(Some(file)),
        Ok(_) => Err(RejectReason::NotAFile.into()),
        Err(Errno::NOENT) => Ok(None),
        Err(source) => Err(resolve_error(source)),
    }
}

/// Reads the record. The bytes after it do not belong to it, and on vfat may not even be readable.
pub(super) fn read_slot(file: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // First the header, which holds the length of the content, and then the content.
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
