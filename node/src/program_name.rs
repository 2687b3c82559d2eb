//! The name of this program in texts: an operator types it, and looks for it in the list of processes. And how the names of
//! its metrics start.
//!
//! Both are global, as the program's process is: errors of every layer name the program, and an argument through all of them
//! would carry nothing else.

use std::sync::OnceLock;

/// Set once, by [`Program::main`](crate::program::Program::main).
static NAME: OnceLock<&str> = OnceLock::new();
#[cfg(feature = "node")]
static METRIC_PREFIX: OnceLock<&str> = OnceLock::new();

/// The name of this program; in a program that only embeds the library or the client, that of the shipped one.
pub(crate) fn program_name() -> &'static str {
    NAME.get().copied().unwrap_or("noded")
}

/// Names this program in all texts. The first call counts.
#[cfg(feature = "program")]
pub(crate) fn set_program_name(name: &'static str) {
    let _ = NAME.set(name);
}

/// The start of the names of the node's metrics, without the `_` after it.
#[cfg(feature = "node")]
pub(crate) fn metric_prefix() -> &'static str {
    METRIC_PREFIX.get().copied().unwrap_or("nodekeel")
}

/// Sets what the names of the node's metrics start with. The first call counts.
#[cfg(feature = "program")]
pub(crate) fn set_metric_prefix(prefix: &'static str) {
    let _ = METRIC_PREFIX.set(prefix);
}
