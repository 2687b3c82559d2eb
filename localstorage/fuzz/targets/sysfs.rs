//! See `nodekeel_localstorage::testing::fuzz_sysfs_attributes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::fuzz_sysfs_attributes(input));
