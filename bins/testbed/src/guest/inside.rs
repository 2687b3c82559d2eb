//! What a test in a guest finds there.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::{Scratch, output};

/// The disks that the guest was given, in their order: paths separated by colons.
const DISKS: &str = "NODEKEEL_GUEST_DISKS";
/// Set in every guest.
const MARK: &str = "NODEKEEL_GUEST";
const LOCKS: &str = "/run/nodekeel-disks";

/// Whether this process runs in a guest.
pub fn is_inside() -> bool {
    std::env::var_os(MARK).is_some()
}

/// A disk of the guest, this process' own until it is dropped. What is on it, earlier tests may have left.
#[derive(Debug)]
pub struct Disk {
    path: PathBuf,
    _lock: File,
}

impl Disk {
    /// Takes a free disk, and waits for one where other tests have them all.
    ///
    /// # Errors
    /// Outside of a guest, or in one without disks.
    pub fn take() -> Result<Self> {
        Ok(Self::take_many(1)?.remove(0))
    }

    /// Takes that many disks together. A test that takes them one after the other waits for another that does the
    /// same, for ever.
    ///
    /// # Errors
    /// Outside of a guest, or in one with fewer disks.
    pub fn take_many(count: usize) -> Result<Vec<Self>> {
        let all = std::env::var(DISKS).unwrap_or_default();
        let all: Vec<&Path> = all.split(':').filter(|path| !path.is_empty()).map(Path::new).collect();
        ensure!(is_inside(), "this test runs in a guest only: cargo xtask kernel-test");
        ensure!(all.len() >= count, "the guest has {} disks, and {count} are needed", all.len());
        fs::create_dir_all(LOCKS).with_context(|| format!("create {LOCKS}"))?;
        // Whoever waits here holds no disk.
        let _turn = lock("turn", FlockOperation::LockExclusive)?;
        let mut taken = Vec::new();
        for wait in [FlockOperation::NonBlockingLockExclusive, FlockOperation::LockExclusive] {
            for path in &all {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if taken.len() < count
                    && taken.iter().all(|disk: &Self| disk.path != *path)
                    && let Some(lock) = lock(&name, wait)?
                {
                    taken.push(Self { path: path.to_path_buf(), _lock: lock });
                }
            }
        }
        Ok(taken)
    }

    /// Its block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a new file system on it and mounts that with the options; it is unmounted when that is dropped.
    ///
    /// # Errors
    /// When it can't be made or mounted.
    pub fn mount(self, kind: FileSystem, options: &str) -> Result<Mounted> {
        kind.make(&self.path)?;
        self.mount_existing(kind, options)
    }

    /// Mounts the file system that is on it.
    ///
    /// # Errors
    /// When it can't be mounted.
    pub fn mount_existing(self, kind: FileSystem, options: &str) -> Result<Mounted> {
        let scratch = Scratch::new()?;
        let mut mounted = Mounted { disk: Some(self), kind, point: scratch.path().join("mounted"), scratch };
        fs::create_dir(&mounted.point).with_context(|| format!("create {}", mounted.point.display()))?;
        mounted.attach(options)?;
        Ok(mounted)
    }
}

fn lock(name: &str, how: FlockOperation) -> Result<Option<File>> {
    let path = Path::new(LOCKS).join(name);
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    match flock(&file, how) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error).with_context(|| format!("lock {}", path.display())),
    }
}

/// A kind of file system that tests need, with the features that they need of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileSystem {
    /// XFS; it limits projects when mounted with `prjquota`.
    Xfs,
    /// ext4 with the features `quota` and `project`; it limits projects when mounted with `prjquota`.
    Ext4,
    /// ext4 as `mkfs.ext4` makes it, which can't limit projects.
    PlainExt4,
    /// FAT, as on an EFI system partition.
    Vfat,
}

impl FileSystem {
    /// Its name to mount(2).
    pub fn name(self) -> &'static str {
        match self {
            Self::Xfs => "xfs",
            Self::Ext4 | Self::PlainExt4 => "ext4",
            Self::Vfat => "vfat",
        }
    }

    /// Writes an empty one over whatever is on the device.
    ///
    /// # Errors
    /// What its program says.
    pub fn make(self, device: &Path) -> Result<()> {
        let (program, arguments): (_, &[&str]) = match self {
            Self::Xfs => ("mkfs.xfs", &["-q", "-f"]),
            Self::Ext4 => (
                "mkfs.ext4",
                &["-q", "-F", "-O", "quota,project", "-E", "quotatype=usrquota:grpquota:prjquota"],
            ),
            Self::PlainExt4 => ("mkfs.ext4", &["-q", "-F"]),
            Self::Vfat => ("mkfs.vfat", &["-I"]),
        };
        output(Command::new(program).args(arguments).arg(device)).map(drop)
    }
}

/// A mounted file system, unmounted when this is dropped.
#[derive(Debug)]
pub struct Mounted {
    /// Dropped first, which unmounts; the disk is free for others after that.
    scratch: Scratch,
    disk: Option<Disk>,
    kind: FileSystem,
    point: PathBuf,
}

impl Mounted {
    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.point
    }

    /// Its block device.
    pub fn device(&self) -> &Path {
        self.disk.as_ref().map_or(Path::new(""), Disk::path)
    }

    /// Unmounts it and mounts it again, with these options.
    ///
    /// # Errors
    /// When something still uses it.
    pub fn remount(&mut self, options: &str) -> Result<()> {
        self.detach()?;
        self.attach(options)
    }

    /// Unmounts it and gives the disk with what is on it.
    ///
    /// # Errors
    /// When something still uses it.
    pub fn unmount(mut self) -> Result<Disk> {
        self.detach()?;
        match self.disk.take() {
            Some(disk) => Ok(disk),
            None => bail!("{} has no disk", self.scratch.path().display()),
        }
    }

    /// Tries again while it is busy: the children that other tests are starting hold what is open here until they execute
    /// their programs.
    fn detach(&self) -> Result<()> {
        const ATTEMPTS: u32 = 20_000;
        let attempt = || match unmount(&self.point, UnmountFlags::empty()) {
            Err(Errno::BUSY) => {
                std::thread::yield_now();
                Err(Errno::BUSY)
            }
            other => other,
        };
        let last = (0..ATTEMPTS).map(|_| attempt()).find(|tried| *tried != Err(Errno::BUSY));
        last.unwrap_or(Err(Errno::BUSY)).with_context(|| format!("unmount {}", self.point.display()))
    }

    fn attach(&mut self, options: &str) -> Result<()> {
        // While one mount has its file system's module loaded, modprobe tells the next one that it is there already.
        let _turn = lock("mount", FlockOperation::LockExclusive)?;
        let mut command = Command::new("mount");
        command.args(["-t", self.kind.name(), "-o", if options.is_empty() { "defaults" } else { options }]);
        output(command.arg(self.device()).arg(&self.point)).map(drop)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.disk.is_some() {
            // What is still busy then is left to the scratch directory.
            let _ = self.detach();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "needs kernel with 2 disks of 1 GiB"]
    fn two_disks_are_seen_and_are_ones_own() {
        let disks = Disk::take_many(2).unwrap();
        assert_ne!(disks[0].path(), disks[1].path());
        for disk in &disks {
            let sectors = disk.path().file_name().unwrap().to_str().unwrap();
            let sectors = fs::read_to_string(format!("/sys/block/{sectors}/size")).unwrap();
            assert!(sectors.trim().parse::<u64>().unwrap() * 512 >= 1 << 30, "{sectors}");
        }
        assert!(Disk::take_many(100).is_err());
    }

    #[test]
    #[ignore = "needs kernel with a disk of 1 GiB"]
    fn projects_are_limited_on_xfs_and_ext4() {
        for kind in [FileSystem::Xfs, FileSystem::Ext4] {
            let mut mounted = Disk::take().unwrap().mount(kind, "prjquota").unwrap();
            for _ in 0..2 {
                let table = fs::read_to_string("/proc/self/mounts").unwrap();
                let line =
                    table.lines().find(|line| line.contains(mounted.path().to_str().unwrap())).unwrap();
                assert!(line.contains(kind.name()) && line.contains("prjquota"), "{line}");
                fs::write(mounted.path().join("a"), "b").unwrap();
                mounted.remount("prjquota").unwrap();
            }
            let disk = mounted.unmount().unwrap();
            let again = disk.mount_existing(kind, "").unwrap();
            assert_eq!(fs::read_to_string(again.path().join("a")).unwrap(), "b");
        }
    }

    #[test]
    #[ignore = "needs kernel with a disk of 512 MiB"]
    fn vfat_is_there_and_what_is_dropped_is_unmounted() {
        let mounted = Disk::take().unwrap().mount(FileSystem::Vfat, "").unwrap();
        let point = mounted.path().to_owned();
        fs::write(point.join("A"), "b").unwrap();
        drop(mounted);
        assert!(!fs::read_to_string("/proc/self/mounts").unwrap().contains(point.to_str().unwrap()));
    }

    #[test]
    fn a_disk_is_found_in_a_guest_only() {
        if !is_inside() {
            assert!(Disk::take().unwrap_err().to_string().contains("cargo xtask kernel-test"));
        }
    }
}
