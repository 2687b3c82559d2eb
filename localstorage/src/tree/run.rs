//! What other programs keep until the next boot.

use super::Directory;

crate::layout! {
    /// `/run`.
    pub struct Run {
        /// Where containerd and its shims keep sockets, by paths of their own.
        pub containerd: Directory = "containerd", 0o700;
    }

    /// `/tmp`: nothing in it has a name that is known before.
    pub struct Tmp {}
}
