//! The EFI system partition.
//!
//! It is vfat: its modes are those of the mount, whatever is declared here, and replacing a file is only as
//! safe as the file system allows. State that must survive a power cut at any point belongs in a [step
//! journal](crate::step_journal).

use super::{LayoutDir, LayoutFile};

crate::layout! {
    /// The EFI system partition.
    pub struct EfiSystemPartition {
        /// The configuration available before the data partition is open.
        pub node: EspNodeDir = "{brand}", 0o700;
        /// The boot images of the firmware.
        pub efi: EfiDir = "EFI", 0o755;
    }

    /// The configuration available before the data partition is open. The caller knows the format of each
    /// file and [decodes](super::LayoutFile::load_decoded) it.
    pub struct EspNodeDir {
        /// How to open the data partition, sealed to the TPM if the host has one.
        pub sealed_configuration: LayoutFile = "sealed_configuration.pb", 0o644;
        /// The parameters to bootstrap a cluster or to join one.
        pub parameters: LayoutFile = "parameters.pb", 0o644;
        /// The last known addresses of the other nodes of the cluster.
        pub cluster_directory: LayoutFile = "cluster_directory.pb", 0o644;
        /// The network configuration, if it is not discovered; may be
        /// [absent](super::LoadError::absent_as_none).
        pub network_configuration: LayoutFile = "network_configuration.pb", 0o644;
    }

    /// The boot images of the firmware.
    pub struct EfiDir {
        /// The default boot path of the firmware.
        pub boot: LayoutDir = "BOOT", 0o755;
        /// Both slots of the system.
        pub images: BootImages = "{brand}", 0o755;
    }

    /// Both slots of the system, one of which is running.
    pub struct BootImages {
        /// Slot A.
        pub a: LayoutFile = "boot-a.efi", 0o644;
        /// Slot B.
        pub b: LayoutFile = "boot-b.efi", 0o644;
    }
}
