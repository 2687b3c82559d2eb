//! Levels of entries.

use std::fmt;
use std::str::FromStr;

/// The level of an entry, least important first. `Fatal` is only recorded: nothing aborts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Level {
    /// Steps of an algorithm.
    Trace,
    /// Details for developers.
    Debug,
    /// Ordinary progress.
    Info,
    /// A condition that an operator may want to check.
    Warn,
    /// A failure.
    Error,
    /// A failure after which the writer could not continue.
    Fatal,
}

/// The text is not a level; use one of `trace debug info warn error fatal`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown level {0:?}: use trace, debug, info, warn, error or fatal")]
pub struct ParseLevelError(pub String);

impl Level {
    /// All levels, least important first.
    pub const ALL: [Level; 6] =
        [Level::Trace, Level::Debug, Level::Info, Level::Warn, Level::Error, Level::Fatal];

    /// The letter for the level in rendered lines.
    pub const fn letter(self) -> char {
        match self {
            Level::Trace => 'T',
            Level::Debug => 'D',
            Level::Info => 'I',
            Level::Warn => 'W',
            Level::Error => 'E',
            Level::Fatal => 'F',
        }
    }

    /// The name in lower case, as in `Display` and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Level::Trace => "trace",
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warn",
            Level::Error => "error",
            Level::Fatal => "fatal",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Level {
    type Err = ParseLevelError;

    /// Accepts names and letters in any case, and `warning`.
    fn from_str(text: &str) -> Result<Level, ParseLevelError> {
        let lower = text.to_ascii_lowercase();
        Level::ALL
            .into_iter()
            .find(|level| lower == level.as_str() || lower.chars().eq([level.letter().to_ascii_lowercase()]))
            .or_else(|| (lower == "warning").then_some(Level::Warn))
            .ok_or_else(|| ParseLevelError(text.to_owned()))
    }
}

impl From<tracing::Level> for Level {
    fn from(level: tracing::Level) -> Level {
        match level {
            tracing::Level::TRACE => Level::Trace,
            tracing::Level::DEBUG => Level::Debug,
            tracing::Level::INFO => Level::Info,
            tracing::Level::WARN => Level::Warn,
            tracing::Level::ERROR => Level::Error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_ordered_from_trace_to_fatal() {
        assert_eq!(Level::ALL.map(Level::letter).iter().collect::<String>(), "TDIWEF");
        assert!(Level::ALL.is_sorted());
    }

    #[test]
    fn level_names_and_letters_parse_in_any_case() {
        for level in Level::ALL {
            assert_eq!(level.to_string().to_uppercase().parse(), Ok(level));
            assert_eq!(level.letter().to_string().parse(), Ok(level));
        }
        assert_eq!("warning".parse(), Ok(Level::Warn));
        assert_eq!("loud".parse::<Level>(), Err(ParseLevelError("loud".to_owned())));
    }
}
