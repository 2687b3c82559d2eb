//! The crate as its users see it.

mod control;
mod groups;
mod grpc;
mod idle;
mod logging;
mod misuse;
mod process;
mod restart;
mod tree;
