//! The attributes of a file or a directory: owner, mode, times, extended attributes.

use std::ffi::CStr;
use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::{Mode as RawMode, Stat};
use rustix::io::Errno;

use crate::metadata::FileOwner;
use crate::syscalls;
use crate::syscalls::clone as calls;

/// Maximum size of an extended attribute, and of the list of their names. *Source:* `linux/limits.h`,
/// `XATTR_SIZE_MAX` and `XATTR_LIST_MAX`.
const MAX_ATTRIBUTE_BYTES: usize = 64 << 10;

/// Extended attributes that a clone keeps, by the beginning of their names: those of users, access control lists,
/// and the capabilities of programs. Others belong to the file system or to its tools, as project quotas do.
const KEPT_ATTRIBUTES: [&[u8]; 3] = [b"user.", b"system.posix_acl_", b"security.capability"];

/// Reads and copies attributes.
pub(super) struct AttributeBuffers {
    /// The names of attributes, and the value of one.
    buffers: [Vec<u8>; 2],
}

impl AttributeBuffers {
    pub(super) fn new() -> Self {
        Self { buffers: [vec![0; MAX_ATTRIBUTE_BYTES], vec![0; MAX_ATTRIBUTE_BYTES]] }
    }

    /// Returns whether a copy keeps the extended attribute of this name.
    pub(super) fn is_kept(name: &[u8]) -> bool {
        KEPT_ATTRIBUTES.iter().any(|kept| name.starts_with(kept))
    }

    /// Copies the attributes of a file or a directory. The times come last, since all else changes them; the
    /// owner first, since that removes capabilities.
    pub(super) fn copy_attributes(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        let stat = syscalls::stat(from)?;
        syscalls::set_owner(to, owner_of(&stat))?;
        self.for_each(from, |name, value| Ok(calls::write_attribute(to, name, value)?))?;
        syscalls::set_mode(to, RawMode::from_raw_mode(stat.st_mode))?;
        Ok(calls::set_times(to, &calls::times_of(&stat))?)
    }

    /// Visits the name and the value of each extended attribute that a copy keeps.
    pub(super) fn for_each(
        &mut self,
        from: BorrowedFd<'_>,
        mut visit: impl FnMut(&CStr, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let [names, value] = &mut self.buffers;
        let length = match calls::list_attributes(from, names) {
            // The file system has no extended attributes.
            Err(Errno::OPNOTSUPP) => 0,
            length => length?,
        };
        for name in names[..length].split_inclusive(|byte| *byte == 0) {
            if !Self::is_kept(name) {
                continue;
            }
            let name = CStr::from_bytes_with_nul(name).map_err(|_| Errno::INVAL)?;
            match calls::read_attribute(from, name, value) {
                // It has just been removed.
                Err(Errno::NODATA) => {}
                length => visit(name, &value[..length?])?,
            }
        }
        Ok(())
    }
}

pub(super) fn owner_of(stat: &Stat) -> FileOwner {
    FileOwner { uid: stat.st_uid, gid: stat.st_gid }
}
