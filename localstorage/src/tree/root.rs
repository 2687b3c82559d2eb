//! The root of a node.

use super::{Data, Ephemeral, Esp, Etc, MountPoint, Run, Tmp};

crate::layout! {
    /// Everything that a node keeps, by what it is mounted from.
    ///
    /// The system's image has these directories, read-only; placing makes them where they are missing.
    /// [`MountSpec`](crate::mount::MountSpec) has a constant for each of the mounts.
    pub struct Root {
        /// The EFI system partition, in the clear: what a node needs before it can open anything else.
        pub esp: MountPoint<Esp> = "esp", 0o755;
        /// What lasts.
        pub data: MountPoint<Data> = "data", 0o755;
        /// What other programs look for there.
        pub etc: Etc = "etc", 0o755;
        /// What lasts until the next boot: sockets, generated configuration.
        pub ephemeral: MountPoint<Ephemeral> = "ephemeral", 0o755;
        /// Scratch files of whoever asks the system for some.
        pub tmp: MountPoint<Tmp> = "tmp", 0o1777;
        /// What other programs keep there until the next boot.
        pub run: MountPoint<Run> = "run", 0o755;
    }
}
