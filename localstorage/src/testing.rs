//! For tests: failpoints before every system call, and the checks that every implementation of a trait must
//! pass.

mod file_store;

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::BorrowedFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::FileCloner;
use crate::step_journal::{JournalRecord, parse_step_progress};

pub use crate::dir::fuzz_tree_stream;
pub use crate::failpoints::{SyscallAction, with_failpoint_hook};
pub use crate::mount::recorder::{MountCall, RecordingMounter};
pub use crate::mount::table::fuzz_mountinfo;
#[cfg(feature = "pki")]
pub use crate::pki::fuzz_credentials_file;
#[cfg(feature = "tang")]
pub use crate::tang::server::{TangKeys, fuzz_tang_answer};
pub use crate::tree::commit::fuzz_commit_record;
pub use crate::volume::data_volume::volume_conformance;
#[cfg(feature = "luks")]
pub use crate::volume::luks::{
    fake::FileCryptsetup,
    policy::fuzz_luks_header,
    seal::key_seal_conformance,
    tpm::{fuzz_pcr_signatures, fuzz_tpm_key_file, fuzz_tpm_response},
};
pub use crate::volume::partition::{fuzz_partition_table, fuzz_sysfs_attributes};
pub use crate::volume::probe::fuzz_disk_image;
pub use file_store::file_store_conformance;

/// Copies the data of a file, on any file system; holes stay holes. For tests: it takes the time and the space that
/// [`Reflink`](crate::Reflink) saves, and what it has written is not durable.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::exhaustive_structs, reason = "it has no state")]
pub struct DataCloner;

impl FileCloner for DataCloner {
    fn clone_file(&self, from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
        let [from, mut to] = [File::from(from.try_clone_to_owned()?), File::from(to.try_clone_to_owned()?)];
        let mut hole = 0;
        loop {
            let data = match seek(&from, SeekFrom::Data(hole)) {
                // There are no more.
                Err(Errno::NXIO) => break,
                found => found?,
            };
            hole = seek(&from, SeekFrom::Hole(data))?;
            for file in [&from, &to] {
                seek(file, SeekFrom::Start(data))?;
            }
            io::copy(&mut (&from).take(hole - data), &mut to)?;
        }
        // A hole at the end has no data after it, so no write has reached the size.
        to.set_len(from.metadata()?.len())
    }
}

/// Checks that the parser of journal files never panics, and that a parsed record is written back unchanged.
///
/// # Panics
/// If the check fails.
pub fn fuzz_journal_record(bytes: &[u8]) {
    if let Ok(record) = JournalRecord::from_bytes(bytes) {
        let written = record.to_bytes().expect("a parsed record is not too long");
        assert!(bytes.starts_with(&written), "a record is written back unchanged");
        check_step_progress(record.content);
    }
    check_step_progress(bytes);
}

fn check_step_progress(bytes: &[u8]) {
    if let Some(progress) = parse_step_progress(bytes) {
        assert_eq!(progress.to_bytes(), bytes, "progress is written back unchanged");
    }
}
