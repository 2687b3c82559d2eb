//! See `nodekeel_node::testing::fuzz_membership`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_node::testing::fuzz_membership(input));
