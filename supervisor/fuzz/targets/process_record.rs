//! See `nodekeel_supervisor::testing::fuzz_process_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_supervisor::testing::fuzz_process_record(input));
