//! See `nodekeel_localstorage::testing::fuzz_credentials_file`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::fuzz_credentials_file(input));
