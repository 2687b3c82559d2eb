//! Where output comes from that no writer is handed to: FIFOs and the kernel. Both wait in the runtime's reactor and never
//! poll; they must be made inside a tokio runtime with IO enabled.

mod fifo;
mod kmsg;

pub use fifo::{Fifo, FifoError};
pub use kmsg::Kmsg;
