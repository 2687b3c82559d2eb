//! The reason why a runnable ended without success.

use std::error::Error;
use std::fmt;

use crate::containment::catch_panic;

/// The reason why a runnable failed; holds any error.
///
/// It deliberately does not implement `Error`, so that `?` converts every error into it.
pub struct Failure(Box<dyn Error + Send + Sync>);

impl Failure {
    /// Wraps an error, or a text.
    pub fn new(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(error.into())
    }

    /// The error with its causes, outermost first.
    pub(crate) fn error_chain(&self) -> impl Iterator<Item = &(dyn Error + 'static)> {
        std::iter::successors(Some(&*self.0 as &(dyn Error + 'static)), |error| next_cause(*error))
    }

    /// Returns whether a [`CanceledError`] is anywhere among the causes.
    pub fn is_canceled(&self) -> bool {
        self.error_chain().any(|error| error.is::<CanceledError>())
    }
}

/// The next cause. The `source` of an `io::Error` that wraps another error skips that error, so this uses
/// `get_ref`.
fn next_cause<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(inner) => Some(inner),
        None => catch_panic(|| error.source()).ok().flatten(),
    }
}

/// The text of an error. If its `Display` fails, its `Debug` form with a note.
fn error_text(error: &(dyn Error + 'static)) -> String {
    // This text is computed while an exit is being reported, which a panic must not prevent.
    catch_panic(|| error.to_string()).unwrap_or_else(|panic| {
        let debug = catch_panic(|| format!("{error:?}"));
        let debug = debug.unwrap_or_else(|_| "an error whose Debug panicked as well".to_owned());
        format!("{debug} (its Display panicked: {panic})")
    })
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(error)
    }
}

impl fmt::Display for Failure {
    /// The error with its causes, joined by `: `. A cause that repeats the text before it is left out. An
    /// error whose `Display` panics appears in its `Debug` form, with a note.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = String::new();
        for error in self.error_chain() {
            let text = error_text(error);
            if last.is_empty() {
                f.write_str(&text)?;
            } else if !last.ends_with(&text) {
                write!(f, ": {text}")?;
            }
            last = text;
        }
        Ok(())
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// The runnable ended because its context was canceled. This is not a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("canceled")]
pub struct CanceledError;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    #[derive(Debug, thiserror::Error)]
    #[error("can't read the config")]
    struct ReadConfigError(#[source] io::Error);

    #[test]
    fn a_cancellation_is_found_wherever_it_is_wrapped() {
        assert!(Failure::new(CanceledError).is_canceled());
        assert!(Failure::new(ReadConfigError(io::Error::other(CanceledError))).is_canceled());
        assert!(!Failure::new("canceled").is_canceled());
    }

    #[test]
    fn each_cause_is_printed_once() {
        assert_eq!(
            Failure::new(ReadConfigError(io::Error::other("disk gone"))).to_string(),
            "can't read the config: disk gone"
        );
    }
}
