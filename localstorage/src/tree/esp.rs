//! The EFI system partition.
//!
//! It is vfat: its modes are those of the mount, whatever is declared here, and replacing a file is as safe as the file
//! system allows. What must survive a power cut at any point is written through the [journal](crate::journal).

use super::{Directory, File};

crate::layout! {
    /// The EFI system partition.
    pub struct Esp {
        /// What the node knows before its data partition is open.
        pub node: EspNode = "{brand}", 0o700;
        /// What the firmware starts.
        pub efi: Efi = "EFI", 0o755;
    }

    /// What a node knows before its data partition is open; each [loaded](File::load) by whoever knows its format.
    pub struct EspNode {
        /// How the data partition is opened, sealed to the TPM where there is one.
        pub sealed_configuration: File = "sealed_configuration.pb", 0o644;
        /// How to found a cluster, or which one to join.
        pub parameters: File = "parameters.pb", 0o644;
        /// Where the cluster's other nodes were last.
        pub cluster_directory: File = "cluster_directory.pb", 0o644;
        /// The network, where it is not found out; may be [absent](super::LoadError::optional).
        pub network_configuration: File = "network_configuration.pb", 0o644;
    }

    /// What the firmware starts.
    pub struct Efi {
        /// Where firmware looks that was told nothing.
        pub boot: Directory = "BOOT", 0o755;
        /// Both slots of the system.
        pub images: BootImages = "{brand}", 0o755;
    }

    /// Both slots of the system, of which one runs.
    pub struct BootImages {
        /// Slot A.
        pub a: File = "boot-a.efi", 0o644;
        /// Slot B.
        pub b: File = "boot-b.efi", 0o644;
    }
}
