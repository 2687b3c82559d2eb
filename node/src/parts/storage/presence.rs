//! Whether the open volume is still there: its device may be pulled, and its file system may shut down.
//!
//! The kernel says when to look, by its log and by the event that a block device was removed; what it then answers counts.

use std::fs;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat, major, minor};
use nodekeel_localstorage::Dir;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::spawn_blocking;

use super::error::StorageError;
use crate::block_events::{BlockAction, BlockEvents};
use crate::device_faults::DeviceFaults;
use crate::dn::STORAGE;

/// Checks that an open volume can be used. It blocks.
pub(super) fn check_presence(volume: &Dir) -> Result<(), StorageError> {
    let path = || volume.path().to_owned();
    // What has not shut down answers this from memory.
    match fstat(volume) {
        Ok(stat) if is_missing(Path::new("/sys"), stat.st_dev) => {
            return Err(StorageError::Removed { path: path() });
        }
        _ => {}
    }
    // XFS and ext4 refuse each open(2) after a shutdown.
    match openat(volume.as_fd(), ".", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())
    {
        Err(Errno::EIO) => Err(StorageError::ShutDown { path: path() }),
        _ => Ok(()),
    }
}

/// Waits until an open volume can't be used any more.
pub(super) async fn wait_for_loss(volume: Dir, faults: &DeviceFaults) -> StorageError {
    // Both before the first check.
    let (mut faults, mut removals) = (faults.subscribe(), Removals::subscribe());
    let volume = std::sync::Arc::new(volume);
    loop {
        let checked = std::sync::Arc::clone(&volume);
        // It fails only if it panics.
        if let Ok(Err(loss)) = spawn_blocking(move || check_presence(&checked)).await {
            return loss;
        }
        tokio::select! {
            () = removals.next() => {}
            fault = faults.recv() => if let Err(RecvError::Closed) = fault {
                removals.next().await;
            }
        }
    }
}

/// Returns whether the device of a file system has gone, or each device of which it consists. One of several is a matter of
/// RAID.
fn is_missing(sys: &Path, file_system: u64) -> bool {
    let numbers = sys.join("dev/block");
    // A file system without a device, or a sandbox without this directory.
    if major(file_system) == 0 || !numbers.exists() {
        return false;
    }
    is_device_missing(sys, &numbers.join(format!("{}:{}", major(file_system), minor(file_system))))
}

fn is_device_missing(sys: &Path, device: &Path) -> bool {
    if !device.exists() {
        return true;
    }
    // The links stay when the devices have gone: their names count.
    let slaves = fs::read_dir(device.join("slaves")).into_iter().flatten().flatten();
    let mut slaves = slaves.map(|slave| sys.join("class/block").join(slave.file_name())).peekable();
    slaves.peek().is_some() && slaves.all(|slave| is_device_missing(sys, &slave))
}

/// The kernel's events that a block device was removed; none if it gives none.
struct Removals(Option<BlockEvents>);

impl Removals {
    fn subscribe() -> Self {
        Self(BlockEvents::subscribe(BlockAction::Remove).inspect_err(log_no_events).ok())
    }

    async fn next(&mut self) {
        if let Some(events) = &mut self.0 {
            match events.next().await {
                Ok(()) => return,
                Err(error) => log_no_events(&error),
            }
        }
        self.0 = None;
        std::future::pending().await
    }
}

fn log_no_events(error: &io::Error) {
    tracing::info!(dn = STORAGE, "the kernel's log alone says that a disk was removed: {error}");
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_volume_is_missing_with_its_device_or_all_below_it_and_not_with_one_of_them() {
        let scratch = tempfile::tempdir().expect("a directory");
        let sys = scratch.path();
        let file_system = nix::sys::stat::makedev(253, 1);
        assert!(!is_missing(sys, file_system), "a sandbox");
        for name in ["dev/block", "class/block", "devices/dm-1/slaves", "devices/sda", "devices/sdb"] {
            fs::create_dir_all(sys.join(name)).expect("made");
        }
        assert!(is_missing(sys, file_system) && !is_missing(sys, 7), "one has no device");
        symlink("../../devices/dm-1", sys.join("dev/block/253:1")).expect("made");
        assert!(!is_missing(sys, file_system), "a whole disk");
        for disk in ["sda", "sdb"] {
            symlink(format!("../../{disk}"), sys.join("devices/dm-1/slaves").join(disk)).expect("made");
            symlink(format!("../../devices/{disk}"), sys.join("class/block").join(disk)).expect("made");
        }
        for (disk, missing) in [("sda", false), ("sdb", true)] {
            fs::remove_file(sys.join("class/block").join(disk)).expect("there");
            assert_eq!(is_missing(sys, file_system), missing, "without {disk}");
        }
    }
}
