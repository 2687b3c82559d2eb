//! The provisioner as its users see it.

mod csi;
mod kills;
mod kube;
mod manifests;
mod parsers;
mod service;
mod stores;
mod told;

/// How many random cases: a tenth of them where a test run has a minute, and all of them where `NODEKEEL_CASES=all` says so, as
/// `cargo xtask test` does.
fn cases(most: u32) -> u32 {
    if std::env::var("NODEKEEL_CASES").is_ok_and(|cases| cases == "all") { most } else { most / 10 }
}
