//! A node's directories as types: fd-relative access, atomic durable files, a step journal, the data
//! partition.
//!
//! This crate does not know what the files contain or which program needs them. It keeps no cache, follows no
//! link below an open directory, and formats only disks of which every byte was read and is zero, or that their owner
//! gave up. Its calls block: async code makes them on a blocking thread.
//!
//! ```text
//!  tree ──────── a layout declared once as structs, created as typed handles
//!   │
//!  FileStore ─── read, write, create_dir, list, remove: in a directory, in memory, or your implementation
//!   │
//!  Dir ───────── an open directory: everything below is reached through its descriptor, every change is durable
//!   │
//!  TreeWalk ──── everything in a directory, at any depth, while other processes change it
//!
//!  step_journal ─ a small state in two files that are written in turn; step lists that resume after a crash
//!  volume ────── the data partition: found, probed, created without data loss, encrypted, mounted, grown
//!  mount ─────── mounts as plain data, and the trait that mounts: the kernel, or your implementation
//!  tang ──────── secrets that a server in the network gives back (feature `tang`)
//!  pki ───────── a key, its certificate and the CA certificate, replaced together (feature `pki`)
//! ```
//!
//! ```
//! use nodekeel_localstorage::step_journal::{StepJournal, StepList};
//! use nodekeel_localstorage::{Dir, FileMode};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let temp = Dir::open(std::env::temp_dir())?;
//!     let name = format!("localstorage-example-{}", std::process::id());
//!     let data = temp.ensure_dir(&name, FileMode::PRIVATE_DIR)?;
//!     let node = data.ensure_dir("node/credentials", FileMode::PRIVATE_DIR)?;
//!     // A reader sees the old content or the new one, also after a power cut.
//!     node.write("key.pem", b"secret", FileMode::PRIVATE_FILE)?;
//!     assert_eq!(data.read("node/credentials/key.pem")?, b"secret");
//!     // No path leads outside, neither by its names nor by links on the way.
//!     assert!(data.read("../../etc/shadow").unwrap_err().is_invalid_path());
//!
//!     // After a crash the same lines resume at the first step that was not recorded.
//!     let steps = StepList::try_new(["format", "mount"])?;
//!     let mut run = steps.start_run(StepJournal::open(&data, "setup")?, b"")?;
//!     while let Some(step) = run.current_step() {
//!         println!("step {step}");
//!         let state = [run.recorded_state(), step.as_bytes()].concat();
//!         run.complete_step(state)?;
//!     }
//!     assert_eq!(run.recorded_state(), b"formatmount");
//!     drop(run);
//!     assert!(temp.remove_tree(&name)?);
//!     Ok(())
//! }
//! ```
//!
//! # Guarantees
//! - A path below a [`Dir`] consists of plain names, checked before the kernel sees it, and is resolved
//!   beneath the descriptor through no symbolic or magic link.
//! - A call that changes something returns after the sync that makes the change durable. A call that fails or
//!   is killed leaves the old state or the new one, and can be repeated; the tests kill it, and make it fail,
//!   at every system call.
//! - A walk, and so a removal or a clone, takes bounded memory for each level and a few descriptors, and enters no
//!   mount point. A removal resumes after a kill.
//! - Modes are exact: the umask does not apply.
//! - Errors name the operation and the path, and classify the cause: [`Error::is_full`],
//!   [`Error::is_symlink`].
//!
//! # Bring your own
//! - [`FileStore`]: where a layout is created. [`mem::MemFileStore`] and [`OsFileStore`] pass
//!   `testing::file_store_conformance`, as yours should.
//! - [`volume::DataVolume`]: what holds the data; `testing::volume_conformance` checks it.
//! - `volume::KeySeal` (feature `luks`): what keeps a node's half of the keys, a file or a TPM 2.0;
//!   `testing::key_seal_conformance` checks it.
//! - [`mount::Mounter`]: what mounts it.
//! - [`FileCloner`]: how [`Dir::clone_tree`] copies a file; [`Reflink`] shares its blocks.
//!
//! # Features
//! - `luks`: encrypted volumes, by the cryptsetup program.
//! - `pki`: keys, certificates and revocation lists in dedicated directories.
//! - `tang`: secrets that are bound to a Tang server, in the format of clevis.
//! - `testing`: failpoints before every system call, conformance suites, checks over arbitrary input.
//!
//! # Origin
//! The declared tree and its layout are those of Monogon's `metropolis/node/core/localstorage`. Unlike there,
//! a write leaves no stale bytes of an earlier one, names are synced, and the umask does not change modes.
//! openat2(2), rename(2), fsync(2).

mod dir;
mod error;
mod failpoints;
mod file_name;
mod file_store;
mod metadata;
mod socket;
mod sys;
mod syscalls;

pub mod mem;
pub mod mount;
#[cfg(feature = "pki")]
pub mod pki;
pub mod step_journal;
#[cfg(feature = "tang")]
pub mod tang;
pub mod tree;
pub mod volume;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use dir::{
    CloneSummary, Dir, DirLock, FileCloner, FileReplacement, OpenOutcome, READ_LIMIT, Reflink,
    RemovalProgress, RenameMode, TreeWalk, TrustError, WalkEvent, check_file_owner,
};
pub use error::{Error, FileOperation};
pub use file_name::{FileName, InvalidName};
pub use file_store::{FileStore, OsFileStore};
pub use metadata::{DirEntry, FileKind, FileMode, FileOwner, Metadata};
pub use socket::SocketState;
