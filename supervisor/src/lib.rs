//! A supervision tree: async runnables and child processes that are started, watched, restarted and stopped in order.
//!
//! It is no actor framework and no service manager: no mailboxes, no unit files, no registry. It keeps no log (it names
//! its spans, and hands raw output to an [`OutputSink`]) and it does not decide what a program consists of.
//!
//! ```text
//!  root ────────────── a runnable: adds children, signals ready, works until it is cancelled, cleans up, returns
//!  ├─ control          group 1: a lone child
//!  ├─ etcd ┐           group 2: one failure cancels the others;
//!  ├─ sync ┘                    each starts again once all below it has exited
//!  └─ services
//!     ├─ a             children belong to one run of their parent, and go down before it
//!     └─ b
//! ```
//!
//! ```
//! use nodekeel_supervisor::{Context, Failure, Supervisor};
//!
//! async fn greeter(ctx: Context) -> Result<(), Failure> {
//!     ctx.ready()?;
//!     // Work here, until:
//!     Err(ctx.cancelled().await.into())
//! }
//!
//! #[tokio::main(flavor = "current_thread")]
//! async fn main() {
//!     let supervisor = Supervisor::builder().start(|ctx: Context| async move {
//!         ctx.run("greeter", greeter)?;
//!         ctx.ready()?;
//!         Err::<(), Failure>(ctx.cancelled().await.into())
//!     });
//!     let report = supervisor.shutdown().await;
//!     assert!(report.stragglers.is_empty());
//! }
//! ```
//!
//! # How it behaves
//! - A failure (an error, a panic, a return without [`done`](Context::done), a wrong signal) cancels everything below the
//!   runnable, and the other members of its group. What was cancelled starts again as soon as all below it has exited;
//!   what failed starts after its [`Backoff`]. A parent restarts only by its own failure, never by a child's.
//! - Failures count until a runnable has been ready for [`Policy::stable_after`], also across its parent's restarts.
//! - Every run has its own [`Context`]. One that has leaked out of an ended run gets errors and never acts for the next.
//! - Nothing is polled: an idle tree wakes nobody up. A death costs as much as the tree is deep.
//! - [`Supervisor::shutdown`] goes down in reverse order, with a deadline for each, and names who did not stop.
//! - A child process ([`process`]) takes all its descendants along, wherever they have reparented themselves to.
//!
//! # Bring your own
//! - [`Runnable`]: one method; every `Fn(Context) -> impl Future<Output = Result<(), E>>` is one.
//! - [`EventHook`]: hears of every change, in order, once. Every `Fn(&Event)` is one.
//! - [`OutputSink`]: takes raw output by name, stream and generation. Every `Fn(Origin) -> impl io::Write` is one.
//! - A log: the span field `dn` names the runnable; nodekeel-logtree's layer collects by it.
//!
//! # Features
//! - `testing`: a tree in virtual time, and a runnable that a test controls.
//! - `tonic`: a runnable that serves gRPC and stops gracefully.
//!
//! # Where it comes from
//! The semantics are those of Monogon's `osbase/supervisor` (and so of Erlang/OTP), without its known defects: names that
//! are checked half, identities that are looked up by name, a poll each millisecond, a backoff that flapping resets, a
//! SIGKILL of the first process only.

mod context;
mod driver;
mod event;
mod machine;
mod name;
mod output;
mod policy;
pub mod process;
mod runnable;
#[cfg(feature = "tonic")]
mod serve;
mod state;
mod stop_signals;
mod switch;
mod sys;
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
pub use stop_signals::StopSignals;
pub use tree::{Builder, ShutdownReport, Straggler, Supervisor};
