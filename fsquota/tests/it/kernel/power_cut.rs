//! Limits after power cuts: those that were synced are there, and no directory has a project without its limits.

use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use nodekeel_fsquota::{Bytes, ProjectQuota, QuotaSetter as _, QuotaStatus};
use testbed::guest::disk::FileSystem;
use testbed::power_cut::{CutPlan, MountedDisk, RecordedDisk};

use super::{MIB, both_limits};

const DIRECTORIES: usize = 8;

/// A mounted file system that enforces limits. The quota is closed before the disk is unmounted.
struct Mounted {
    quota: ProjectQuota,
    disk: MountedDisk,
}

impl Mounted {
    fn mount(kind: FileSystem, device: &Path) -> Result<Self> {
        let disk = MountedDisk::mount(kind.type_name(), "prjquota", device)?;
        Ok(Self { quota: ProjectQuota::open(disk.path())?, disk })
    }

    fn path(&self, number: usize) -> PathBuf {
        self.disk.path().join(format!("volume-{number}"))
    }

    /// Creates a directory with its number of MiB.
    fn create_limited(&self, number: usize) -> Result<()> {
        fs::create_dir(self.path(number))?;
        self.set_limits(number, number as u64 * MIB)
    }

    fn set_limits(&self, number: usize, bytes: u64) -> Result<()> {
        self.quota.set_limits(File::open(self.path(number))?.as_fd(), both_limits(bytes, 100))?;
        Ok(())
    }

    /// `None` for an absent directory.
    fn read_status(&self, number: usize) -> Result<Option<Option<QuotaStatus>>> {
        if !self.path(number).exists() {
            return Ok(None);
        }
        Ok(Some(self.quota.read_status(File::open(self.path(number))?.as_fd())?))
    }

    fn sync(&self) -> Result<()> {
        Ok(rustix::fs::syncfs(self.quota.mount_dir())?)
    }
}

/// Every directory that was reported has its limits, and so has each other one that has a project.
fn check_limits(mounted: &Mounted, created: usize, changed: usize) -> Result<()> {
    let mut projects = Vec::new();
    for number in 1..=DIRECTORIES {
        let status = mounted.read_status(number)?;
        ensure!(number > created || status.is_some(), "directory {number} was lost");
        let Some(status) = status.flatten() else {
            ensure!(number > created, "directory {number} has no limits");
            continue;
        };
        let (first, second) = (number as u64 * MIB, (number as u64 + 1) * MIB);
        let bytes = status.limits.bytes;
        let is_known = match number {
            _ if number <= changed => bytes == Some(Bytes(second)),
            _ => bytes == Some(Bytes(first)) || bytes == Some(Bytes(second)),
        };
        ensure!(is_known, "directory {number} is limited to {bytes:?}");
        projects.push(status.project);
    }
    // A number that is in use is not given again.
    mounted.create_limited(DIRECTORIES + 1)?;
    let new = mounted.read_status(DIRECTORIES + 1)?.flatten().context("the new directory has no limits")?;
    ensure!(!projects.contains(&new.project), "project {} is given twice", new.project);
    projects.sort_unstable();
    projects.dedup();
    ensure!(projects.len() >= created, "directories share a project: {projects:?}");
    // The operation resumes.
    for number in 1..=DIRECTORIES {
        if mounted.read_status(number)?.is_none() {
            fs::create_dir(mounted.path(number))?;
        }
        mounted.set_limits(number, (number as u64 + 1) * MIB)?;
    }
    Ok(())
}

fn check_file_system(kind: FileSystem, operation: &str) -> Result<()> {
    let disk = RecordedDisk::acquire(&[320 * MIB])?;
    kind.format_device(disk.part(0))?;
    let mounted = Mounted::mount(kind, disk.part(0))?;
    disk.mark("prepared")?;
    for number in 1..=DIRECTORIES {
        mounted.create_limited(number)?;
        mounted.sync()?;
        disk.mark(&format!("created-{number}"))?;
    }
    for number in 1..=DIRECTORIES {
        mounted.set_limits(number, (number as u64 + 1) * MIB)?;
        mounted.sync()?;
        disk.mark(&format!("changed-{number}"))?;
    }
    drop(mounted);
    let recording = disk.finish()?;
    let plan = CutPlan::new(operation, [5, 100]);
    recording.check_cuts(&plan, |cut| {
        let mounted = Mounted::mount(kind, recording.part(0))?;
        check_limits(&mounted, cut.last_number("created"), cut.last_number("changed"))
    })
}

#[test]
#[ignore = "sampled: needs kernel with 2 disks of 1 GiB"]
fn synced_limits_are_there_after_power_cuts_and_no_project_is_without_limits() {
    check_file_system(FileSystem::Xfs, "quota set on XFS").unwrap();
    check_file_system(FileSystem::Ext4, "quota set on ext4").unwrap();
}
