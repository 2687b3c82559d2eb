//! The copy of a volume to another disk: each block of its mapping, below the keys of a new volume.
//!
//! Nothing records how far a copy is. One that is repeated compares what is there, and writes what differs: so it is
//! right whatever was written in between, to either disk.

use std::error::Error;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;

use super::super::places::BLOCK_BYTES;
use super::super::reading::{Buffer, read_chunks};
use super::LuksVolume;
use super::key_slots::UnlockSecret;
use crate::syscalls;

/// What a [copy](LuksVolume::mount_copy) is made from, and who is told of it.
pub struct CopySource<'a> {
    /// The volume to copy, which is not mounted. Its mapping needs another name than that of the copy.
    pub volume: &'a LuksVolume,
    /// What opens it.
    pub secret: &'a UnlockSecret,
    /// Receives the progress many times a second, and cancels the copy by `Break`: a later call compares what is copied,
    /// and goes on.
    pub progress: &'a dyn Fn(CopyProgress) -> ControlFlow<()>,
    /// Records durably that the copy takes the place of the volume that was copied. All of it is copied. From here on, [`LuksVolume::mount_copied`] completes it.
    pub commit: &'a CopyCommit<'a>,
}

/// Is given the UUID of the volume that takes the place of another one, and the size of its disk in bytes.
/// And what was left out.
pub type CopyCommit<'a> =
    dyn Fn(&str, u64, UnreadableBlocks) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

impl fmt::Debug for CopySource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopySource").field("volume", &self.volume).finish_non_exhaustive()
    }
}

/// The progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyProgress {
    /// The bytes that are copied or compared, and those behind them that are wiped.
    pub done_bytes: u64,
    /// The bytes to copy and to wipe.
    pub total_bytes: u64,
}

/// Blocks that somebody has changed below an authenticated volume: they can't be read, as their copies can't. Those of a volume
/// that was not wiped are not counted, since they can't be told from blocks that were never written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnreadableBlocks {
    /// Their bytes.
    pub bytes: u64,
    /// The offset of the first one in the mapping, in bytes.
    pub first_offset: u64,
}

/// A copy that has failed.
#[derive(Debug)]
pub(super) enum CopyFault {
    Read(io::Error),
    Write(io::Error),
    /// A block at this offset can't be read any more, and the target has it from an earlier run: as it was then.
    Outdated(u64),
}

/// How blocks are copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyOptions {
    /// The bytes to copy, from the start of both devices.
    pub(super) bytes: u64,
    /// Both are authenticated: a block without a right tag is left out, and can't be read on the target either, which has
    /// never written it.
    pub(super) is_authenticated: bool,
    /// The target may have a part of the copy.
    pub(super) is_repeated: bool,
}

/// Copies a device. `report` is given the bytes that are done. None if it cancels the copy.
pub(super) fn copy_device(
    source: &File,
    target: &File,
    options: CopyOptions,
    mut report: impl FnMut(u64) -> ControlFlow<()>,
) -> Result<Option<UnreadableBlocks>, CopyFault> {
    let mut writer = Writer { target, is_repeated: options.is_repeated, found: Buffer::new() };
    let (mut offset, mut unreadable) = (0, UnreadableBlocks::default());
    while offset < options.bytes {
        let mut failed = None;
        let read = read_chunks(source, offset, options.bytes, false, |at, chunk| {
            if let Err(error) = writer.write(chunk, at) {
                failed = Some(error);
                return Ok(ControlFlow::Break(()));
            }
            offset = at + chunk.len() as u64;
            Ok(report(offset))
        });
        match (failed, read) {
            (Some(error), _) => return Err(CopyFault::Write(error)),
            (None, Ok(ControlFlow::Break(()))) => return Ok(None),
            (None, Ok(ControlFlow::Continue(()))) => break,
            (None, Err(error)) if options.is_authenticated && is_unauthentic(&error) => {
                let end = options.bytes.min(offset + writer.found.len() as u64);
                copy_blocks(source, &mut writer, offset..end, &mut unreadable)?;
                offset = end;
            }
            (None, Err(error)) => return Err(CopyFault::Read(error)),
        }
    }
    syscalls::sync(target).map_err(|errno| CopyFault::Write(errno.into()))?;
    Ok(Some(unreadable))
}

/// Copies the blocks of a part that can be read.
fn copy_blocks(
    source: &File,
    writer: &mut Writer<'_>,
    part: std::ops::Range<u64>,
    unreadable: &mut UnreadableBlocks,
) -> Result<(), CopyFault> {
    let mut buffer = Buffer::new();
    for offset in part.clone().step_by(BLOCK_BYTES as usize) {
        let block = &mut buffer[..BLOCK_BYTES.min(part.end - offset) as usize];
        match source.read_exact_at(block, offset) {
            Ok(()) => writer.write(block, offset).map_err(CopyFault::Write)?,
            Err(error) if is_unauthentic(&error) => {
                if writer.has(offset, block.len()) {
                    return Err(CopyFault::Outdated(offset));
                }
                if unreadable.bytes == 0 {
                    unreadable.first_offset = offset;
                }
                unreadable.bytes += block.len() as u64;
            }
            Err(error) => return Err(CopyFault::Read(error)),
        }
    }
    Ok(())
}

/// Returns whether a block was changed below its authentication, or was never written. A disk that fails, or that is gone, has
/// other errors: what it can't read now may be there later, and is never left out.
///
/// *Source:* Linux `blk_errors`: EILSEQ for `BLK_STS_PROTECTION` of dm-crypt.
fn is_unauthentic(error: &io::Error) -> bool {
    error.raw_os_error() == Some(84)
}

struct Writer<'a> {
    target: &'a File,
    is_repeated: bool,
    found: Buffer,
}

impl Writer<'_> {
    /// Returns whether an earlier run has written a block.
    fn has(&mut self, offset: u64, length: usize) -> bool {
        self.is_repeated && self.target.read_exact_at(&mut self.found[..length], offset).is_ok()
    }

    fn write(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let found = &mut self.found[..bytes.len()];
        // What can't be read is not there yet.
        if self.is_repeated && self.target.read_exact_at(found, offset).is_ok() && found == bytes {
            return Ok(());
        }
        Ok(syscalls::write_at(self.target, bytes, offset)?)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::rc::Rc;

    use super::*;
    use crate::failpoints::{SyscallAction, with_failpoint_hook};

    const BYTES: u64 = (9 << 20) + 512;

    fn image(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    fn contents(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; BYTES as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn copy(source: &File, target: &File, is_repeated: bool) -> Result<Option<UnreadableBlocks>, CopyFault> {
        let options = CopyOptions { bytes: BYTES, is_authenticated: false, is_repeated };
        copy_device(source, target, options, |done| {
            assert!(done <= BYTES, "{done}");
            ControlFlow::Continue(())
        })
    }

    fn noise(seed: u64) -> Vec<u8> {
        (0..BYTES).map(|at| ((at * 2_654_435_761 + seed) >> 13) as u8).collect()
    }

    #[test]
    fn a_copy_that_is_repeated_after_any_failed_call_equals_what_the_source_has_now() {
        for kill in 0..5 {
            let (source, target) = (image(&noise(0)), image(&vec![1; BYTES as usize]));
            let mut calls = 0;
            let fail = move |_call: &'static str| {
                calls += 1;
                if calls > kill { SyscallAction::Fail(5) } else { SyscallAction::Proceed }
            };
            let killed = with_failpoint_hook(fail, || copy(&source, &target, false));
            assert_eq!(killed.is_ok(), kill == 4, "{kill}: three chunks and the sync; {killed:?}");
            // The volume was used in between: a record of the copied bytes would be wrong.
            source.write_all_at(b"changed since", 5 << 20).unwrap();
            assert!(copy(&source, &target, true).unwrap().is_some());
            assert!(contents(&target) == contents(&source), "{kill}");
        }
    }

    #[test]
    fn a_repeated_copy_writes_only_what_differs() {
        let (source, target) = (image(&noise(0)), image(&noise(0)));
        target.write_all_at(b"other", 6 << 20).unwrap();
        let writes = Rc::new(Cell::new(0));
        let count = Rc::clone(&writes);
        let hook = move |call: &'static str| {
            count.set(count.get() + u32::from(call != "fsync"));
            SyscallAction::Proceed
        };
        with_failpoint_hook(hook, || copy(&source, &target, true)).unwrap();
        assert_eq!(writes.get(), 1, "one chunk of 4 MiB");
        assert!(contents(&target) == noise(0));
    }

    #[test]
    fn a_copy_is_canceled_between_two_chunks() {
        let (source, target) = (image(&noise(0)), image(&vec![0; BYTES as usize]));
        let options = CopyOptions { bytes: BYTES, is_authenticated: true, is_repeated: false };
        let canceled = copy_device(&source, &target, options, |done| {
            if done < 8 << 20 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        assert_eq!(canceled.unwrap(), None);
        let copied = contents(&target);
        assert!(copied[..8 << 20] == noise(0)[..8 << 20] && copied[8 << 20..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_source_that_ends_early_is_an_error() {
        let source = tempfile::NamedTempFile::new().unwrap();
        fs::write(source.path(), vec![7; 1 << 20]).unwrap();
        let target = image(&vec![0; BYTES as usize]);
        let failed = copy(source.as_file(), &target, false);
        assert!(matches!(failed, Err(CopyFault::Read(_))), "{failed:?}");
    }
}
