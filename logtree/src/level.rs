//! How much an entry matters.

use std::fmt;
use std::str::FromStr;

/// How much a leveled entry matters, least first. `Fatal` only records: nothing aborts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(clippy::exhaustive_enums, reason = "complete by nature")]
pub enum Level {
    /// Steps of an algorithm.
    Trace,
    /// What a developer asks for.
    Debug,
    /// Ordinary progress.
    Info,
    /// Something an operator may want to look at.
    Warn,
    /// Something failed.
    Error,
    /// The writer could not go on.
    Fatal,
}

/// The text names no level; use one of `trace debug info warn error fatal`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no level is called {0:?}: use trace, debug, info, warn, error or fatal")]
pub struct UnknownLevel(pub String);

impl Level {
    /// All levels, least first.
    pub const ALL: [Level; 6] =
        [Level::Trace, Level::Debug, Level::Info, Level::Warn, Level::Error, Level::Fatal];

    /// The letter that stands for the level in rendered lines.
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

    /// The name in lower case, as `Display` and JSON give it.
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
    type Err = UnknownLevel;

    /// Takes names and letters in any case, and `warning`.
    fn from_str(text: &str) -> Result<Level, UnknownLevel> {
        let lower = text.to_ascii_lowercase();
        Level::ALL
            .into_iter()
            .find(|level| lower == level.as_str() || lower.chars().eq([level.letter().to_ascii_lowercase()]))
            .or_else(|| (lower == "warning").then_some(Level::Warn))
            .ok_or_else(|| UnknownLevel(text.to_owned()))
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
    fn levels_order_as_their_letters_say() {
        assert_eq!(Level::ALL.map(Level::letter).iter().collect::<String>(), "TDIWEF");
        assert!(Level::ALL.is_sorted());
    }

    #[test]
    fn names_and_letters_parse_in_any_case() {
        for level in Level::ALL {
            assert_eq!(level.to_string().to_uppercase().parse(), Ok(level));
            assert_eq!(level.letter().to_string().parse(), Ok(level));
        }
        assert_eq!("warning".parse(), Ok(Level::Warn));
        assert_eq!("loud".parse::<Level>(), Err(UnknownLevel("loud".to_owned())));
    }
}
