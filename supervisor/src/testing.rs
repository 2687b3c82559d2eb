//! A tree in virtual time, for tests of runnables.
//!
//! Run the test with a paused clock (`#[tokio::test(start_paused = true)]`): tokio's time then stands still
//! while any task can run, and jumps to the next deadline when none can. A backoff of a minute takes no real
//! time, and what a test sees after [`settle`] does not depend on the speed of the host.
//!
//! ```
//! use nodekeel_supervisor::testing::{EventRecorder, RemoteRunnable, settle};
//! use nodekeel_supervisor::{Context, Failure, RunnableState, Supervisor};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! let (recorder, remote) = (EventRecorder::default(), RemoteRunnable::default());
//! let child = remote.clone();
//! let supervisor = Supervisor::builder().event_hook(recorder.clone()).start(move |ctx: Context| {
//!     let child = child.clone();
//!     async move {
//!         ctx.run_child("child", child)?;
//!         ctx.signal_ready()?;
//!         Err::<(), Failure>(ctx.canceled().await.into())
//!     }
//! });
//! settle().await;
//! remote.signal_ready().await;
//! remote.fail("disk gone").await;
//! recorder.wait_for_state("root.child", RunnableState::Dead).await;
//! let restarted = recorder.wait_for_state("root.child", RunnableState::New).await;
//! assert_eq!(restarted.generation, 2, "after its backoff");
//! assert!(supervisor.shutdown().await.stragglers.is_empty());
//! # }
//! ```

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};

use crate::process::{count_messages, parse_any, rewrite_record};
use crate::{CanceledError, Context, Event, EventHook, Failure, RunFuture, Runnable, RunnableState};

/// Runs every task until all wait for time to pass. Under a paused clock it takes a millisecond of virtual
/// time.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// A record of a process is rejected, or is written as it was read; panics otherwise. For a fuzz target.
pub fn fuzz_process_record(input: &[u8]) {
    if let Some(written) = rewrite_record(input) {
        assert_eq!(written, input);
    }
}

/// A datagram to a notification socket has at most one message for each line; panics otherwise. For a fuzz target.
pub fn fuzz_notification(input: &[u8]) {
    assert!(count_messages(input) <= input.split(|&byte| byte == b'\n').count());
}

/// Reads a text as each of the files of `/proc` that the supervisor reads. For a fuzz target.
pub fn fuzz_procfs(input: &[u8]) {
    parse_any(input);
}

/// A hook that keeps every event.
#[derive(Debug, Clone, Default)]
pub struct EventRecorder(Arc<EventLog>);

#[derive(Debug, Default)]
struct EventLog {
    events: Mutex<Vec<Event>>,
    /// The number of events that `wait_for_state` has consumed.
    seen: Mutex<usize>,
    more: Notify,
}

impl EventHook for EventRecorder {
    fn on_event(&self, event: &Event) {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone());
        self.0.more.notify_waiters();
    }
}

impl EventRecorder {
    /// All events so far.
    pub fn events(&self) -> Vec<Event> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The states of a runnable so far, in order.
    pub fn states_of(&self, dn: &str) -> Vec<RunnableState> {
        let events = self.events();
        events.iter().filter(|event| &*event.dn == dn).filter_map(|event| event.change.new_state()).collect()
    }

    /// Waits for the next event that brings a runnable into a state, and consumes all events up to it.
    pub async fn wait_for_state(&self, dn: &str, state: RunnableState) -> Event {
        loop {
            let mut more = std::pin::pin!(self.0.more.notified());
            // Before the search: an event in between wakes this wait.
            more.as_mut().enable();
            if let Some(event) = self.find(dn, state) {
                return event;
            }
            more.await;
        }
    }

    fn find(&self, dn: &str, state: RunnableState) -> Option<Event> {
        let events = self.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = |event: &Event| &*event.dn == dn && event.change.new_state() == Some(state);
        let at = *seen + events[*seen..].iter().position(wanted)?;
        *seen = at + 1;
        Some(events[at].clone())
    }
}

/// A runnable that follows a test's commands, and obeys its cancellation.
///
/// A command waits until a run receives it, and until that run has executed it.
#[derive(Clone)]
pub struct RemoteRunnable {
    commands: mpsc::Sender<RemoteCommand>,
    waiting: Arc<tokio::sync::Mutex<mpsc::Receiver<RemoteCommand>>>,
}

enum RemoteCommand {
    Ready(oneshot::Sender<()>),
    Done(oneshot::Sender<()>),
    Return(Result<(), Failure>),
    Panic(String),
}

impl Default for RemoteRunnable {
    fn default() -> Self {
        let (commands, waiting) = mpsc::channel(1);
        Self { commands, waiting: Arc::new(tokio::sync::Mutex::new(waiting)) }
    }
}

impl RemoteRunnable {
    /// Signals ready. The tree handles an invalid order.
    pub async fn signal_ready(&self) {
        let (done, when_done) = oneshot::channel();
        self.send(RemoteCommand::Ready(done)).await;
        let _ = when_done.await;
    }

    /// Signals done. The tree handles an invalid order.
    pub async fn signal_done(&self) {
        let (done, when_done) = oneshot::channel();
        self.send(RemoteCommand::Done(done)).await;
        let _ = when_done.await;
    }

    /// Returns `Ok`.
    pub async fn return_ok(&self) {
        self.send(RemoteCommand::Return(Ok(()))).await;
    }

    /// Returns an error.
    pub async fn fail(&self, error: &str) {
        self.send(RemoteCommand::Return(Err(Failure::new(error)))).await;
    }

    /// Panics.
    pub async fn panic(&self, message: &str) {
        self.send(RemoteCommand::Panic(message.to_owned())).await;
    }

    async fn send(&self, command: RemoteCommand) {
        // `self` owns the receiver, so the channel is open.
        let _ = self.commands.send(command).await;
    }
}

impl Runnable for RemoteRunnable {
    fn run(&self, ctx: Context) -> RunFuture {
        let waiting = Arc::clone(&self.waiting);
        Box::pin(async move {
            // Runs take turns: a command that no run has received is for the next one.
            let mut waiting = waiting.lock().await;
            loop {
                let command = tokio::select! {
                    CanceledError = ctx.canceled() => return Err(CanceledError.into()),
                    command = waiting.recv() => command,
                };
                match command {
                    Some(RemoteCommand::Ready(done)) => {
                        // The tree fails the run after an invalid signal, which the test sees in the events.
                        let _ = ctx.signal_ready();
                        let _ = done.send(());
                    }
                    Some(RemoteCommand::Done(done)) => {
                        let _ = ctx.signal_done();
                        let _ = done.send(());
                    }
                    Some(RemoteCommand::Return(result)) => return result,
                    Some(RemoteCommand::Panic(message)) => std::panic::panic_any(message),
                    None => return Err(ctx.canceled().await.into()),
                }
            }
        })
    }
}

impl fmt::Debug for RemoteRunnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteRunnable").finish_non_exhaustive()
    }
}
