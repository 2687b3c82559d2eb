//! The words and numbers that programs use for levels.

use crate::Level;

/// The level of a word, in any case; `None` if it is none.
///
/// *Source:* the level names of zap, zerolog, logrus, slog (with its offsets, as `WARN+1`), hclog, pino, winston, .NET,
/// Python's logging, java.util.logging and slf4j's bridge for it, and syslog(3).
pub(super) fn level_of_word(word: &str) -> Option<Level> {
    let lower = word.to_ascii_lowercase();
    let (name, offset) = lower.split_at(lower.find(['+', '-']).unwrap_or(lower.len()));
    if !offset.is_empty() && offset[1..].parse::<u8>().is_err() {
        return None;
    }
    Some(match name {
        // A program of slog that has a level below debugging names it by its offset.
        "debug" if offset.starts_with('-') => Level::Trace,
        "trace" | "trce" | "finest" | "silly" | "verbose" => Level::Trace,
        "debug" | "dbug" | "finer" | "fine" => Level::Debug,
        "info" | "information" | "informational" | "notice" | "config" => Level::Info,
        "warn" | "warning" => Level::Warn,
        // At `dpanic`, zap panics only in development.
        "error" | "err" | "fail" | "severe" | "dpanic" => Level::Error,
        "fatal" | "panic" | "critical" | "crit" | "alert" | "emerg" | "emergency" => Level::Fatal,
        _ => return None,
    })
}

/// The level of a number: a severity of syslog, or a level of bunyan and pino; `None` if it is none.
///
/// *Source:* syslog(3); pino's docs/api.md.
pub(super) fn level_of_number(number: u64) -> Option<Level> {
    Some(match number {
        10..20 => Level::Trace,
        20..30 => Level::Debug,
        30..40 => Level::Info,
        40..50 => Level::Warn,
        50..60 => Level::Error,
        60..70 => Level::Fatal,
        number => return level_of_severity(number),
    })
}

/// The level of a severity of syslog and of the kernel.
pub(super) fn level_of_severity(severity: u64) -> Option<Level> {
    Some(match severity {
        0 | 1 => Level::Fatal,
        2 | 3 => Level::Error,
        4 => Level::Warn,
        5 | 6 => Level::Info,
        7 => Level::Debug,
        _ => return None,
    })
}
