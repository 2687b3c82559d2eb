//! See `nodekeel_localstorage::testing::fuzz_tpm_key_file`, `fuzz_tpm_response` and `fuzz_pcr_signatures`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    nodekeel_localstorage::testing::fuzz_tpm_key_file(input);
    nodekeel_localstorage::testing::fuzz_tpm_response(input);
    nodekeel_localstorage::testing::fuzz_pcr_signatures(input);
});
