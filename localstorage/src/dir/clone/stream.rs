//! Directory trees as a stream of bytes, from one machine to another.

use std::ffi::{CString, OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

use rustix::fs::{FileType, Mode as RawMode, OFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::attributes::{AttributeBuffers, owner_of};
use super::links::{LinkTable, MAX_TABLE_BYTES};
use super::{CloneSummary, TreeWalk, WalkEvent, find_file, is_vanished, opened};
use crate::dir::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation, RejectReason};
use crate::metadata::FileOwner;
use crate::syscalls::clone::{self as calls, entry_at};
use crate::syscalls::{self};

/// The first bytes of a stream, with its version.
const MAGIC: &[u8; 16] = b"nodekeel tree 1\n";

/// Maximum length of a name, a path, a link's target or an attribute.
const MAX_FIELD_BYTES: usize = 64 << 10;

const CHUNK_BYTES: usize = 256 << 10;

/// The tags of records.
const FILE: u8 = b'F';
const LINK: u8 = b'L';
const SYMLINK: u8 = b'S';
const NODE: u8 = b'N';
const ENTER: u8 = b'D';
const LEAVE: u8 = b'U';
const END: u8 = b'E';

impl Dir {
    /// Writes everything in this directory, and its own attributes, for [`receive_tree`](Self::receive_tree) on any
    /// machine: what [`clone_tree`](Self::clone_tree) keeps, with the holes of files. A tree that other processes change at
    /// the same time is written as it is cloned.
    ///
    /// ```text
    /// stream:     "nodekeel tree 1\n", records, the SHA-256 of all before it
    /// record:     'F' name, data, attributes | 'L' name, path of an earlier file | 'S' name, target, owner, times
    ///             'N' name, node, owner, mode, times | 'D' name, records, 'U' attributes: a directory
    /// end:        'U' attributes of the top, 'E', devices and separate files of the summary
    /// data:       size, then extents as offset, length and bytes; length 0 ends them
    /// numbers:    little-endian; bytes: their length in four bytes first
    /// ```
    ///
    /// # Errors
    /// [`FileOperation::Send`], with the path of the entry, also if the writer fails.
    pub fn send_tree(&self, to: &mut dyn Write) -> Result<CloneSummary, Error> {
        let walk =
            TreeWalk::open(self).map_err(|source| Error::new(FileOperation::Send, &self.path, source))?;
        let mut sender = Sender {
            walk,
            to: Hashing { inner: io::BufWriter::with_capacity(CHUNK_BYTES, to), hash: Sha256::new() },
            links: LinkTable::new(MAX_TABLE_BYTES),
            attributes: AttributeBuffers::new(),
            buffer: vec![0; CHUNK_BYTES],
            entry: None,
            summary: CloneSummary::default(),
        };
        sender.run().map(|()| sender.summary).map_err(|source| {
            let path = sender.walk.display_path((&self.path, 1), sender.entry.as_deref());
            Error::new(FileOperation::Send, path, source)
        })
    }

    /// Makes the tree that [`send_tree`](Self::send_tree) has written, in this empty directory that only the caller uses.
    /// Success only if the whole stream has arrived as it was written, with nothing after it. It is durable once the file
    /// system is synced; what a failed call has made is to be removed.
    ///
    /// # Errors
    /// [`FileOperation::Receive`]; [`is_full`](Error::is_full), also if a limit is reached.
    pub fn receive_tree(&self, from: &mut dyn Read) -> Result<CloneSummary, Error> {
        let receive = || {
            let from = io::BufReader::with_capacity(CHUNK_BYTES, from);
            let mut receiver = Receiver {
                top: self.as_fd(),
                dir: syscalls::open_beneath(self, Path::new("."), OPEN_DIR_FLAGS)?,
                depth: 0,
                from: Hashing { inner: from, hash: Sha256::new() },
                summary: CloneSummary::default(),
            };
            receiver.run().map(|()| receiver.summary)
        };
        receive().map_err(|source: io::Error| Error::new(FileOperation::Receive, &self.path, source))
    }
}

/// A reader or a writer, and the hash of what has passed.
struct Hashing<T> {
    inner: T,
    hash: Sha256,
}

impl<W: Write> Hashing<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.inner.write_all(bytes)
    }

    fn put_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(|_| damaged())?;
        self.put(&length.to_le_bytes())?;
        self.put(bytes)
    }

    fn put_numbers(&mut self, numbers: &[u64]) -> io::Result<()> {
        numbers.iter().try_for_each(|number| self.put(&number.to_le_bytes()))
    }

    fn put_owner_and_times(&mut self, stat: &Stat) -> io::Result<()> {
        let (owner, times) = (owner_of(stat), calls::times_of(stat));
        self.put_numbers(&[owner.uid.into(), owner.gid.into()])?;
        for time in [times.last_access, times.last_modification] {
            self.put_numbers(&[time.tv_sec.cast_unsigned(), time.tv_nsec.cast_unsigned()])?;
        }
        Ok(())
    }
}

impl<R: Read> Hashing<R> {
    fn take(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        self.inner.read_exact(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => damaged(),
            _ => error,
        })?;
        self.hash.update(&*buffer);
        Ok(())
    }

    fn take_byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.take(&mut byte).map(|()| byte[0])
    }

    fn take_number(&mut self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.take(&mut bytes).map(|()| u64::from_le_bytes(bytes))
    }

    fn take_bytes(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.take(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_FIELD_BYTES {
            return Err(damaged());
        }
        let mut bytes = vec![0; length];
        self.take(&mut bytes).map(|()| bytes)
    }

    /// The name of an entry, which leads nowhere else.
    fn take_name(&mut self) -> io::Result<OsString> {
        let name = self.take_bytes()?;
        if name.is_empty()
            || name == b"."
            || name == b".."
            || name.iter().any(|byte| matches!(byte, 0 | b'/'))
        {
            return Err(damaged());
        }
        Ok(OsString::from_vec(name))
    }

    fn take_owner_and_times(&mut self) -> io::Result<(FileOwner, Timestamps)> {
        let mut id = || u32::try_from(self.take_number()?).map_err(|_| damaged());
        let owner = FileOwner { uid: id()?, gid: id()? };
        let mut time = || {
            let (tv_sec, tv_nsec) = (self.take_number()?.cast_signed(), self.take_number()?.cast_signed());
            Ok::<_, io::Error>(Timespec { tv_sec, tv_nsec })
        };
        Ok((owner, Timestamps { last_access: time()?, last_modification: time()? }))
    }

    fn take_mode(&mut self) -> io::Result<RawMode> {
        let mode = u32::try_from(self.take_number()?).map_err(|_| damaged())?;
        Ok(RawMode::from_bits_truncate(mode & 0o7777))
    }
}

/// A stream that is not one, or ends too early or too late.
fn damaged() -> io::Error {
    RejectReason::DamagedStream.into()
}

struct Sender<W> {
    walk: TreeWalk,
    to: Hashing<W>,
    links: LinkTable,
    attributes: AttributeBuffers,
    buffer: Vec<u8>,
    /// The entry that is being written.
    entry: Option<OsString>,
    summary: CloneSummary,
}

impl<W: Write> Sender<W> {
    fn run(&mut self) -> io::Result<()> {
        self.to.put(MAGIC)?;
        while let Some(event) = self.walk.next_event()? {
            match event {
                WalkEvent::Entry { name, .. } => {
                    self.entry = Some(name.clone());
                    match self.send_entry(&name) {
                        Err(error) if is_vanished(&error) => {}
                        sent => sent?,
                    }
                }
                WalkEvent::Directory { name } => {
                    self.entry = Some(name.clone());
                    let dir = match opened(self.walk.open_dir(&name)?) {
                        Err(error) if is_vanished(&error) => continue,
                        dir => dir?,
                    };
                    self.walk.enter(&name, dir)?;
                    self.to.put(&[ENTER])?;
                    self.to.put_bytes(name.as_bytes())?;
                }
                WalkEvent::Leave { dir, .. } => {
                    self.to.put(&[LEAVE])?;
                    self.send_attributes(dir.as_fd())?;
                    self.summary.entries += 1;
                }
                WalkEvent::Moved { .. } => return Err(RejectReason::Moved.into()),
            }
            self.entry = None;
        }
        self.to.put(&[END])?;
        self.to.put_numbers(&[self.summary.devices, self.summary.separate_files])?;
        let digest = std::mem::take(&mut self.to.hash).finalize();
        self.to.inner.write_all(&digest)?;
        self.to.inner.flush()
    }

    /// Writes an entry that is not a directory. It fails as vanished only before its first byte is written.
    fn send_entry(&mut self, name: &OsStr) -> io::Result<()> {
        let stat = syscalls::stat_at(self.walk.dir(), name)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return Ok(()),
            FileType::RegularFile => return self.send_file(name),
            FileType::Symlink => {
                let target = syscalls::read_link(self.walk.dir(), name)?;
                self.put_entry(SYMLINK, name)?;
                self.to.put_bytes(target.as_bytes())?;
                self.to.put_owner_and_times(&stat)?;
            }
            // As in a clone, the character device 0:0 is a whiteout of overlayfs.
            FileType::CharacterDevice | FileType::BlockDevice if stat.st_rdev != 0 => {
                self.summary.devices += 1;
                return Ok(());
            }
            kind => {
                let kind = match kind {
                    FileType::Fifo => 0,
                    FileType::Socket => 1,
                    FileType::CharacterDevice => 2,
                    _ => return Ok(()),
                };
                self.put_entry(NODE, name)?;
                self.to.put(&[kind])?;
                self.to.put_owner_and_times(&stat)?;
                self.to.put_numbers(&[u64::from(stat.st_mode & 0o7777)])?;
            }
        }
        self.summary.entries += 1;
        Ok(())
    }

    fn put_entry(&mut self, tag: u8, name: &OsStr) -> io::Result<()> {
        self.to.put(&[tag])?;
        self.to.put_bytes(name.as_bytes())
    }

    fn send_file(&mut self, name: &OsStr) -> io::Result<()> {
        let (found, metadata) = find_file(&self.walk, name)?;
        let identity = if metadata.links > 1 { Some(calls::inode_and_birth(&found)?) } else { None };
        if let Some(identity) = identity
            && let Some(path) = self.links.find(identity)
        {
            let path = path.as_os_str().as_bytes().to_vec();
            self.put_entry(LINK, name)?;
            self.to.put_bytes(&path)?;
            self.links.count_link(identity);
            self.summary.entries += 1;
            return Ok(());
        }
        let file =
            syscalls::reopen(&found, OFlags::RDONLY | OFlags::NONBLOCK).map_err(|errno| match errno {
                Errno::NOENT => RejectReason::NoProc.into(),
                errno => io::Error::from(errno),
            })?;
        self.put_entry(FILE, name)?;
        self.send_data(&file)?;
        // After the data, which may have changed at the same time.
        self.send_attributes(file.as_fd())?;
        self.summary.entries += 1;
        if let Some(identity) = identity
            && !self.links.insert(identity, self.walk.path(Some(name)), metadata.links)
        {
            self.summary.separate_files += 1;
        }
        Ok(())
    }

    fn send_data(&mut self, file: &OwnedFd) -> io::Result<()> {
        let size = u64::try_from(syscalls::stat(file)?.st_size).unwrap_or_default();
        self.to.put_numbers(&[size])?;
        let mut at = 0;
        while at < size
            && let Some(range) = calls::next_data(file, at)?
        {
            at = range.start;
            while at < range.end.min(size) {
                let length =
                    usize::try_from(range.end.min(size) - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
                let read = calls::read_at(file, &mut self.buffer[..length], at)?;
                // Another process has truncated it.
                if read == 0 {
                    at = size;
                    break;
                }
                self.to.put_numbers(&[at])?;
                self.to.put_bytes(&self.buffer[..read])?;
                at += read as u64;
            }
        }
        self.to.put_numbers(&[size])?;
        self.to.put_bytes(&[])
    }

    /// Writes the attributes of a file or a directory.
    fn send_attributes(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        let stat = syscalls::stat(file)?;
        self.to.put_owner_and_times(&stat)?;
        self.to.put_numbers(&[u64::from(stat.st_mode & 0o7777)])?;
        let Self { attributes, to, .. } = self;
        attributes.for_each(file, |name, value| {
            to.put_bytes(name.to_bytes())?;
            to.put_bytes(value)
        })?;
        to.put_bytes(&[])
    }
}

struct Receiver<'a, R> {
    /// The tree.
    top: BorrowedFd<'a>,
    /// The directory that is being filled, and its depth below the top.
    dir: OwnedFd,
    depth: u64,
    from: Hashing<R>,
    summary: CloneSummary,
}

impl<R: Read> Receiver<'_, R> {
    fn run(&mut self) -> io::Result<()> {
        let mut magic = [0; MAGIC.len()];
        self.from.take(&mut magic)?;
        if magic != *MAGIC {
            return Err(damaged());
        }
        loop {
            match self.from.take_byte()? {
                ENTER => {
                    let name = self.from.take_name()?;
                    // The final mode may forbid its owner to write.
                    syscalls::make_dir(&self.dir, &name, RawMode::RWXU)?;
                    self.dir = syscalls::open_on_same_mount(&self.dir, &name, OPEN_DIR_FLAGS)?;
                    self.depth += 1;
                    continue;
                }
                LEAVE => {
                    // As in a clone: one descriptor, however deep the tree is, and before the mode may forbid it.
                    let above = (self.depth > 0).then(|| syscalls::open_parent(&self.dir)).transpose()?;
                    receive_attributes(&mut self.from, self.dir.as_fd())?;
                    self.summary.entries += 1;
                    let Some(above) = above else { break };
                    (self.dir, self.depth) = (above, self.depth - 1);
                    continue;
                }
                FILE => {
                    let name = self.from.take_name()?;
                    let file = syscalls::create_new_file(&self.dir, &name)?;
                    self.receive_data(&file)?;
                    receive_attributes(&mut self.from, file.as_fd())?;
                }
                LINK => {
                    let (name, path) = (self.from.take_name()?, self.from.take_bytes()?);
                    let path = Path::new(OsStr::from_bytes(&path));
                    let (parent, file) = (path.parent(), path.file_name().ok_or_else(damaged)?);
                    let parent =
                        parent.filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
                    // By a descriptor that no link leads to: the stream may name any path.
                    let parent = syscalls::open_beneath(self.top, parent, OFlags::PATH | OFlags::DIRECTORY)?;
                    calls::link(&parent, Path::new(file), entry_at(self.dir.as_fd(), &name))?;
                }
                SYMLINK => {
                    let (name, target) = (self.from.take_name()?, self.from.take_bytes()?);
                    let (owner, times) = self.from.take_owner_and_times()?;
                    let at = entry_at(self.dir.as_fd(), &name);
                    calls::create_symlink(&CString::new(target).map_err(|_| damaged())?, at)?;
                    calls::set_owner_at(at, owner)?;
                    calls::set_times_at(at, &times)?;
                }
                NODE => {
                    let name = self.from.take_name()?;
                    let kind = match self.from.take_byte()? {
                        0 => FileType::Fifo,
                        1 => FileType::Socket,
                        2 => FileType::CharacterDevice,
                        _ => return Err(damaged()),
                    };
                    let (owner, times) = self.from.take_owner_and_times()?;
                    let mode = self.from.take_mode()?;
                    let at = entry_at(self.dir.as_fd(), &name);
                    // Never a device but the whiteout.
                    calls::create_node(at, kind, 0)?;
                    calls::set_owner_at(at, owner)?;
                    let node = syscalls::open_beneath(at.dir, Path::new(at.name), OFlags::PATH)?;
                    syscalls::set_mode_by_proc_path(&node, mode)?;
                    calls::set_times_at(at, &times)?;
                }
                _ => return Err(damaged()),
            }
            self.summary.entries += 1;
        }
        if self.from.take_byte()? != END {
            return Err(damaged());
        }
        self.summary.devices = self.from.take_number()?;
        self.summary.separate_files = self.from.take_number()?;
        let digest = std::mem::take(&mut self.from.hash).finalize();
        let mut sent = [0; 32];
        // Its hash is taken above.
        self.from.take(&mut sent)?;
        // The end of the stream is its end: what follows was written by nobody whose hash is known.
        let is_longer = self.from.inner.by_ref().take(1).read_to_end(&mut Vec::new())? > 0;
        if is_longer || digest[..] != sent { Err(damaged()) } else { Ok(()) }
    }

    fn receive_data(&mut self, file: &OwnedFd) -> io::Result<()> {
        // The size first: a hole at the end has no data that would extend the file.
        let size = self.from.take_number()?;
        calls::set_size(file, size)?;
        loop {
            let offset = self.from.take_number()?;
            let mut length = [0; 4];
            self.from.take(&mut length)?;
            let length = u32::from_le_bytes(length) as usize;
            if length == 0 {
                return Ok(());
            }
            if length > CHUNK_BYTES || offset.checked_add(length as u64).is_none_or(|end| end > size) {
                return Err(damaged());
            }
            let mut data = vec![0; length];
            self.from.take(&mut data)?;
            syscalls::write_at(file, &data, offset)?;
        }
    }
}

/// Sets the attributes of a file or a directory, in the order of a clone: the owner first, since that removes
/// capabilities, and the times last, since all else changes them.
fn receive_attributes(from: &mut Hashing<impl Read>, file: BorrowedFd<'_>) -> io::Result<()> {
    let (owner, times) = from.take_owner_and_times()?;
    let mode = from.take_mode()?;
    syscalls::set_owner(file, owner)?;
    loop {
        let name = from.take_bytes()?;
        if name.is_empty() {
            break;
        }
        let (name, value) = (CString::new(name).map_err(|_| damaged())?, from.take_bytes()?);
        if !AttributeBuffers::is_kept(name.as_bytes()) {
            return Err(damaged());
        }
        calls::write_attribute(file, &name, &value)?;
    }
    syscalls::set_mode(file, mode)?;
    Ok(calls::set_times(file, &times)?)
}

/// Checks that no records make the receiver panic or write outside of its directory, and that a tree that it accepts can be
/// sent. The directory is empty, and is again after the call. The records are those between the first bytes of a stream and its
/// hash, which are added.
///
/// # Panics
/// If the check fails.
#[cfg(any(test, feature = "testing"))]
pub fn fuzz_tree_stream(scratch: &Dir, records: &[u8]) {
    let mut to = Hashing { inner: MAGIC.to_vec(), hash: Sha256::new_with_prefix(MAGIC) };
    to.put(records).expect("a vector takes all bytes");
    let stream = [&to.inner[..], &to.hash.finalize()].concat();
    let trees = ["received", "again"]
        .map(|name| scratch.ensure_dir(name, crate::FileMode::PRIVATE_DIR).expect("a new directory"));
    if trees[0].receive_tree(&mut stream.as_slice()).is_ok() {
        let mut stream = Vec::new();
        trees[0].send_tree(&mut stream).expect("a tree that was received can be sent");
        trees[1].receive_tree(&mut stream.as_slice()).expect("a tree that was sent can be received");
    }
    for name in ["received", "again"] {
        scratch.remove_tree(name).expect("a tree that was received can be removed");
    }
    assert!(scratch.is_empty().expect("a list"), "nothing was written next to the tree");
}

#[cfg(test)]
#[path = "stream_test.rs"]
mod tests;
