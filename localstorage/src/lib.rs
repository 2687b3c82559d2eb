//! A node's directories as types: fd-relative access, atomic durable files, a step journal, the data partition.
//!
//! It knows neither what is in the files nor who needs them; it keeps no cache, follows no link below a directory that is
//! held open, and formats nothing that it doesn't know to be empty. Its calls block: async code makes them on a thread
//! that may.
//!
//! ```text
//!  tree ──────── a layout declared once as structs, placed as typed handles
//!   │
//!  Placement ─── read, write, create_dir, list, remove: in a directory, in memory, or the reader's own
//!   │
//!  Dir ───────── a directory held open: all below is reached through its descriptor, what is changed is durable
//!
//!  journal ───── a small state in two files that are written in turn; lists of steps that go on where they were killed
//!  volume ────── the data partition: found, made where nothing is lost, mounted
//!  mount ─────── what is mounted where, as data, and by whom: the kernel, or the reader's own
//!  pki ───────── a key, its certificate and the authority's, right together or not at all (feature `pki`)
//! ```
//!
//! ```
//! use nodekeel_localstorage::{Dir, Mode};
//!
//! # let temporary = tempfile::tempdir()?;
//! let data = Dir::open(temporary.path())?;
//! let node = data.ensure_dir("node/credentials", Mode::PRIVATE_DIR)?;
//! // Whoever reads sees the old content or the new one, also after a power cut.
//! node.write("key.pem", b"secret", Mode::PRIVATE_FILE)?;
//! assert_eq!(data.read("node/credentials/key.pem")?, b"secret");
//! // No path leads out, whatever it says and whatever lies on the way.
//! assert!(data.read("../../etc/shadow").unwrap_err().is_invalid_path());
//! assert!(data.remove_tree("node")?);
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! # How it behaves
//! - A path below a [`Dir`] is made of plain names, checked before the kernel sees it, and resolved beneath the
//!   descriptor through no symbolic or magic link.
//! - A call that changes something returns after the sync that makes it last. One that fails, or is killed, leaves the
//!   old state or the new one, and can be made again; the tests kill it, and let it fail, at every system call.
//! - A removal takes bounded memory and descriptors for each level, stops at mount points, and goes on where it was
//!   killed.
//! - Modes are exact: the umask has no say.
//! - Errors name the operation and the path, and answer questions: [`Error::is_full`], [`Error::is_symlink`].
//!
//! # Bring your own
//! - [`Placement`]: where a tree is placed. [`mem::MemPlacement`] and [`OsPlacement`] pass the same
//!   `testing::conformance` as yours should.
//! - [`volume::DataVolume`]: what holds the data; `testing::volume_conformance` checks it.
//! - [`mount::Mounter`]: who mounts it.
//!
//! # Features
//! - `pki`: keys, certificates and lists of revoked ones in directories of their own.
//! - `testing`: failpoints before every system call, conformance suites, checks over arbitrary input.
//!
//! # Where it comes from
//! The idea of a declared tree and its layout are those of Monogon's `metropolis/node/core/localstorage`; without stale
//! bytes of an earlier write, names that are lost for want of a sync, and modes that the umask has changed. openat2(2),
//! rename(2), fsync(2).

mod calls;
mod dir;
mod error;
mod faults;
mod metadata;
mod name;
mod placement;
mod socket;

pub mod journal;
pub mod mem;
pub mod mount;
#[cfg(feature = "pki")]
pub mod pki;
pub mod tree;
pub mod volume;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use dir::{Dir, READ_LIMIT, Removed, Rename};
pub use error::{Error, Operation};
pub use metadata::{Entry, FileKind, Metadata, Mode};
pub use name::{InvalidName, Name};
pub use placement::{OsPlacement, Placement};
pub use socket::SocketState;
