//! What the workspace's tests, benches and tasks run on: bench rows and their tables.
//!
//! It does not test anything itself, knows no member of the workspace, and needs neither tokio nor protoc.

pub mod bench;
mod table;

pub use table::Table;
