//! See `nodekeel_provisioner::testing::fuzz_kind_mark`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_provisioner::testing::fuzz_kind_mark(input));
