//! See `nodekeel_localstorage::testing::commit_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::commit_record(input));
