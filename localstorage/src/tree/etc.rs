//! What other programs look for in `/etc`.

use super::File;

crate::layout! {
    /// What other programs look for in `/etc`.
    pub struct Etc {
        /// A link to [`Ephemeral::machine_id`](super::Ephemeral), which the image has: write there, not here.
        pub machine_id: File = "machine-id", 0o444;
    }
}
