//! Creation of directories and files.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::{Dir, OPEN_DIR_FLAGS};
use crate::error::{Error, FileOperation, RejectReason, resolve_error};
use crate::file_name;
use crate::metadata::{FileKind, FileMode, Metadata};
use crate::syscalls;

impl Dir {
    /// Opens a directory by a trusted path, in which links are followed, and creates its missing components,
    /// durably and with this mode. The mode of an existing directory stays.
    ///
    /// # Errors
    /// [`FileOperation::Open`] or [`FileOperation::CreateDir`]; the missing part of the path must consist of
    /// plain names.
    pub fn open_or_create(path: impl AsRef<Path>, mode: FileMode) -> Result<Self, Error> {
        let path = path.as_ref();
        let mut existing = path;
        let dir = loop {
            // The empty path is the current directory.
            let opened = Self::open(if existing == Path::new("") { Path::new(".") } else { existing });
            match (opened, existing.parent()) {
                (Err(error), Some(above)) if error.is_not_found() => existing = above,
                (opened, _) => break opened?,
            }
        };
        // Links in the existing part are trusted. The missing part is created beneath it, through no link.
        match path.strip_prefix(existing) {
            Ok(missing) if !missing.as_os_str().is_empty() => dir.ensure_dir(missing, mode),
            _ => Ok(dir),
        }
    }

    /// Opens a regular file below this directory to read and write, and creates it, empty, if it is missing.
    ///
    /// The file has exactly this mode afterwards, also if it existed before. Its name is durable; what the
    /// caller writes is not, until it is synced. To replace the content of a file, use [`write`](Self::write).
    ///
    /// # Errors
    /// [`FileOperation::Open`]; [`is_symlink`](Error::is_symlink), [`is_not_a_file`](Error::is_not_a_file).
    pub fn open_or_create_file(&self, path: impl AsRef<Path>, mode: FileMode) -> Result<File, Error> {
        let path = path.as_ref();
        let (parent, name) = self.open_parent(path, FileOperation::Open)?;
        let open = || -> io::Result<File> {
            let file = syscalls::open_or_create_file(&parent, name).map_err(resolve_error)?;
            let found = Metadata::from_stat(&syscalls::stat(&file)?);
            if found.kind != FileKind::File {
                return Err(RejectReason::NotAFile.into());
            }
            // A new file has at most mode 0600, and an existing one may have any.
            if found.mode != mode {
                syscalls::set_mode(&file, mode.to_rustix())?;
                syscalls::sync(&file)?;
            }
            // The process that created it may have been killed before this.
            syscalls::sync(&parent)?;
            Ok(file.into())
        };
        open().map_err(|source| Error::new(FileOperation::Open, self.full_path(path), source))
    }

    /// Opens a directory below this one, and creates it and its parents if they are missing.
    ///
    /// The directory has exactly this mode afterwards, also if it existed before. Parents get the mode only
    /// when they are created; a call killed between creating a parent and setting its mode leaves the mode
    /// reduced by the umask, which creating a layout repairs. All of them are durable.
    ///
    /// # Errors
    /// [`FileOperation::CreateDir`]; [`is_not_a_directory`](Error::is_not_a_directory) and
    /// [`is_symlink`](Error::is_symlink) if something else has the name.
    pub fn ensure_dir(&self, path: impl AsRef<Path>, mode: FileMode) -> Result<Self, Error> {
        let path = path.as_ref();
        let to_error = |source| Error::new(FileOperation::CreateDir, self.full_path(path), source);
        if path.as_os_str().is_empty() {
            self.set_own_mode(mode).map_err(to_error)?;
            return self.try_clone();
        }
        file_name::split_last(path).map_err(|invalid| to_error(invalid.into()))?;
        let mut dir = Self { fd: self.fd.try_clone().map_err(to_error)?, path: self.path.clone() };
        // One component at a time: each is durable in its parent before the next one is created in it.
        for name in path.as_os_str().as_bytes().split(|&byte| byte == b'/').map(OsStr::from_bytes) {
            dir = dir.ensure_child(name, mode).map_err(to_error)?;
        }
        dir.set_own_mode(mode).map_err(to_error)?;
        Ok(dir)
    }

    fn ensure_child(&self, name: &OsStr, mode: FileMode) -> io::Result<Self> {
        let created = match syscalls::make_dir(self, name, mode.to_rustix()) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(source) => return Err(source.into()),
        };
        let fd = match syscalls::open_beneath(self, Path::new(name), OPEN_DIR_FLAGS) {
            // The umask has removed the permissions of the owner.
            Err(Errno::ACCESS) if created => {
                let locked = syscalls::open_beneath(self, Path::new(name), OFlags::PATH | OFlags::DIRECTORY);
                syscalls::set_mode_by_proc_path(
                    locked.map_err(resolve_error)?,
                    FileMode::PRIVATE_DIR.to_rustix(),
                )?;
                syscalls::open_beneath(self, Path::new(name), OPEN_DIR_FLAGS)
            }
            opened => opened,
        };
        let level = Self { fd: fd.map_err(resolve_error)?, path: self.path.join(name) };
        if created {
            // mkdir(2) has applied the umask. A directory that existed keeps its mode.
            level.set_own_mode(mode)?;
        }
        // The process that created it may have been killed before this.
        syscalls::sync(self)?;
        Ok(level)
    }

    fn set_own_mode(&self, mode: FileMode) -> io::Result<()> {
        // Only if the mode differs: the file system may be read-only.
        if FileMode::from_st_mode(syscalls::stat(self)?.st_mode) != mode {
            syscalls::set_mode(self, mode.to_rustix())?;
            syscalls::sync(self)?;
        }
        Ok(())
    }
}
