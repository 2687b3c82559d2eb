//! See `nodekeel_fsquota::testing::fuzz_quantity`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_fsquota::testing::fuzz_quantity(input));
