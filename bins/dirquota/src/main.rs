//! Sets and shows the limits of one directory tree.

fn main() {}
