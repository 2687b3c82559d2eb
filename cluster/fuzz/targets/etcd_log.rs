//! See `nodekeel_cluster::testing::fuzz_etcd_log`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nodekeel_cluster::testing::fuzz_etcd_log(input));
