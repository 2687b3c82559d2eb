//! The crate as its users see it.

mod contained;
mod control;
mod groups;
mod grpc;
mod idle;
mod logging;
mod misuse;
mod not_ready;
mod process;
mod restart;
mod tree;
