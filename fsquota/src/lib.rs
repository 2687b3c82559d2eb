//! Project quotas of XFS and ext4 by system call: limits and usage of a directory tree in bytes and inodes.

mod engine;
mod error;
mod file_system;
mod kernel;
mod limits;
mod linux;
mod mounts;
mod project;
mod quantity;
mod range;
mod setter;
mod sys;
#[cfg(feature = "testing")]
pub mod testing;
mod tree;

pub use error::{Call, Error};
pub use file_system::{FileSystem, Kind, OpenError, Warning};
pub use limits::{Change, Limit, LimitError, Limits, ProjectId, Status, Usage};
pub use project::ProjectQuota;
pub use quantity::{Bytes, Inodes, QuantityError};
pub use range::ProjectRange;
pub use setter::QuotaSetter;
pub use tree::Changed;
