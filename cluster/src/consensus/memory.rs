//! Consensus in the memory of one process: for a node without etcd, and for tests.
//!
//! It implements everything except disk and network: transactions, watches, the rules for members. Its data exists
//! as long as its handles.
//!
//! ```
//! use nodekeel_cluster::consensus::kv::{KeyRange, KvStore as _};
//! use nodekeel_cluster::consensus::memory::MemoryKv;
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let kv = MemoryKv::new();
//!     kv.put(b"/nodes/n1", b"record").await?;
//!     assert_eq!(kv.get(b"/nodes/n1").await?.map(|kv| kv.version), Some(1));
//!     assert_eq!(kv.delete(KeyRange::prefix("/nodes/")).await?, 1);
//!     Ok(())
//! }
//! ```

mod cluster;
mod kv;
mod member;

pub use cluster::MemoryNetwork;
pub use kv::MemoryKv;
pub use member::MemoryConsensus;
