//! Copies the content of files, from any file system.

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;

use nodekeel_localstorage::{FileCloner, Reflink};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

const CHUNK_BYTES: usize = 1 << 20;

/// Shares the blocks where the file system can, and copies the data elsewhere, without those of holes. The
/// copy is durable once the file system is synced.
#[derive(Debug)]
pub(super) struct Copier;

impl FileCloner for Copier {
    fn clone_file(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        match Reflink.clone_file(from, to) {
            Ok(()) => Ok(()),
            // Another file system, or one that can't share blocks. Any other cause fails the copy, too.
            Err(_) => {
                copy_data(&File::from(from.try_clone_to_owned()?), &File::from(to.try_clone_to_owned()?))
            }
        }
    }
}

/// *Source:* lseek(2): `SEEK_DATA` fails with ENXIO behind the last data; file systems without holes report one
/// range.
fn copy_data(from: &File, to: &File) -> io::Result<()> {
    let size = from.metadata()?.len();
    // The size first: a hole at the end has no data that would extend the file.
    to.set_len(size)?;
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(from, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(errno) => return Err(errno.into()),
        };
        let end = rustix::fs::seek(from, SeekFrom::Hole(start))?;
        at = start;
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(usize::MAX).min(CHUNK_BYTES);
            let read = from.read_at(&mut buffer[..wanted], at)?;
            // Another process has truncated the file since its size was read.
            if read == 0 {
                return Ok(());
            }
            to.write_all_at(&buffer[..read], at)?;
            at += read as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_copy_has_the_content_and_the_holes() {
        let files = [(); 2].map(|()| tempfile::tempfile().expect("a file"));
        let size = 8 << 20;
        files[0].set_len(size).expect("a hole");
        files[0].write_all_at(b"begin", 0).expect("write");
        let middle = vec![7; CHUNK_BYTES + 5];
        files[0].write_all_at(&middle, 3 << 20).expect("write");
        copy_data(&files[0], &files[1]).expect("copy");
        let content = |file: &File| {
            let mut content = vec![0; usize::try_from(size).expect("small")];
            file.read_exact_at(&mut content, 0).expect("read");
            content
        };
        assert!(content(&files[0]) == content(&files[1]));
        let [from, to] = files.map(|file| file.metadata().expect("stat"));
        assert_eq!(from.len(), to.len());
        assert!(to.blocks() <= from.blocks() + 64, "{} blocks of {}", to.blocks(), from.blocks());
    }
}
