//! Checks over arbitrary input, for property tests and the fuzzer.

use crate::journal::Record;
use crate::journal::parse_steps;

/// What a journal's file may hold: never panics, and what is read is written as it was.
///
/// # Panics
/// Where that isn't so.
pub fn journal_record(bytes: &[u8]) {
    if let Ok(record) = Record::parse(bytes) {
        let written = record.to_bytes().expect("what was read is not too long");
        assert!(bytes.starts_with(&written), "a record is written as it was read");
        steps_record(record.content);
    }
    steps_record(bytes);
}

fn steps_record(bytes: &[u8]) {
    if let Some(progress) = parse_steps(bytes) {
        assert_eq!(progress.to_bytes(), bytes, "a progress is written as it was read");
    }
}
