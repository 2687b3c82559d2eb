//! Filters that look into entries.

use std::time::SystemTime;

use regex::Regex;

use crate::{EntryBody, FieldValue, LogEntry, LogField};

/// A regular expression for the text of entries. A search takes time linear in the text.
#[derive(Clone, Debug)]
pub struct TextPattern(Regex);

/// The text is not a regular expression, or its program would be too large: correct it, or write it shorter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("can't search for {pattern:?}: {reason}")]
pub struct PatternError {
    pattern: String,
    reason: String,
}

impl TextPattern {
    /// Parses a regular expression in the syntax of the crate `regex`, such as `(?i)refused|reset`.
    ///
    /// # Errors
    /// See [`PatternError`]; a retry does not help.
    pub fn new(pattern: &str) -> Result<TextPattern, PatternError> {
        let reason = |error: regex::Error| match error {
            // The last line names the mistake; those before show its place.
            regex::Error::Syntax(text) => {
                text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
            }
            other => other.to_string(),
        };
        match Regex::new(pattern) {
            Ok(regex) => Ok(TextPattern(regex)),
            Err(error) => Err(PatternError { pattern: pattern.to_owned(), reason: reason(error) }),
        }
    }

    fn matches(&self, body: &EntryBody) -> bool {
        match body {
            EntryBody::Raw(raw) => self.0.is_match(&raw.text),
            EntryBody::Leveled(leveled) => {
                let field = |field: &LogField| self.0.is_match(&format!("{}={}", field.name, field.value));
                self.0.is_match(&leveled.message) || leveled.fields.iter().any(field)
            }
            EntryBody::Dropped(_) => true,
        }
    }
}

impl PartialEq for TextPattern {
    fn eq(&self, other: &TextPattern) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for TextPattern {}

/// The content that an entry must have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContentFilter {
    pub(crate) since: Option<SystemTime>,
    pub(crate) pattern: Option<TextPattern>,
    /// Names and values of fields.
    pub(crate) fields: Vec<(String, String)>,
}

impl ContentFilter {
    pub(crate) fn is_empty(&self) -> bool {
        self.since.is_none() && self.pattern.is_none() && self.fields.is_empty()
    }

    pub(crate) fn matches(&self, entry: &LogEntry) -> bool {
        let fields = match &entry.body {
            // Their content is gone. A report of missing entries must not be missing itself.
            EntryBody::Dropped(_) => return true,
            EntryBody::Leveled(leveled) => leveled.fields.as_slice(),
            EntryBody::Raw(_) => &[],
        };
        let has_value = |field: &LogField, value: &str| match &field.value {
            FieldValue::Text(text) => text == value,
            other => other.to_string() == value,
        };
        self.since.is_none_or(|since| entry.time >= since)
            && self.fields.iter().all(|(name, value)| {
                fields.iter().any(|field| field.name == *name && has_value(field, value))
            })
            && self.pattern.as_ref().is_none_or(|pattern| pattern.matches(&entry.body))
    }
}
