//! Files that other programs read from `/etc`.

use super::LayoutFile;

crate::layout! {
    /// Files that other programs read from `/etc`.
    pub struct EtcDir {
        /// A link to [`EphemeralDir::machine_id`](super::EphemeralDir), which the image contains: write
        /// there, not here.
        pub machine_id: LayoutFile = "machine-id", 0o444;
    }
}
