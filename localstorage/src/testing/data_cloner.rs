//! A cloner for file systems that can't share blocks.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::FileCloner;

/// Copies the data of a file, on any file system; holes stay holes. For tests: it takes the time and the space that
/// [`Reflink`](crate::Reflink) saves, and what it has written is not durable.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "it has no state")]
pub struct DataCloner;

impl FileCloner for DataCloner {
    fn clone_file(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        let [from, mut to] = [File::from(from.try_clone_to_owned()?), File::from(to.try_clone_to_owned()?)];
        let mut hole = 0;
        loop {
            let data = match seek(&from, SeekFrom::Data(hole)) {
                // There are no more.
                Err(Errno::NXIO) => break,
                found => found?,
            };
            hole = seek(&from, SeekFrom::Hole(data))?;
            for file in [&from, &to] {
                seek(file, SeekFrom::Start(data))?;
            }
            io::copy(&mut (&from).take(hole - data), &mut to)?;
        }
        to.set_len(from.metadata()?.len())
    }
}
