//! See `nodekeel_localstorage::testing::fuzz_journal_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::fuzz_journal_record(input));
