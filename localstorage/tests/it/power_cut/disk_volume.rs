//! The creation of a plain volume, on a blank disk and over contents that the operator gave up.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use nodekeel_localstorage::mount::{Mounter as _, OsMounter};
use nodekeel_localstorage::volume::{
    DataVolume as _, DiskVolume, ErasePolicy, VolumeContents, VolumeError, inspect_disk,
};
use testbed::command_output;
use testbed::power_cut::{CutPlan, PowerCut, RecordedDisk};

use super::{XFS_BYTES, check_witness, format_count, start_memory, write_witness};
use crate::fixture::{NodeDirs, in_child_process};

/// A machine with this disk, after its start.
struct Machine<'a> {
    device: &'a Path,
    memory: NodeDirs,
}

impl<'a> Machine<'a> {
    fn start(device: &'a Path) -> Self {
        Self { device, memory: start_memory() }
    }

    fn volume(&self) -> DiskVolume {
        DiskVolume::new(self.device, self.memory.path("data"), Arc::new(OsMounter))
            .with_mkfs(self.memory.path("mkfs"))
    }

    fn contents(&self) -> Result<VolumeContents> {
        Ok(inspect_disk(self.device)?.contents)
    }
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        let _ = OsMounter.unmount(&self.memory.path("data"));
    }
}

fn check_creation(machine: &Machine<'_>, cut: &PowerCut, erase: &ErasePolicy) -> Result<()> {
    let volume = machine.volume();
    let is_created = match volume.mount_existing() {
        Ok(top) => {
            check_witness(&top, cut)?;
            true
        }
        Err(error) if cut.has_mark("created") => return Err(error).context("the volume was lost"),
        Err(_) => false,
    };
    volume.unmount()?;
    let mut erase = erase.clone();
    let contents = machine.contents()?;
    if let ErasePolicy::Exactly(agreed) = &erase
        && contents.mark() == agreed.mark()
    {
        // The operator gives up the disk that was attached again: it has a new identity.
        erase = ErasePolicy::Exactly(contents);
        // Nothing was written yet, so nothing is erased without the operator.
        let kept = volume.mount_new(ErasePolicy::Nothing);
        ensure!(matches!(kept, Err(VolumeError::Occupied { .. })), "foreign data were given up: {kept:?}");
    }
    match volume.mount_new(erase) {
        Ok(top) => {
            ensure!(!is_created, "a complete volume was created again");
            write_witness(&top)?;
        }
        Err(VolumeError::Occupied { .. }) if is_created => {}
        Err(error) => return Err(error).context("the creation does not resume"),
    }
    volume.unmount()?;
    if is_created {
        ensure!(format_count(&machine.memory) == 0, "a complete volume was formatted");
    }
    volume.mount_existing().context("open the volume")?;
    Ok(volume.unmount()?)
}

/// Creates a volume on a recorded disk, and checks the creation after each cut.
fn check_creations(operation: &str, counts: [usize; 2], mkfs: Option<&[&str]>) -> Result<()> {
    let disk = RecordedDisk::acquire(&[XFS_BYTES])?;
    if let Some([program, arguments @ ..]) = mkfs {
        command_output(Command::new(program).args(arguments).arg(disk.part(0)))?;
    }
    disk.mark("prepared")?;
    let erase = {
        let machine = Machine::start(disk.part(0));
        let erase = match machine.contents()? {
            VolumeContents::Unread { .. } => ErasePolicy::Nothing,
            found => ErasePolicy::Exactly(found),
        };
        let volume = machine.volume();
        let top = volume.mount_new(erase.clone())?;
        disk.mark("created")?;
        write_witness(&top)?;
        disk.mark("witness")?;
        drop(top);
        volume.unmount()?;
        erase
    };
    let recording = disk.finish()?;
    recording.check_cuts(&CutPlan::new(operation, counts), |cut| {
        check_creation(&Machine::start(recording.part(0)), cut, &erase)
    })
}

#[test]
#[ignore = "sampled: needs kernel with 4 disks of 1 GiB"]
fn a_volume_whose_creation_was_cut_resumes_and_one_with_data_is_never_formatted() {
    in_child_process(a_volume_whose_creation_was_cut_resumes_and_one_with_data_is_never_formatted, || {
        check_creations("DiskVolume::mount_new", [2, 60], None).unwrap()
    });
}

#[test]
#[ignore = "soak: needs kernel with 4 disks of 1 GiB"]
fn a_volume_over_contents_that_were_given_up_resumes_after_power_cuts() {
    in_child_process(a_volume_over_contents_that_were_given_up_resumes_after_power_cuts, || {
        let mkfs = ["mkfs.ext4", "-q", "-F"];
        check_creations("DiskVolume::mount_new over an ext4", [4, 40], Some(&mkfs)).unwrap();
    });
}
