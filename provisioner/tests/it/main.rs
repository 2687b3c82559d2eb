//! The provisioner through its public API.

mod audit_log;
mod copies;
mod copy_close;
mod copy_kills;
mod csi;
mod disk_faults;
mod expansion_limits;
mod fixture;
mod golden;
mod image_kills;
mod images;
mod import;
mod import_ceiling;
mod import_limits;
mod kill_sample;
mod kills;
mod kube;
mod lost_limits;
mod manifests;
mod moves;
mod parsers;
mod power_cut;
mod service;
mod stores;

/// The number of random cases: a tenth by default, all with `NODEKEEL_CASES=all`, as
/// `cargo xtask soak volume-cases` has them.
fn cases(most: u32) -> u32 {
    if std::env::var("NODEKEEL_CASES").is_ok_and(|cases| cases == "all") { most } else { most / 10 }
}
