//! A node's directories as types: fd-relative access, atomic durable files, a step journal, the data partition.

mod calls;
mod dir;
mod error;
mod faults;
mod metadata;
mod name;
mod placement;

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
