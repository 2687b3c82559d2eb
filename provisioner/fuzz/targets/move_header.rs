//! See `nodekeel_provisioner::testing::fuzz_move_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_provisioner::testing::fuzz_move_header(input));
