//! Sources that are not written to a [`LineWriter`](crate::LineWriter) directly: FIFOs and the kernel log.
//! Both wait in the runtime's reactor and never poll; open them inside a tokio runtime with IO enabled.

mod fifo;
mod kmsg;

pub use fifo::{FifoError, FifoSource};
pub use kmsg::{KmsgPosition, KmsgSource};
