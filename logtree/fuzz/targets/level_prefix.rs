//! See `nodekeel_logtree::testing::fuzz_level_prefix`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_logtree::testing::fuzz_level_prefix(input));
