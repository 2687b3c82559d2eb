//! See `nodekeel_provisioner::testing::fuzz_trash_entry`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_provisioner::testing::fuzz_trash_entry(input));
