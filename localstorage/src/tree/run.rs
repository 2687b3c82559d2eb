//! Files of other programs until the next boot.

use super::LayoutDir;

crate::layout! {
    /// `/run`.
    pub struct RunDir {
        /// Sockets of containerd and its shims, which define their paths.
        pub containerd: LayoutDir = "containerd", 0o700;
    }

    /// `/tmp`, without predefined entries.
    pub struct TmpDir {}
}
