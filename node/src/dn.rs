//! The DNs of the runnables that others wait for, act on, or exclude.

/// The control API, which stops last.
pub(crate) const CONTROL: &str = "root.control";

/// Opens the data volume: what is on the volume waits for it.
pub(crate) const STORAGE: &str = "root.storage";

/// The membership of the node in its cluster.
pub(crate) const CLUSTER: &str = "root.cluster";

/// The name of the part whose children are the services of the configuration.
pub(crate) const SERVICES: &str = "service";

/// The DN of the kernel's log.
pub const KERNEL: &str = "root.kernel";

/// Returns whether the name of a part, a service or an additional runnable is valid: 1 to 64 of `a-z`, `0-9`, `_` and `-`. It
/// becomes a part of a DN.
pub(crate) fn is_valid_runnable_name(name: &str) -> bool {
    let valid = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
    (1..=64).contains(&name.len()) && name.bytes().all(valid)
}
