//! Files with secrets.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The new content of a file that its owner alone reads. It replaces the old one, durably, when it is committed; dropped without
/// that, it is discarded.
#[derive(Debug)]
pub(crate) struct PrivateFile {
    file: File,
    path: PathBuf,
    /// Until it has the path.
    new: Option<PathBuf>,
}

impl PrivateFile {
    /// The next content of the file at this path. Another process may write its own at the same time: one replaces the other.
    ///
    /// # Errors
    /// There is something else than a regular file, which would be replaced, too.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let not_regular = "not a regular file: name another file, or - for the standard output";
        if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, not_regular));
        }
        let mut name = OsString::from(".");
        name.push(path.file_name().ok_or(io::ErrorKind::InvalidInput)?);
        name.push(format!(".{}.new", std::process::id()));
        let new = path.with_file_name(name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        Ok(Self { file, path: path.to_owned(), new: Some(new) })
    }

    /// Replaces the file.
    pub(crate) fn commit(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        if let Some(new) = &self.new {
            fs::rename(new, &self.path)?;
        }
        self.new = None;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Write for PrivateFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for PrivateFile {
    fn drop(&mut self) {
        if let Some(new) = &self.new {
            // The first error is the useful one.
            let _ = fs::remove_file(new);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_is_its_owners_alone() {
        let directory = testbed::ScratchDir::new().unwrap();
        let path = directory.path().join("file");
        for (bytes, mode) in [(&b"one"[..], 0o644), (b"two", 0o600)] {
            let mut file = PrivateFile::create(&path).unwrap();
            file.write_all(bytes).unwrap();
            file.commit().unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        PrivateFile::create(&path).unwrap().write_all(b"a part").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn another_file_is_neither_removed_nor_replaced() {
        let directory = testbed::ScratchDir::new().unwrap();
        let (path, link) = (directory.path().join("file"), directory.path().join("link"));
        let other = path.with_extension("new");
        fs::write(&other, "of somebody").unwrap();
        PrivateFile::create(&path).unwrap().commit().unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"of somebody");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for refused in [&*link, Path::new("/dev/null"), directory.path()] {
            assert_eq!(PrivateFile::create(refused).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
