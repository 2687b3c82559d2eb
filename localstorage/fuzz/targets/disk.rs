//! See `nodekeel_localstorage::testing::fuzz_disk_image`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_localstorage::testing::fuzz_disk_image(input));
