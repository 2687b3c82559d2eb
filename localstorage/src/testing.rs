//! For tests: failpoints before every system call, and the checks that every implementation of a trait passes.

mod parsers;
mod placement;

pub use crate::faults::{Verdict, with_hook};
pub use crate::mount::recorder::{MountCall, RecordingMounter};
pub use crate::mount::table::mountinfo;
#[cfg(feature = "pki")]
pub use crate::pki::credentials_file;
pub use crate::tree::commit::commit_record;
pub use crate::volume::conformance::volume_conformance;
pub use crate::volume::probe::disk_image;
pub use parsers::journal_record;
pub use placement::conformance;
