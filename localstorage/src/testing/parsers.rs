//! Checks over arbitrary input, for property tests and the fuzzer.

use crate::step_journal::JournalRecord;
use crate::step_journal::parse_step_progress;

/// Checks that the parser of journal files never panics, and that a parsed record is written back unchanged.
///
/// # Panics
/// If the check fails.
pub fn fuzz_journal_record(bytes: &[u8]) {
    if let Ok(record) = JournalRecord::from_bytes(bytes) {
        let written = record.to_bytes().expect("a parsed record is not too long");
        assert!(bytes.starts_with(&written), "a record is written back unchanged");
        check_step_progress(record.content);
    }
    check_step_progress(bytes);
}

fn check_step_progress(bytes: &[u8]) {
    if let Some(progress) = parse_step_progress(bytes) {
        assert_eq!(progress.to_bytes(), bytes, "progress is written back unchanged");
    }
}
