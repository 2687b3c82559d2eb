//! The root directory of a node.

use super::{DataPartition, EfiSystemPartition, EphemeralDir, EtcDir, MountPoint, RunDir, TmpDir};

crate::layout! {
    /// All files of a node, by the file system that they are mounted from.
    ///
    /// The system image has these directories, read-only. Creating the layout creates the missing ones.
    /// [`MountSpec`](crate::mount::MountSpec) has a constant for each of the mounts.
    pub struct NodeRoot {
        /// The EFI system partition, unencrypted: everything a node needs before it can open another
        /// partition.
        pub esp: MountPoint<EfiSystemPartition> = "esp", 0o755;
        /// Persistent files.
        pub data: MountPoint<DataPartition> = "data", 0o755;
        /// Files that other programs read from `/etc`.
        pub etc: EtcDir = "etc", 0o755;
        /// Files that last until the next boot: sockets, generated configuration.
        pub ephemeral: MountPoint<EphemeralDir> = "ephemeral", 0o755;
        /// Temporary files of any program.
        pub tmp: MountPoint<TmpDir> = "tmp", 0o1777;
        /// Files of other programs until the next boot.
        pub run: MountPoint<RunDir> = "run", 0o755;
    }
}
