//! See `nodekeel_provisioner::testing::fuzz_move_record`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_provisioner::testing::fuzz_move_record(input));
