//! A tree under virtual time, for tests of runnables.
//!
//! Run the test with a paused clock (`#[tokio::test(start_paused = true)]`): then tokio's time stands still while
//! anything can run, and jumps to the next deadline when nothing can. A backoff of a minute costs nothing, and what a
//! test sees after [`settle`] does not depend on how fast the machine is.
//!
//! ```
//! use nodekeel_supervisor::testing::{Recorder, Remote, settle};
//! use nodekeel_supervisor::{Context, Failure, State, Supervisor};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! let (recorder, remote) = (Recorder::default(), Remote::default());
//! let child = remote.clone();
//! let supervisor = Supervisor::builder().hook(recorder.clone()).start(move |ctx: Context| {
//!     let child = child.clone();
//!     async move {
//!         ctx.run("child", child)?;
//!         ctx.ready()?;
//!         Err::<(), Failure>(ctx.cancelled().await.into())
//!     }
//! });
//! settle().await;
//! remote.ready().await;
//! remote.fail("disk gone").await;
//! recorder.until("root.child", State::Dead).await;
//! assert_eq!(recorder.until("root.child", State::New).await.generation, 2, "after its backoff");
//! assert!(supervisor.shutdown().await.stragglers.is_empty());
//! # }
//! ```

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};

use crate::{Cancelled, Context, Event, EventHook, Failure, RunFuture, Runnable, State};

/// Lets everything run that can run without time passing. Under a paused clock it takes a millisecond of virtual time.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// A hook that keeps every event.
#[derive(Debug, Clone, Default)]
pub struct Recorder(Arc<Record>);

#[derive(Debug, Default)]
struct Record {
    events: Mutex<Vec<Event>>,
    /// How many events `until` has gone past.
    seen: Mutex<usize>,
    more: Notify,
}

impl EventHook for Recorder {
    fn event(&self, event: &Event) {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner).push(event.clone());
        self.0.more.notify_waiters();
    }
}

impl Recorder {
    /// All events until now.
    pub fn events(&self) -> Vec<Event> {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The states that a node went through until now.
    pub fn states(&self, dn: &str) -> Vec<State> {
        let events = self.events();
        events.iter().filter(|event| &*event.dn == dn).filter_map(|event| event.change.state()).collect()
    }

    /// Waits for the next event that brings a node into a state, and goes past all up to it.
    pub async fn until(&self, dn: &str, state: State) -> Event {
        loop {
            let mut more = std::pin::pin!(self.0.more.notified());
            more.as_mut().enable();
            if let Some(event) = self.find(dn, state) {
                return event;
            }
            more.await;
        }
    }

    fn find(&self, dn: &str, state: State) -> Option<Event> {
        let events = self.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = |event: &Event| &*event.dn == dn && event.change.state() == Some(state);
        let at = *seen + events[*seen..].iter().position(wanted)?;
        *seen = at + 1;
        Some(events[at].clone())
    }
}

/// A runnable that does what the test tells it to, and obeys its cancellation.
///
/// A command waits until a run takes it, and until that run has done it.
#[derive(Clone)]
pub struct Remote {
    commands: mpsc::Sender<Command>,
    waiting: Arc<tokio::sync::Mutex<mpsc::Receiver<Command>>>,
}

enum Command {
    Ready(oneshot::Sender<()>),
    Done(oneshot::Sender<()>),
    Return(Result<(), Failure>),
    Panic(String),
}

impl Default for Remote {
    fn default() -> Self {
        let (commands, waiting) = mpsc::channel(1);
        Self { commands, waiting: Arc::new(tokio::sync::Mutex::new(waiting)) }
    }
}

impl Remote {
    /// Signals ready. A wrong order is left to the tree.
    pub async fn ready(&self) {
        let (done, when_done) = oneshot::channel();
        self.send(Command::Ready(done)).await;
        let _ = when_done.await;
    }

    /// Signals done. A wrong order is left to the tree.
    pub async fn done(&self) {
        let (done, when_done) = oneshot::channel();
        self.send(Command::Done(done)).await;
        let _ = when_done.await;
    }

    /// Returns `Ok`.
    pub async fn finish(&self) {
        self.send(Command::Return(Ok(()))).await;
    }

    /// Returns an error.
    pub async fn fail(&self, error: &str) {
        self.send(Command::Return(Err(Failure::new(error)))).await;
    }

    /// Panics.
    pub async fn panic(&self, message: &str) {
        self.send(Command::Panic(message.to_owned())).await;
    }

    async fn send(&self, command: Command) {
        // The receiver lives in `self`.
        let _ = self.commands.send(command).await;
    }
}

impl Runnable for Remote {
    fn run(&self, ctx: Context) -> RunFuture {
        let waiting = Arc::clone(&self.waiting);
        Box::pin(async move {
            let mut waiting = waiting.lock().await;
            loop {
                let command = tokio::select! {
                    Cancelled = ctx.cancelled() => return Err(Cancelled.into()),
                    command = waiting.recv() => command,
                };
                match command {
                    Some(Command::Ready(done)) => {
                        let _ = ctx.ready();
                        let _ = done.send(());
                    }
                    Some(Command::Done(done)) => {
                        let _ = ctx.done();
                        let _ = done.send(());
                    }
                    Some(Command::Return(result)) => return result,
                    Some(Command::Panic(message)) => std::panic::panic_any(message),
                    None => return Err(ctx.cancelled().await.into()),
                }
            }
        })
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").finish_non_exhaustive()
    }
}
