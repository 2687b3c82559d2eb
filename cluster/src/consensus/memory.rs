//! Consensus in the memory of one process: for a node without etcd, and for tests.
//!
//! It is the whole of it but for the disk and the wire: revisions with history and compaction, watches from any revision
//! that is kept, leases, the rules for members. It lasts as long as what is made of it.
//!
//! ```
//! use nodekeel_cluster::consensus::memory::MemoryKv;
//! use nodekeel_cluster::consensus::kv::{KeyRange, KvStore as _};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let kv = MemoryKv::new();
//! kv.put(b"/nodes/n1", b"record").await?;
//! assert_eq!(kv.get(b"/nodes/n1").await?.map(|kv| kv.version), Some(1));
//! assert_eq!(kv.delete(KeyRange::prefix("/nodes/")).await?, 1);
//! # Ok(())
//! # }
//! ```

mod cluster;
mod history;
mod member;
mod store;

pub use cluster::MemoryNet;
pub use member::MemoryConsensus;
pub use store::MemoryKv;
