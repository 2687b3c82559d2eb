//! The devices of the kernel's device-mapper below the work and its check.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::fs::OFlags;

use crate::guest::disk::GuestDisk;
use crate::{command_output, wait_until};

const SECTOR_BYTES: u64 = 512;

/// A part of a recorded disk.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) device: MappedDevice,
    /// Which disk it is on.
    pub(super) disk: usize,
    /// Where it starts on the disk, and its size, in bytes.
    pub(super) start: u64,
    pub(super) size: u64,
}

/// A device of the kernel's device-mapper, removed when this is dropped.
#[derive(Debug)]
pub(super) struct MappedDevice {
    name: String,
    pub(super) path: PathBuf,
}

impl Part {
    /// Waits until no file system, mapping or program uses it.
    pub(super) fn wait_until_free(&self, within: Duration) -> Result<()> {
        let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
        wait_until(within, "an unused part", || {
            let opened = OpenOptions::new().read(true).custom_flags(exclusive).open(&self.device.path);
            opened.map(drop).with_context(|| format!("get {} alone: unmount it", self.device.path.display()))
        })
    }
}

impl MappedDevice {
    pub(super) fn create(name: String, table: &str) -> Result<Self> {
        run_dmsetup(&["create", &name, "--noudevsync", "--table", table])?;
        // Removed, if its number can't be read.
        let mut device = Self { name, path: PathBuf::new() };
        let minor = ["info", "--columns", "--noheadings", "--options", "minor", &device.name];
        device.path = format!("/dev/dm-{}", run_dmsetup(&minor)?.trim()).into();
        Ok(device)
    }

    /// Writes a mark into the log of a device that has one.
    pub(super) fn send_mark(&self, text: &str) -> Result<()> {
        run_dmsetup(&["message", &self.name, "0", "mark", text]).map(drop)
    }

    pub(super) fn replace_table(&self, table: &str) -> Result<()> {
        run_dmsetup(&["reload", &self.name, "--table", table])?;
        run_dmsetup(&["resume", &self.name, "--noudevsync"]).map(drop)
    }

    pub(super) fn remove(mut self) -> Result<()> {
        let name = std::mem::take(&mut self.name);
        run_dmsetup(&["remove", "--noudevsync", "--retry", &name]).map(drop)
    }
}

impl Drop for MappedDevice {
    fn drop(&mut self) {
        if !self.name.is_empty() {
            let _ = run_dmsetup(&["remove", "--noudevsync", "--retry", &self.name]);
        }
    }
}

pub(super) fn linear_table(size: u64, device: &Path, start: u64) -> String {
    format!("0 {} linear {} {}", size / SECTOR_BYTES, device.display(), start / SECTOR_BYTES)
}

pub(super) fn logged_table(size: u64, disk: &GuestDisk, log: &GuestDisk) -> String {
    let [disk, log] = [disk, log].map(|disk| disk.device_path().display().to_string());
    format!("0 {} log-writes {disk} {log}", size / SECTOR_BYTES)
}

pub(super) fn open_disk(disk: &GuestDisk) -> Result<File> {
    let path = disk.device_path();
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.with_context(|| format!("open {}", path.display()))
}

fn run_dmsetup(arguments: &[&str]) -> Result<String> {
    // Otherwise it waits for a udev that a guest doesn't have.
    command_output(Command::new("dmsetup").args(arguments).env("DM_DISABLE_UDEV", "1"))
}
