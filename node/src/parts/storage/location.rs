//! Finds the device of the data volume, and its EFI system partition.

use std::path::{Path, PathBuf};

use nodekeel_localstorage::volume::{
    BlockDevices, Partition, PartitionError, PartitionGrowth, PartitionQuery, TableCopies,
};

use super::config::device::{DeviceConfig, DeviceLocation, EspLocation};
use super::error::{EspError, StorageError};
use crate::error_chain::error_chain;

/// The device of the data volume.
#[derive(Debug, Clone)]
pub(super) struct FoundDevice {
    pub(super) path: PathBuf,
    /// `None` for a whole disk.
    partition: Option<Partition>,
}

/// Finds the device. Changes nothing.
pub(super) fn find_device(location: &DeviceLocation) -> Result<FoundDevice, StorageError> {
    match location {
        DeviceLocation::Disk(disk) => Ok(FoundDevice { path: disk.clone(), partition: None }),
        DeviceLocation::Partition(query) => {
            let partition = find_partition(query).map_err(StorageError::Find)?;
            Ok(FoundDevice { path: partition.device_path.clone(), partition: Some(partition) })
        }
    }
}

fn find_partition(query: &PartitionQuery) -> Result<Partition, PartitionError> {
    BlockDevices::of_host()?.find_partition(query)
}

/// Completes a growth of the partition that was cut off: before, the partition is not found.
pub(super) fn resume_growth(location: &DeviceLocation) -> Result<(), PartitionError> {
    match location {
        DeviceLocation::Disk(_) => Ok(()),
        DeviceLocation::Partition(query) => BlockDevices::of_host()?.resume_growth(query.disk.as_deref()),
    }
}

impl FoundDevice {
    /// Grows a partition to the end of its disk, if it is the last one. Otherwise it stays as it is, which no volume
    /// suffers from.
    pub(super) fn grow_partition(&self) {
        let Some(partition) = &self.partition else { return };
        if partition.table_copies != TableCopies::Both {
            tracing::warn!("{}: {}", partition.disk_path.display(), partition.table_copies);
        }
        match BlockDevices::of_host().and_then(|devices| devices.grow_partition(partition)) {
            Ok(PartitionGrowth::Unchanged) => {}
            Ok(PartitionGrowth::Grown { from_bytes, to_bytes }) => {
                let path = self.path.display();
                tracing::info!("grew partition {path} from {from_bytes} to {to_bytes} bytes");
            }
            Err(error) => tracing::info!("the partition keeps its size: {}", error_chain(&error)),
        }
    }

    /// By how many bytes [`grow_partition`](Self::grow_partition) would grow it; 0 where that is not known.
    pub(super) fn growable_bytes(&self) -> u64 {
        let Some(partition) = &self.partition else { return 0 };
        let growable = BlockDevices::of_host().and_then(|devices| devices.growable_bytes(partition));
        growable.unwrap_or_else(|error| {
            tracing::info!("the partition keeps its size: {}", error_chain(&error));
            0
        })
    }
}

/// Finds the configured EFI system partition; `None` if `esp/` is a directory.
pub(super) fn find_esp(config: &DeviceConfig) -> Result<Option<PathBuf>, EspError> {
    match (&config.esp, &config.location) {
        (EspLocation::Directory, _) => Ok(None),
        (EspLocation::Device(device), _) => Ok(Some(device.clone())),
        (EspLocation::SameDisk, DeviceLocation::Disk(disk)) => find_esp_of(disk).map(Some),
        (EspLocation::SameDisk, DeviceLocation::Partition(query)) => {
            let data = find_partition(query).map_err(EspError::Find)?;
            find_esp_of(&data.disk_path).map(Some)
        }
    }
}

fn find_esp_of(disk: &Path) -> Result<PathBuf, EspError> {
    let found = BlockDevices::of_host().and_then(|devices| devices.find_esp(disk)).map_err(EspError::Find)?;
    Ok(found.device_path)
}
