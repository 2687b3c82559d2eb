//! noded, the node program: see docs/noded.md. The library, nodekeel-node, implements it.

use std::alloc::System;
use std::process::ExitCode;

use zeroizing_alloc::ZeroAlloc;

/// Erases each allocation when it is freed, also those of libraries: they copy keys.
#[global_allocator]
static ALLOCATOR: ZeroAlloc<System> = ZeroAlloc(System);

fn main() -> ExitCode {
    nodekeel_node::program::main()
}
