//! The disks of a guest, for the tests that run in it.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::{ScratchDir, command_output, wait_until};

/// The disks that the guest was given, in their order: paths separated by colons.
pub(crate) const DISKS: &str = "NODEKEEL_GUEST_DISKS";
/// Those whose logical blocks have 4096 bytes, in the same way.
const DISKS_4KN: &str = "NODEKEEL_GUEST_4KN_DISKS";
/// Set in every guest.
const MARK: &str = "NODEKEEL_GUEST";
const LOCKS: &str = "/run/nodekeel-disks";
/// How long a disk may be in use after its test.
pub(crate) const FREE_WITHIN: Duration = Duration::from_secs(30);

/// Whether this process runs in a guest.
pub fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// A disk of the guest, locked for this process until it is dropped. It may hold data of earlier tests.
#[derive(Debug)]
pub struct GuestDisk {
    device_path: PathBuf,
    _lock: File,
}

impl GuestDisk {
    /// Acquires a free disk, and waits for one where other tests hold all of them.
    ///
    /// # Errors
    /// The process runs outside a guest, or in one without disks.
    pub fn acquire() -> Result<Self> {
        Ok(Self::acquire_many(1)?.remove(0))
    }

    /// Acquires that many disks together. Two tests that acquire them one after the other may wait for each
    /// other forever.
    ///
    /// # Errors
    /// The process runs outside a guest, or in one with fewer disks.
    pub fn acquire_many(count: usize) -> Result<Vec<Self>> {
        Self::acquire_of(DISKS, count)
    }

    /// Acquires a free disk whose logical blocks have 4096 bytes.
    ///
    /// # Errors
    /// The process runs outside a guest, or in one without such disks.
    pub fn acquire_4kn() -> Result<Self> {
        Ok(Self::acquire_of(DISKS_4KN, 1)?.remove(0))
    }

    fn acquire_of(variable: &str, count: usize) -> Result<Vec<Self>> {
        let all = std::env::var(variable).unwrap_or_default();
        let all: Vec<&Path> = all.split(':').filter(|path| !path.is_empty()).map(Path::new).collect();
        ensure!(is_inside(), "this test runs in a guest only: run cargo xtask kernel-test");
        ensure!(all.len() >= count, "the guest has {} disks, and {count} are needed", all.len());
        fs::create_dir_all(LOCKS).with_context(|| format!("create {LOCKS}"))?;
        // A process that waits here holds no disk.
        let _turn = acquire_lock("turn", FlockOperation::LockExclusive)?;
        load_file_systems();
        let mut taken = Vec::new();
        for wait in [FlockOperation::NonBlockingLockExclusive, FlockOperation::LockExclusive] {
            for path in &all {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if taken.len() < count
                    && taken.iter().all(|disk: &Self| disk.device_path != *path)
                    && let Some(lock) = acquire_lock(&name, wait)?
                {
                    taken.push(Self { device_path: path.to_path_buf(), _lock: lock });
                }
            }
        }
        Ok(taken)
    }

    /// Its block device.
    pub fn device_path(&self) -> &Path {
        &self.device_path
    }

    /// Writes a new file system on it and mounts it with the options; dropping the result unmounts it.
    ///
    /// # Errors
    /// It can't be formatted or mounted.
    pub fn format_and_mount(self, kind: FileSystem, options: &str) -> Result<MountedDisk> {
        kind.format_device(&self.device_path)?;
        self.mount_existing(kind, options)
    }

    /// Mounts the file system that is on it.
    ///
    /// # Errors
    /// It can't be mounted.
    pub fn mount_existing(self, kind: FileSystem, options: &str) -> Result<MountedDisk> {
        let scratch = ScratchDir::new()?;
        let mut mounted =
            MountedDisk { disk: Some(self), kind, point: scratch.path().join("mounted"), scratch };
        fs::create_dir(&mounted.point).with_context(|| format!("create {}", mounted.point.display()))?;
        mounted.mount_with(options)?;
        Ok(mounted)
    }
}

/// Loads what mounts need, once for each guest: while one mount is loading a module, another one that needs it
/// fails. A kernel that has them built in has nothing to load.
fn load_file_systems() {
    let is_loaded = Path::new(LOCKS).join("loaded");
    if !is_loaded.exists() {
        let modules = ["xfs", "ext4", "vfat", "nls_cp437", "nls_ascii", "loop"];
        let _ = command_output(Command::new("modprobe").arg("-a").args(modules));
        let _ = File::create(is_loaded);
    }
}

fn acquire_lock(name: &str, how: FlockOperation) -> Result<Option<File>> {
    let path = Path::new(LOCKS).join(name);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    match flock(&file, how) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("lock {}", path.display())),
    }
}

/// A file system that tests need, with the features that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileSystem {
    /// XFS; it limits projects when mounted with `prjquota`.
    Xfs,
    /// ext4 with the features `quota` and `project`; it limits projects when mounted with `prjquota`.
    Ext4,
    /// ext4 with the defaults of `mkfs.ext4`, which can't limit projects.
    PlainExt4,
    /// FAT, as on an EFI system partition.
    Vfat,
}

impl FileSystem {
    /// Its name to mount(2).
    pub fn type_name(self) -> &'static str {
        match self {
            Self::Xfs => "xfs",
            Self::Ext4 | Self::PlainExt4 => "ext4",
            Self::Vfat => "vfat",
        }
    }

    /// Writes an empty one over the device's data.
    ///
    /// # Errors
    /// Its program fails.
    pub fn format_device(self, device: &Path) -> Result<()> {
        let (program, arguments): (_, &[&str]) = match self {
            Self::Xfs => ("mkfs.xfs", &["-q", "-f"]),
            Self::Ext4 => (
                "mkfs.ext4",
                &["-q", "-F", "-O", "quota,project", "-E", "quotatype=usrquota:grpquota:prjquota"],
            ),
            Self::PlainExt4 => ("mkfs.ext4", &["-q", "-F"]),
            Self::Vfat => ("mkfs.vfat", &["-I"]),
        };
        command_output(Command::new(program).args(arguments).arg(device)).map(drop)
    }
}

/// A mounted file system, unmounted when this is dropped.
#[derive(Debug)]
pub struct MountedDisk {
    /// Dropped first, which unmounts; other tests can acquire the disk after that.
    scratch: ScratchDir,
    disk: Option<GuestDisk>,
    kind: FileSystem,
    point: PathBuf,
}

impl MountedDisk {
    /// The mount point.
    pub fn mount_point(&self) -> &Path {
        &self.point
    }

    /// Its block device.
    pub fn device_path(&self) -> &Path {
        self.disk.as_ref().map_or(Path::new(""), GuestDisk::device_path)
    }

    /// Unmounts it and mounts it again, with these options.
    ///
    /// # Errors
    /// It is busy.
    pub fn remount(&mut self, options: &str) -> Result<()> {
        unmount_when_free(&self.point)?;
        self.mount_with(options)
    }

    /// Unmounts it and gives the disk with its data.
    ///
    /// # Errors
    /// It is busy.
    pub fn unmount(mut self) -> Result<GuestDisk> {
        unmount_when_free(&self.point)?;
        match self.disk.take() {
            Some(disk) => Ok(disk),
            None => bail!("{} has no disk", self.scratch.path().display()),
        }
    }

    fn mount_with(&mut self, options: &str) -> Result<()> {
        // While one mount is loading its file system's module, modprobe would report to the next one that it
        // exists already.
        let _turn = acquire_lock("mount", FlockOperation::LockExclusive)?;
        let mut command = Command::new("mount");
        command.args([
            "-t",
            self.kind.type_name(),
            "-o",
            if options.is_empty() { "defaults" } else { options },
        ]);
        command_output(command.arg(self.device_path()).arg(&self.point)).map(drop)
    }
}

impl Drop for MountedDisk {
    fn drop(&mut self) {
        if self.disk.is_some() {
            // Where it is still busy, removing the scratch directory unmounts it.
            let _ = unmount_when_free(&self.point);
        }
    }
}

/// Unmounts it. Children that other tests are starting hold the files that are open here until they execute their
/// programs.
pub(crate) fn unmount_when_free(point: &Path) -> Result<()> {
    let unmounted = wait_until(FREE_WITHIN, "an unmount", || match unmount(point, UnmountFlags::empty()) {
        Err(Errno::BUSY) => Err(Errno::BUSY.into()),
        done => Ok(done),
    });
    unmounted?.with_context(|| format!("unmount {}", point.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs kernel with 2 disks of 1 GiB"]
    fn a_test_gets_two_separate_disks() {
        let disks = GuestDisk::acquire_many(2).unwrap();
        assert_ne!(disks[0].device_path(), disks[1].device_path());
        for disk in &disks {
            let sectors = disk.device_path().file_name().unwrap().to_str().unwrap();
            let sectors = fs::read_to_string(format!("/sys/block/{sectors}/size")).unwrap();
            assert!(sectors.trim().parse::<u64>().unwrap() * 512 >= 1 << 30, "{sectors}");
        }
        assert!(GuestDisk::acquire_many(100).is_err());
    }

    #[test]
    #[ignore = "needs kernel with a disk of 1 GiB"]
    fn projects_are_limited_on_xfs_and_ext4() {
        for kind in [FileSystem::Xfs, FileSystem::Ext4] {
            let mut mounted = GuestDisk::acquire().unwrap().format_and_mount(kind, "prjquota").unwrap();
            for _ in 0..2 {
                let table = fs::read_to_string("/proc/self/mounts").unwrap();
                let line = table
                    .lines()
                    .find(|line| line.contains(mounted.mount_point().to_str().unwrap()))
                    .unwrap();
                assert!(line.contains(kind.type_name()) && line.contains("prjquota"), "{line}");
                fs::write(mounted.mount_point().join("a"), "b").unwrap();
                mounted.remount("prjquota").unwrap();
            }
            let disk = mounted.unmount().unwrap();
            let again = disk.mount_existing(kind, "").unwrap();
            assert_eq!(fs::read_to_string(again.mount_point().join("a")).unwrap(), "b");
        }
    }

    #[test]
    #[ignore = "needs kernel with a disk of 512 MiB"]
    fn a_dropped_vfat_is_unmounted() {
        let mounted = GuestDisk::acquire().unwrap().format_and_mount(FileSystem::Vfat, "").unwrap();
        let point = mounted.mount_point().to_owned();
        fs::write(point.join("A"), "b").unwrap();
        drop(mounted);
        assert!(!fs::read_to_string("/proc/self/mounts").unwrap().contains(point.to_str().unwrap()));
    }

    #[test]
    fn disks_exist_in_guests_only() {
        if !is_inside() {
            assert!(GuestDisk::acquire().unwrap_err().to_string().contains("cargo xtask kernel-test"));
        }
    }
}
