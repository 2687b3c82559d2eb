//! See `nodekeel_containerd_svc::testing::fuzz_documents`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_containerd_svc::testing::fuzz_documents(input));
