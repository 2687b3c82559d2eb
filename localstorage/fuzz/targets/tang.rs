//! See `nodekeel_localstorage::testing::fuzz_tang_answer`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::fuzz_tang_answer(input));
