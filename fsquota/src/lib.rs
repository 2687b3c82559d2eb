//! Project quotas of XFS and ext4 by system call: limits and usage of a directory tree in bytes and inodes.

mod engine;
mod error;
mod kernel;
mod limits;
mod quantity;
mod range;
mod setter;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Call, Error};
pub use limits::{Change, Limit, LimitError, Limits, ProjectId, Status, Usage};
pub use quantity::{Bytes, Inodes, QuantityError};
pub use range::ProjectRange;
pub use setter::QuotaSetter;
