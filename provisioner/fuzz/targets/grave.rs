//! See `nodekeel_provisioner::testing::check_grave`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_provisioner::testing::check_grave(input));
