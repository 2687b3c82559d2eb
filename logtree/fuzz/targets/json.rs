//! See `nodekeel_logtree::testing::fuzz_json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_logtree::testing::fuzz_json(input));
