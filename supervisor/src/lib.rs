//! A supervision tree that starts, watches, restarts and stops async runnables and child processes, in order.
//!
//! It is not an actor framework and not a service manager: it has no mailboxes, unit files or registry. It
//! keeps no log: it names its tracing spans, and logs raw output unless an [`OutputSink`] takes it. It does not decide
//! what a program consists of.
//!
//! ```text
//!  root ────────────── a runnable: adds children, signals ready, works until it is canceled, cleans up, returns
//!  ├─ control          a single child
//!  ├─ etcd ┐           a group: one failure ends all its members;
//!  ├─ sync ┘           they start again after all of them have exited
//!  └─ services         stops before etcd
//!     ├─ a             children belong to one run of their parent and stop before it
//!     └─ b
//! ```
//!
//! ```
//! use nodekeel_supervisor::{Context, Failure, Supervisor};
//!
//! async fn greeter(ctx: Context) -> Result<(), Failure> {
//!     ctx.signal_ready()?;
//!     // Work here, until the context is canceled:
//!     ctx.until_canceled().await
//! }
//!
//! async fn root(ctx: Context) -> Result<(), Failure> {
//!     ctx.run_child("greeter", greeter)?;
//!     ctx.signal_ready()?;
//!     ctx.until_canceled().await
//! }
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() {
//!     let supervisor = Supervisor::builder().start(root);
//!     let report = supervisor.shutdown().await;
//!     assert!(report.stragglers.is_empty());
//! }
//! ```
//!
//! A program that works until a signal has one call in its `main`:
//!
//! ```no_run
//! # use nodekeel_supervisor::{Context, Failure, Supervisor};
//! # async fn root(ctx: Context) -> Result<(), Failure> { ctx.until_canceled().await }
//! # async fn run() -> std::io::Result<()> {
//! let report = Supervisor::builder().run_until_signal(root).await?;
//! report.problems().for_each(|problem| eprintln!("{problem}"));
//! # Ok(())
//! # }
//! ```
//!
//! # Behavior
//! - Fate: a failure (an error, a panic, a return without [`signal_done`](Context::signal_done), an invalid signal)
//!   cancels the runnable's whole subtree and those members of its group that its [`GroupPolicy`] names.
//! - Restart: none of these members starts before all of them, with their subtrees, have exited. Then a canceled
//!   runnable restarts at once, and a failed one after its [`Backoff`]; in a rest-for-one group each when those before it
//!   are ready or done. A parent restarts only after its own
//!   failure, or after a child that exceeds its [`RestartLimit`].
//! - Order: a runnable starts when those that it [depends on](ChildSpec::depends_on) are ready, and a
//!   [shutdown](Supervisor::shutdown) stops it before them. Independent runnables stop at the same time.
//! - Failures count until the runnable has been ready for [`ChildPolicy::stable_after`], also across restarts
//!   of its parent.
//! - Every run has a separate [`Context`]. A context that leaks out of an ended run returns errors and never
//!   acts for the next run.
//! - Nothing is polled: an idle tree causes no wakeups. An exit costs the depth of the tree, and a failure also
//!   what ends with it.
//! - Each runnable has a deadline for its stop, and [`Supervisor::shutdown`] reports stragglers.
//! - A child process ([`process`]) ends together with all its descendants, wherever they have reparented
//!   themselves to.
//!
//! # Bring your own
//! - [`Runnable`]: one method; implemented for every
//!   `Fn(Context) -> impl Future<Output = Result<(), E>>`.
//! - [`EventHook`]: gets events in order, from a bounded queue; implemented for every `Fn(&Event)`.
//! - [`OutputSink`]: takes raw output by DN, stream and generation; implemented for every
//!   `Fn(OutputOrigin) -> impl io::Write`.
//! - A log: the span field `dn` names the runnable; nodekeel-logtree's layer collects by it.
//!
//! # Features
//! - `http`: HTTP for probes and scrapers, bounded in what clients can hold.
//! - `testing`: a tree in virtual time, and a runnable that a test controls.
//! - `tonic`: a runnable that serves gRPC and stops gracefully.
//!
//! # Origin
//! The semantics are those of Monogon's `osbase/supervisor` (and so of Erlang/OTP), without its known
//! defects: names that are only partly validated, identities that are looked up by name, a poll each
//! millisecond, a backoff that flapping resets, a SIGKILL of the first process only.

#[cfg(any(feature = "http", feature = "tonic"))]
mod accept;
mod cancellation;
mod containment;
mod context;
mod driver;
mod event;
mod event_buffer;
mod event_log;
mod failure;
mod fsm;
#[cfg(feature = "tonic")]
mod grpc;
#[cfg(feature = "http")]
mod http;
mod name;
mod output;
mod policy;
pub mod process;
mod process_exit;
mod runnable;
mod shutdown_signals;
mod state;
mod sys;
mod task;
#[cfg(feature = "testing")]
pub mod testing;
mod tree;
mod waiters;
mod wall_clock;

pub use context::{Context, StaleContextError, WaitReadyError};
pub use event::{CancelCause, Event, EventHook, RunnableChange};
pub use event_buffer::{FairEventBuffer, NumberedEvent};
pub use failure::{CanceledError, Failure};
pub use fsm::{AddChildError, ControlError, LifecycleSignalError, Removal};
#[cfg(feature = "tonic")]
pub use grpc::{AbortableConnection, GrpcServer, ServeError, serve_grpc};
#[cfg(feature = "http")]
pub use http::{listen_http, serve_http};
pub use name::{DependencyError, MAX_DN_BYTES, MAX_NAME_BYTES, NameError};
pub use output::{OutputOrigin, OutputSink, OutputStream};
pub use policy::{Backoff, ChildPolicy, GroupPolicy, RestartLimit, RestartLimitAction, RestartPolicy};
pub use runnable::{ChildSpec, RunFuture, Runnable};
pub use shutdown_signals::StopSignals;
pub use state::{
    ExitReason, ExitRecord, MAX_ERROR_BYTES, MAX_EXITS, RunnableState, RunnableStatus, WaitReason,
};
pub use tree::{ShutdownReport, SlowHook, Straggler, Supervisor, SupervisorBuilder};
pub use wall_clock::wall_clock_time;
