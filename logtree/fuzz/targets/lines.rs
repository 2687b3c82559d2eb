//! See `nodekeel_logtree::testing::check_lines`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_logtree::testing::check_lines(input));
