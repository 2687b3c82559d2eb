//! The crate as its users see it.

mod contained;
mod control;
mod end;
mod groups;
mod grpc;
mod harness;
mod idle;
mod logging;
mod misuse;
mod not_ready;
mod order;
mod process;
mod restart;
