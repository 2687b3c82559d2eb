//! For tests: failpoints before every system call, and the checks that every implementation of a trait must
//! pass.

mod data_cloner;
mod file_store;
mod parsers;

pub use crate::failpoints::{SyscallAction, with_failpoint_hook};
pub use crate::mount::recorder::{MountCall, RecordingMounter};
pub use crate::mount::table::fuzz_mountinfo;
#[cfg(feature = "pki")]
pub use crate::pki::fuzz_credentials_file;
pub use crate::tree::commit::fuzz_commit_record;
pub use crate::volume::data_volume::volume_conformance;
#[cfg(feature = "luks")]
pub use crate::volume::luks::{
    fake::FileCryptsetup,
    fuzz::fuzz_luks_header,
    seal::key_seal_conformance,
    tpm::{fuzz_tpm_key_file, fuzz_tpm_response},
};
pub use crate::volume::partition::{fuzz_partition_table, fuzz_sysfs_attributes};
pub use crate::volume::probe::fuzz_disk_image;
pub use data_cloner::DataCloner;
pub use file_store::file_store_conformance;
pub use parsers::fuzz_journal_record;
