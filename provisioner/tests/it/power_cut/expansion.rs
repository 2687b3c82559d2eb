//! Limits of expanded volumes: what was reported is in force.

use anyhow::{Result, ensure};
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_provisioner::VolumeStore as _;
use testbed::guest::disk::FileSystem;
use testbed::power_cut::{CutPlan, RecordedDisk};

use super::store::{MIB, MountedStore};
use crate::service::harness::id;

const EXPANSIONS: usize = 8;

fn limits(mib: u64) -> QuotaLimits {
    QuotaLimits { bytes: Some(Bytes(mib * MIB)), inodes: Some(Inodes(mib * 100)) }
}

fn create_volume(mounted: &MountedStore) -> Result<()> {
    let store = mounted.store();
    mounted.wait_for(async {
        store.create_identity().await?;
        Ok(store.create(&id(1), limits(1)).await?)
    })
}

fn expand_volume(mounted: &MountedStore, mib: u64) -> Result<()> {
    Ok(mounted.wait_for(mounted.store().resize(&id(1), limits(mib)))?)
}

fn check_file_system(kind: FileSystem, operation: &str) -> Result<()> {
    let disk = RecordedDisk::acquire(&[320 * MIB])?;
    kind.format_device(disk.part(0))?;
    let mounted = MountedStore::mount(kind, disk.part(0))?;
    create_volume(&mounted)?;
    disk.mark("prepared")?;
    for number in 1..=EXPANSIONS {
        expand_volume(&mounted, 1 + number as u64)?;
        disk.mark(&format!("expanded-{number}"))?;
    }
    drop(mounted);
    let recording = disk.finish()?;
    let plan = CutPlan::new(operation, [5, 100]);
    recording.check_cuts(&plan, |cut| {
        let mounted = MountedStore::mount(kind, recording.part(0))?;
        let reported = limits(1 + cut.last_number("expanded") as u64);
        let found = mounted.wait_for(mounted.store().usage(&id(1)))?.limits;
        ensure!(
            found.bytes >= reported.bytes && found.inodes >= reported.inodes,
            "{found:?} after {reported:?}"
        );
        expand_volume(&mounted, 1 + EXPANSIONS as u64)
    })
}

#[test]
#[ignore = "sampled: needs kernel with 2 disks of 1 GiB"]
fn an_expansion_that_was_reported_is_in_force_after_power_cuts() {
    check_file_system(FileSystem::Xfs, "volume expanded on XFS").unwrap();
    check_file_system(FileSystem::Ext4, "volume expanded on ext4").unwrap();
}
