//! The crate as its users see it.

mod control;
mod groups;
mod logging;
mod misuse;
mod process;
mod quiet;
mod restart;
mod serve;
mod tree;
