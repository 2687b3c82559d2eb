//! See `nodekeel_provisioner::csi::testing::fuzz_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_provisioner::csi::testing::fuzz_request(input));
