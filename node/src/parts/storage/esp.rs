//! The EFI system partition, mounted on `esp/` of the data directory.

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::{MountSpec, Mounter as _, OsMounter};

use super::config::device::{DeviceConfig, EspLocation};
use super::error::EspError;
use super::location::{find_esp, resume_growth};
use crate::layout::ESP_DIR;

/// Mounts the configured partition, unless it is mounted. It stays mounted when noded exits: the next one finds it so.
pub(super) fn mount_esp(data: &Dir, config: &DeviceConfig) -> Result<(), EspError> {
    // The kernel knows no partition of the disk before. An ESP on another disk does not wait for that one.
    let resumed = resume_growth(&config.location);
    if config.esp == EspLocation::SameDisk {
        resumed.map_err(EspError::Find)?;
    }
    let Some(device) = find_esp(config)? else { return Ok(()) };
    let target = data.path().join(ESP_DIR);
    if !data.is_mount_point(ESP_DIR).map_err(EspError::Directory)? {
        let below = data.open_dir(ESP_DIR).map_err(EspError::Directory)?;
        if !below.list().map_err(EspError::Directory)?.is_empty() {
            return Err(EspError::Hidden { path: target });
        }
    }
    OsMounter.mount(&MountSpec::ESP, Some(&device), &target).map_err(EspError::Mount)
}
