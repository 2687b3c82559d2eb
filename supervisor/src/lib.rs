//! A supervision tree.
#![warn(clippy::pedantic)]
#![allow(clippy::module_name_repetitions, reason = "NodeStatus and EventHook are the field's words")]

mod context;
mod driver;
mod event;
mod machine;
mod name;
mod output;
mod policy;
/// Stand-in.
pub mod process {
    /// Stand-in.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct ProcessExit;
    /// Stand-in.
    #[derive(Debug, thiserror::Error)]
    #[error("x")]
    pub struct ProcessError;
    impl ProcessError {
        pub(crate) fn exit(&self) -> Option<&ProcessExit> {
            None
        }
    }
    #[derive(Debug)]
    pub(crate) struct Host;
    impl Host {
        pub(crate) fn new() -> std::io::Result<Self> {
            Ok(Self)
        }
    }
}
mod runnable;
#[cfg(feature = "tonic")]
mod serve;
mod state;
mod task;
#[cfg(feature = "testing")]
pub mod testing;
mod tree;

pub use context::{Context, Stale, WaitError};
pub use event::{Cause, Change, Event, EventHook};
pub use machine::{ControlError, SignalError, SpawnError};
pub use name::{MAX_DN_BYTES, MAX_NAME_BYTES, NameError};
pub use output::{Origin, OutputSink, Stream};
pub use policy::{Backoff, Policy, Restart};
pub use runnable::{Cancelled, Child, Failure, RunFuture, Runnable};
#[cfg(feature = "tonic")]
pub use serve::{Serve, ServeError, serve};
pub use state::{Exit, ExitRecord, MAX_EXITS, NodeStatus, State, WaitingFor};
pub use tree::{Builder, ShutdownReport, Straggler, Supervisor};
