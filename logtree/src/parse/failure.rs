//! What programs print when they fail, whatever the format of their log.

use crate::{Level, LogMessage};

/// The beginnings of the first line of a crash: in Go a panic, an error of the runtime, or a signal that ends it with a
/// dump of its goroutines, as the SIGABRT of a watchdog; in Java one of the virtual machine.
///
/// *Source:* Go's runtime/panic.go; runtime/sigtab_linux_generic.go, the signals with `_SigThrow` or `_SigPanic`;
/// OpenJDK's vmError.cpp.
const CRASHES: [&str; 12] = [
    "panic: ",
    "fatal error: ",
    "SIGQUIT: quit",
    "SIGILL: illegal instruction",
    "SIGTRAP: trace trap",
    "SIGABRT: abort",
    "SIGBUS: bus error",
    "SIGFPE: floating-point exception",
    "SIGSEGV: segmentation violation",
    "SIGSTKFLT: stack fault",
    "SIGSYS: bad system call",
    "# A fatal error has been detected by the Java Runtime Environment",
];

/// The beginnings of other failures: an exception that nothing has caught, in Python and Java; a program that could not
/// start: containerd, one with Go's `flag` (etcd), one with cobra.
const FAILURES: [&str; 6] = [
    "Traceback (most recent call last):",
    "Exception in thread \"",
    "containerd: ",
    "flag provided but not defined: ",
    "Error: ",
    "Error occurred during initialization of VM",
];

/// The message of the first line of a failure: a crash is [`Level::Fatal`], all others [`Level::Error`]. A writer looks for
/// it in each shipped format but text; a [`LineParser`](super::LineParser) of yours calls it, if its program may write one.
pub fn failure_line(line: &str) -> Option<LogMessage> {
    let starts = |starts: &[&str]| starts.iter().any(|start| line.starts_with(start));
    // Of Rust, whose thread has a name: `thread 'main' panicked at src/main.rs:1:5:`.
    let is_panic = || line.starts_with("thread '") && line.contains(" panicked at ");
    let level = if starts(&CRASHES) || is_panic() {
        Level::Fatal
    } else if starts(&FAILURES) {
        Level::Error
    } else {
        return None;
    };
    Some(LogMessage::without_position(level, line))
}

/// Returns whether a line is the name of an exception with its text, as `a.b.IOException: text`, or starts its cause.
pub(crate) fn names_exception(line: &str) -> bool {
    let line = line.strip_prefix("Caused by: ").unwrap_or(line);
    let name = line.split_once(':').map_or(line, |(name, _)| name);
    ["Error", "Exception"].iter().any(|kind| name.strip_suffix(kind).is_some_and(|rest| !rest.is_empty()))
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._$".contains(&byte))
}
