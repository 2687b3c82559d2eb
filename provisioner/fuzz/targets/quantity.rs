//! See `nodekeel_provisioner::testing::fuzz_quantity`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_provisioner::testing::fuzz_quantity(input));
