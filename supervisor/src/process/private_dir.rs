//! A directory whose content this program believes, because nobody else can change it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

/// Opens a directory that belongs to this program's user, and that no other user can write to. What is in it is
/// reached through the descriptor: the path may lead elsewhere by then.
///
/// # Errors
/// The failed system call; or the owner or mode, with what to type.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty())?;
    let (stat, own) = (rustix::fs::fstat(&dir)?, rustix::process::geteuid().as_raw());
    let mode = stat.st_mode & 0o7777;
    let path = path.display();
    if stat.st_uid != own {
        return Err(io::Error::other(format!(
            "it belongs to user {}, who may have written what is in it, and not to user {own}: remove it",
            stat.st_uid
        )));
    }
    if mode & 0o022 != 0 {
        return Err(io::Error::other(format!(
            "other users can write to it, mode {mode:04o}: look through it, then `chmod go-w {path}`"
        )));
    }
    Ok(dir)
}
