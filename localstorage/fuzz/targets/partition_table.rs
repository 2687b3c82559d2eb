//! See `nodekeel_localstorage::testing::fuzz_partition_table`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::fuzz_partition_table(input));
