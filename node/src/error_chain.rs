//! Errors with their causes, for messages.

use std::error::Error;

/// An error with its causes, joined by colons. A cause that the text before it contains is left out: the messages of some
/// libraries contain their cause already.
pub fn format_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

/// An error with its causes, in one line.
#[cfg(feature = "node")]
pub(crate) fn error_chain(error: &dyn Error) -> String {
    format_chain(error).replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum TestError {
        #[error("can't open /a")]
        Plain(#[source] io::Error),
        #[error("can't open /a ({0}), nor /b")]
        Repeating(#[source] io::Error),
    }

    #[test]
    fn a_cause_that_the_message_contains_is_not_repeated() {
        let cause = || io::Error::other("not mounted");
        assert_eq!(format_chain(&TestError::Plain(cause())), "can't open /a: not mounted");
        assert_eq!(format_chain(&TestError::Repeating(cause())), "can't open /a (not mounted), nor /b");
        let twice = anyhow::Error::new(TestError::Repeating(cause())).context("can't start");
        assert_eq!(format_chain(&*twice), "can't start: can't open /a (not mounted), nor /b");
    }
}
