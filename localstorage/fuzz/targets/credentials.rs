//! See `nodekeel_localstorage::testing::credentials_file`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::credentials_file(input));
