//! See `nodekeel_fsquota::testing::fuzz_owner_mark`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_fsquota::testing::fuzz_owner_mark(input));
