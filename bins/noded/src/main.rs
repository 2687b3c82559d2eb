//! noded, the node program: see docs/noded.md. The library, nodekeel-node, implements it.

use std::alloc::System;
use std::process::ExitCode;

use nodekeel_node::program::ZeroAlloc;

/// Erases each allocation when it is freed, also those of libraries: they copy keys.
#[global_allocator]
static ALLOCATOR: ZeroAlloc<System> = ZeroAlloc(System);

const ABOUT: &str = "Run a node: etcd, containerd, volumes and your services\n\n\
    All of them run under one supervisor, with their logs in one tree.";

fn main() -> ExitCode {
    let noded = nodekeel_node::program("noded", |node| node).version(env!("CARGO_PKG_VERSION")).about(ABOUT);
    noded.data("/var/lib/nodekeel").environment("NODEKEEL").main()
}
