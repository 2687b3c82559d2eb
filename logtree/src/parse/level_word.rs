//! The words and numbers that programs use for levels.

use crate::Level;

/// The level of a word, in any case; `None` if it is none.
///
/// *Source:* the level names of zap, zerolog, logrus (also their short ones), slog (with its offsets, as `WARN+1`), hclog,
/// pino, winston, .NET, Python's logging, loguru, java.util.logging and slf4j's bridge for it, and syslog(3).
pub(super) fn level_of_word(word: &str) -> Option<Level> {
    let lower = word.to_ascii_lowercase();
    let (name, offset) = lower.split_at(lower.find(['+', '-']).unwrap_or(lower.len()));
    if !offset.is_empty() && offset[1..].parse::<u8>().is_err() {
        return None;
    }
    Some(match name {
        // A program of slog that has a level below debugging names it by its offset.
        "debug" if offset.starts_with('-') => Level::Trace,
        "trace" | "trce" | "trac" | "trc" | "finest" | "silly" | "verbose" => Level::Trace,
        "debug" | "dbug" | "debu" | "dbg" | "finer" | "fine" => Level::Debug,
        "info" | "inf" | "information" | "informational" | "notice" | "config" | "success" => Level::Info,
        "warn" | "wrn" | "warning" => Level::Warn,
        // At `dpanic`, zap panics only in development.
        "error" | "erro" | "err" | "fail" | "severe" | "dpanic" => Level::Error,
        "fatal" | "fata" | "ftl" | "panic" | "pani" | "pnc" | "critical" | "crit" | "alert" | "emerg"
        | "emergency" => Level::Fatal,
        // Python's name of a level that has none.
        other => return other.strip_prefix("level ")?.parse().ok().map(level_of_python_number),
    })
}

/// The level of a number: a severity of syslog, or a level of bunyan and pino, slog, or java.util.logging; `None` if it is
/// none.
///
/// *Source:* syslog(3); pino's docs/api.md; Go's log/slog; java.util.logging.Level.
pub(super) fn level_of_number(number: f64) -> Option<Level> {
    Some(match number {
        -8.0..0.0 => Level::Debug,
        // slog's ERROR: no severity of syslog.
        8.0..10.0 => Level::Error,
        10.0..20.0 => Level::Trace,
        20.0..30.0 => Level::Debug,
        30.0..40.0 => Level::Info,
        40.0..50.0 => Level::Warn,
        50.0..60.0 => Level::Error,
        60.0..70.0 => Level::Fatal,
        300.0..=500.0 => Level::Debug,
        700.0..=800.0 => Level::Info,
        900.0 => Level::Warn,
        1000.0 => Level::Error,
        severity if severity.fract() == 0.0 => return level_of_severity(severity as u64),
        _ => return None,
    })
}

/// The level of a number of Python's logging.
pub(super) fn level_of_python_number(number: u32) -> Level {
    match number {
        0..10 => Level::Trace,
        10..20 => Level::Debug,
        20..30 => Level::Info,
        30..40 => Level::Warn,
        40..50 => Level::Error,
        _ => Level::Fatal,
    }
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
