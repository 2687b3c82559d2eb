//! Formats an error and its causes on one line.

/// Joins an error and its causes by colons; omits a cause that the text before it ends with.
pub(crate) fn format_chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |error| error.source()) {
        let cause = cause.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
