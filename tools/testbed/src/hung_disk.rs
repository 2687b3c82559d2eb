//! A disk that hangs.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// The request that begins a session. *Source:* `linux/fuse.h`.
const FUSE_INIT: u32 = 26;

/// The length of the header of a request. *Source:* as above, `fuse_in_header`.
const REQUEST_HEADER: usize = 40;

/// The version of the protocol that the answer speaks: the last one with a short answer.
const MAJOR: u32 = 7;
const MINOR: u32 = 22;

/// The largest write that the kernel may send.
const MAX_WRITE: u32 = 64 << 10;

/// A file system over a directory that takes every request and answers none: who asks it waits in the kernel and can't be
/// killed, as with a disk that does not answer. Needs root. Dropping it lets all who wait fail.
#[derive(Debug)]
pub struct HungDisk {
    path: PathBuf,
    server: Option<JoinHandle<()>>,
}

impl HungDisk {
    /// Mounts it over a directory.
    ///
    /// # Errors
    /// The kernel has no FUSE, or the process is not root.
    pub fn mount(path: &Path) -> Result<Self> {
        let device = File::options().read(true).write(true).open("/dev/fuse").context("open /dev/fuse")?;
        let options = format!("fd={},rootmode=40755,user_id=0,group_id=0,allow_other\0", device.as_raw_fd());
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).context("options")?;
        mount("hung", path, "fuse", MountFlags::empty(), options)
            .with_context(|| format!("mount a file system over {}", path.display()))?;
        let server = std::thread::spawn(move || serve(device));
        Ok(Self { path: path.to_owned(), server: Some(server) })
    }
}

impl Drop for HungDisk {
    fn drop(&mut self) {
        // The force lets all requests fail, and ends the server.
        if let Err(error) = unmount(&self.path, UnmountFlags::FORCE | UnmountFlags::DETACH) {
            eprintln!("unmount {}: {error}", self.path.display());
            return;
        }
        let _ = self.server.take().map(JoinHandle::join);
    }
}

/// Reads all requests until the end of the session, and answers only the first one.
fn serve(mut device: File) {
    let mut request = vec![0; MAX_WRITE as usize + 8192];
    while let Ok(length) = device.read(&mut request) {
        let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap_or_default());
        if length < REQUEST_HEADER || number(4) != FUSE_INIT {
            continue;
        }
        // No read-ahead, no features, no limits of requests in the background.
        let body = [MAJOR, MINOR, 0, 0, 0, MAX_WRITE].map(u32::to_ne_bytes).concat();
        let length = u32::try_from(16 + body.len()).unwrap_or_default();
        let header = [&length.to_ne_bytes()[..], &[0; 4], &request[8..16]].concat();
        if let Err(error) = device.write_all(&[header, body].concat()) {
            eprintln!("answer FUSE_INIT: {error}");
        }
    }
}
