//! See `nodekeel_supervisor::testing::fuzz_procfs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_supervisor::testing::fuzz_procfs(input));
