//! The mark of a containerd that runs, which an ordered stop removes: after a power cut, it is that of another boot.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use nodekeel_localstorage::{Dir, FileMode};

use crate::layout::DirectoryLayout;

/// The file in the directory of persistent data. It has the boot in which containerd was started.
const FILE_NAME: &str = "running";

/// A kernel that stops without an ordered stop loses what was not on the disk yet; a process that is killed loses nothing.
#[derive(Debug, Clone)]
pub(super) struct StopMark {
    directory: PathBuf,
    root: PathBuf,
}

impl StopMark {
    pub(super) fn new(layout: &DirectoryLayout) -> Self {
        Self { directory: layout.data_dir().to_owned(), root: layout.root_dir() }
    }

    /// Sets the mark before containerd starts; returns whether the content of images has to be compared with its digests. Then
    /// the mark stays as it is.
    pub(super) fn begin(&self) -> io::Result<bool> {
        let (mark, boot) = (self.read()?, read_boot_id()?);
        if is_of_other_boot(mark.as_deref(), &boot) {
            return Ok(true);
        }
        if mark.is_none() {
            self.write(&boot)?;
        }
        Ok(false)
    }

    /// Ends what [`begin`](Self::begin) has asked for.
    pub(super) fn settle(&self) -> io::Result<()> {
        self.write(&read_boot_id()?)
    }

    /// Removes the mark once containerd has exited, and all that it has written is on the disk.
    pub(super) fn end(&self) -> io::Result<()> {
        if is_of_other_boot(self.read()?.as_deref(), &read_boot_id()?) {
            return Ok(());
        }
        rustix::fs::syncfs(File::open(&self.root)?)?;
        let directory = Dir::open(&self.directory).map_err(io::Error::other)?;
        directory.remove_file(FILE_NAME).map(drop).map_err(io::Error::other)
    }

    fn read(&self) -> io::Result<Option<String>> {
        match std::fs::read_to_string(self.directory.join(FILE_NAME)) {
            Ok(mark) => Ok(Some(mark)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn write(&self, boot: &str) -> io::Result<()> {
        let directory = Dir::open(&self.directory).map_err(io::Error::other)?;
        directory
            .write(Path::new(FILE_NAME), boot.as_bytes(), FileMode::PRIVATE_FILE)
            .map_err(io::Error::other)
    }
}

/// *Source:* random(4), `boot_id`.
fn read_boot_id() -> io::Result<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
}

/// Without a mark, containerd was stopped in order, or has never run.
fn is_of_other_boot(mark: Option<&str>, boot: &str) -> bool {
    mark.is_some_and(|mark| mark != boot)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn images_are_compared_after_a_boot_that_no_ordered_stop_ended_and_until_that_is_done() {
        let scratch = tempfile::tempdir().expect("a directory");
        let layout = DirectoryLayout::new(scratch.path(), scratch.path().join("run")).expect("valid");
        fs::create_dir(layout.root_dir()).expect("created");
        let mark = StopMark::new(&layout);
        let begin = || mark.begin().expect("read");
        assert!(!begin(), "a first start");
        assert!(!begin(), "killed in the same boot");
        mark.end().expect("removed");
        assert!(!scratch.path().join(FILE_NAME).exists());
        fs::write(scratch.path().join(FILE_NAME), "another boot\n").expect("written");
        assert!(begin());
        mark.end().expect("left");
        assert!(begin(), "stopped before it was done");
        mark.settle().expect("written");
        assert!(!begin());
        // A mark that a power cut has emptied is none of this boot.
        fs::write(scratch.path().join(FILE_NAME), "").expect("written");
        assert!(begin());
    }
}
