//! See `nodekeel_localstorage::testing::fuzz_tpm_key_file` and `fuzz_tpm_response`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    nodekeel_localstorage::testing::fuzz_tpm_key_file(input);
    nodekeel_localstorage::testing::fuzz_tpm_response(input);
});
