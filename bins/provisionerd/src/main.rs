//! Per-node volumes with limits, for a cluster that is already there.

fn main() {}
