//! See `nodekeel_localstorage::testing::fuzz_luks_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::fuzz_luks_header(input));
