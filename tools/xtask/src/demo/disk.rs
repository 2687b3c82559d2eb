//! The disk of the demo's node: an image in its directory, where this machine's kernel can hold a data volume.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use testbed::{command_output, tools};

use super::DemoClock;
use crate::run;

/// As noded calls the mapping of an encrypted volume.
const MAPPING: &str = "nodekeel-data";
const DISK_BYTES: u64 = 1 << 30;
/// The smallest XFS.
const PROBE_BYTES: u64 = 320 << 20;

/// A loop device over an image, detached when this is dropped.
#[derive(Debug)]
pub(super) struct DemoDisk {
    device: LoopDevice,
    /// Where the node mounts its volume.
    mount_point: PathBuf,
    is_encrypted: bool,
}

impl DemoDisk {
    /// `None` where the node has to keep its data in a directory: it says why.
    pub(super) fn attach(directory: &Path, data: &Path, clock: &DemoClock) -> Result<Option<Self>> {
        if let Err(why) = probe_kernel(directory) {
            clock.print_step("no data volume on a disk here, so the node keeps its data in a directory");
            println!("    {why:#}");
            return Ok(None);
        }
        let device = LoopDevice::attach(&directory.join("disk"), DISK_BYTES)?;
        let is_encrypted = can_encrypt();
        if !is_encrypted {
            clock.print_step(
                "no encryption here: the kernel has no dm-crypt, or another node has its volume open",
            );
        }
        Ok(Some(Self { device, mount_point: data.join("data"), is_encrypted }))
    }

    /// The section of noded's configuration.
    pub(super) fn config(&self) -> String {
        let encryption = match self.is_encrypted {
            true => "encryption = \"encrypted\"\nkeys = \"local\"\n",
            false => "encryption = \"none\"\n",
        };
        format!("\n[storage]\nkind = \"disk\"\ndevice = {:?}\n{encryption}", self.device.0)
    }
}

/// A noded that was killed leaves its volume open.
impl Drop for DemoDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mount_point).output();
        if self.device.has_mapping() {
            let _ = Command::new("dmsetup").args(["remove", "--retry", MAPPING]).output();
        }
    }
}

#[derive(Debug)]
struct LoopDevice(PathBuf);

impl LoopDevice {
    fn attach(image: &Path, bytes: u64) -> Result<Self> {
        let _ = Command::new("modprobe").arg("loop").output();
        let file = File::create(image).with_context(|| format!("create {}", image.display()))?;
        file.set_len(bytes).with_context(|| format!("size {}", image.display()))?;
        let losetup = tools::find_tool(tools::LOSETUP)?;
        let free = command_output(Command::new(&losetup).arg("-f"))?;
        let device = PathBuf::from(free.trim());
        command_output(Command::new(&losetup).arg(&device).arg(image))?;
        Ok(Self(device))
    }

    /// Whether the mapping is over this device: another node's has the same name.
    fn has_mapping(&self) -> bool {
        let name = self.0.file_name().unwrap_or_default();
        let holders = fs::read_dir(Path::new("/sys/block").join(name).join("holders"));
        let read_name = |holder: PathBuf| fs::read_to_string(holder.join("dm/name"));
        let mut holders = holders.into_iter().flatten().flatten();
        holders.any(|holder| read_name(holder.path()).is_ok_and(|name| name.trim_end() == MAPPING))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = tools::find_tool(tools::LOSETUP)
            .map_err(anyhow::Error::new)
            .and_then(|losetup| command_output(Command::new(losetup).arg("-d").arg(&self.0)));
        if let Err(error) = detached {
            eprintln!("detach {}: {error:#}", self.0.display());
        }
    }
}

/// Mounts an XFS with project quotas, as the node would.
fn probe_kernel(directory: &Path) -> Result<()> {
    ensure!(run::is_root(), "only root may attach a disk and mount it");
    let (image, target) = (directory.join("probe"), directory.join("probed"));
    let device = LoopDevice::attach(&image, PROBE_BYTES)?;
    command_output(Command::new(tools::find_tool(tools::MKFS_XFS)?).arg("-q").arg(&device.0))?;
    fs::create_dir(&target).with_context(|| format!("create {}", target.display()))?;
    let mut mount = Command::new(tools::find_tool(tools::MOUNT)?);
    let mounted = command_output(mount.args(["-t", "xfs", "-o", "prjquota"]).arg(&device.0).arg(&target));
    mounted.context("mount an XFS with project quotas")?;
    command_output(Command::new(tools::find_tool(tools::UMOUNT)?).arg(&target))?;
    drop(device);
    fs::remove_dir(&target).and_then(|()| fs::remove_file(&image)).context("remove the probed disk")
}

/// Whether the kernel has dm-crypt, and the mapping is free.
fn can_encrypt() -> bool {
    let _ = Command::new("modprobe").arg("dm-crypt").output();
    let dmsetup = |arguments: &[&str]| command_output(Command::new("dmsetup").args(arguments));
    let has_crypt =
        dmsetup(&["targets"]).is_ok_and(|targets| targets.lines().any(|line| line.starts_with("crypt ")));
    has_crypt && dmsetup(&["info", MAPPING]).is_err()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    #[ignore = "needs kernel"]
    fn a_disk_is_attached_where_the_kernel_can_hold_a_volume_and_detached_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let clock = DemoClock(Instant::now());
        let disk = DemoDisk::attach(directory.path(), &directory.path().join("data"), &clock).unwrap();
        let disk = disk.expect("a guest's kernel has XFS with project quotas");
        assert!(disk.is_encrypted);
        let config = disk.config();
        assert!(config.contains("device = \"/dev/loop") && config.contains("keys = \"local\""), "{config}");
        let device = disk.device.0.clone();
        let backing = Path::new("/sys/block").join(device.file_name().unwrap()).join("loop/backing_file");
        assert!(backing.exists());
        // Another node has opened its volume meanwhile.
        let dmsetup = |arguments: &[&str]| {
            command_output(Command::new("dmsetup").args(arguments).env("DM_DISABLE_UDEV", "1")).unwrap()
        };
        dmsetup(&["create", MAPPING, "--noudevsync", "--table", "0 8 error"]);
        drop(disk);
        assert!(!backing.exists());
        dmsetup(&["remove", "--noudevsync", MAPPING]);
    }
}
