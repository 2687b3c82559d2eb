//! Limits of expanded volumes after power cuts: what was reported is in force.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nodekeel_fsquota::{Bytes, Inodes, ProjectQuota, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{DirStore, VolumeStore as _};
use rustix::mount::{UnmountFlags, unmount};
use testbed::guest::disk::FileSystem;
use testbed::power_cut::{CutMoments, CutPlan, RecordedDisk};
use testbed::{ScratchDir, command_output, wait_until};
use tokio::runtime::Runtime;

use crate::service::harness::id;

const MIB: u64 = 1 << 20;
const EXPANSIONS: usize = 8;

fn limits(mib: u64) -> QuotaLimits {
    QuotaLimits { bytes: Some(Bytes(mib * MIB)), inodes: Some(Inodes(mib * 100)) }
}

/// A mounted file system with a store.
struct MountedStore {
    scratch: ScratchDir,
    store: Option<DirStore>,
    runtime: Runtime,
}

impl MountedStore {
    fn mount(kind: FileSystem, device: &Path) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let mut command = Command::new("mount");
        command.args(["-t", kind.type_name(), "-o", "prjquota"]).arg(device).arg(scratch.path());
        command_output(&mut command)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut mounted = Self { scratch, store: None, runtime };
        let quota = Arc::new(ProjectQuota::open(mounted.scratch.path())?);
        mounted.store = Some(DirStore::new(Dir::open(mounted.scratch.path())?, quota)?);
        Ok(mounted)
    }

    fn store(&self) -> Result<&DirStore> {
        self.store.as_ref().context("it is mounted")
    }

    fn create_volume(&self) -> Result<()> {
        let store = self.store()?;
        self.runtime.block_on(async {
            store.create_identity().await?;
            store.create(&id(1), limits(1)).await
        })?;
        Ok(())
    }

    fn expand_volume(&self, mib: u64) -> Result<()> {
        Ok(self.runtime.block_on(self.store()?.resize(&id(1), limits(mib)))?)
    }

    fn read_limits(&self) -> Result<QuotaLimits> {
        Ok(self.runtime.block_on(self.store()?.usage(&id(1)))?.limits)
    }
}

/// A child that another test is starting may have its files open.
impl Drop for MountedStore {
    fn drop(&mut self) {
        self.store = None;
        let _ = wait_until(Duration::from_secs(30), "an unmount", || {
            Ok(unmount(self.scratch.path(), UnmountFlags::empty())?)
        });
    }
}

fn check_file_system(kind: FileSystem, operation: &str) -> Result<()> {
    let disk = RecordedDisk::acquire(&[320 * MIB])?;
    kind.format_device(disk.part(0))?;
    let mounted = MountedStore::mount(kind, disk.part(0))?;
    mounted.create_volume()?;
    disk.mark("prepared")?;
    for number in 1..=EXPANSIONS {
        mounted.expand_volume(1 + number as u64)?;
        disk.mark(&format!("expanded-{number}"))?;
    }
    drop(mounted);
    let recording = disk.finish()?;
    let plan = CutPlan {
        operation,
        from: "prepared",
        moments: CutMoments::Any,
        sample_count: 10,
        whole_count: 100,
        torn_bytes: 4096,
    };
    recording.check_cuts(&plan, |cut| {
        let mounted = MountedStore::mount(kind, recording.part(0))?;
        let reported = limits(1 + cut.last_number("expanded") as u64);
        let found = mounted.read_limits()?;
        ensure!(
            found.bytes >= reported.bytes && found.inodes >= reported.inodes,
            "{found:?} after {reported:?}"
        );
        mounted.expand_volume(1 + EXPANSIONS as u64)
    })
}

#[test]
#[ignore = "needs kernel with 2 disks of 1 GiB"]
fn an_expansion_that_was_reported_is_in_force_after_power_cuts() {
    check_file_system(FileSystem::Xfs, "volume expanded on XFS").unwrap();
    check_file_system(FileSystem::Ext4, "volume expanded on ext4").unwrap();
}
