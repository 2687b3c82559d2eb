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
    /// The next content of the file at this path.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let mut name: OsString = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
        name.push(".new");
        let new = path.with_file_name(name);
        // One that an interrupted call has left, with any mode.
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
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
            // If that fails too, the next call removes it. The first error is the useful one.
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
        let path = std::env::temp_dir().join(format!("nodectl-private-{}", std::process::id()));
        let new = path.with_extension("new");
        for (bytes, mode) in [(&b"one"[..], 0o644), (b"two", 0o600)] {
            let mut file = PrivateFile::create(&path).unwrap();
            file.write_all(bytes).unwrap();
            file.commit().unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            fs::write(&new, "left").unwrap();
        }
        PrivateFile::create(&path).unwrap().write_all(b"a part").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert!(!new.exists());
        fs::remove_file(&path).unwrap();
    }
}
