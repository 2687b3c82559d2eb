//! Sources that are not written to a [`LineWriter`](crate::LineWriter) directly: files of others and the kernel log.
//! Both wait in the runtime's reactor and never poll; open them inside a tokio runtime with IO enabled.

mod file;
mod kmsg;

pub use file::{FileError, FileSource};
pub use kmsg::{KmsgPosition, KmsgSource};
