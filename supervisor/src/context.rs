//! What a runnable knows and may do.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use thiserror::Error;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::driver::Driver;
use crate::machine::{Ended, Key, Machine, SignalError, SpawnError, Time};
use crate::name::NameError;
use crate::output::{Origin, Stream};
use crate::process::{Host, ProcessExit};
use crate::runnable::{Cancelled, Child, Runnable};
use crate::state::Exit;
use crate::switch::Switches;
use crate::task;

/// One run's view of the tree. It is cheap to clone, and becomes stale when the run ends: then it can still be asked
/// for its name, but whatever it tries gets an error and never reaches the node's next run.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    driver: Arc<Driver>,
    key: Key,
    dn: Arc<str>,
    generation: u64,
    switches: Arc<Switches>,
    helpers: Mutex<Helpers>,
}

/// The helper tasks of a run, for which its end waits.
#[derive(Default)]
struct Helpers {
    tasks: Option<TaskTracker>,
    closed: bool,
}

/// The run has ended, or its runnable has returned: there is nobody to help any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the context is stale: its run has ended")]
pub struct Stale;

/// Why another runnable can't be waited for.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WaitError {
    /// Who waits is cancelled itself.
    #[error("waiting ended")]
    Cancelled(#[source] Cancelled),
    /// No runnable has this DN: it must have been added before somebody waits for it.
    #[error("no runnable is called {dn:?}")]
    UnknownDn {
        /// The DN as it was given.
        dn: String,
    },
}

impl Context {
    pub(crate) fn new(
        driver: Arc<Driver>,
        key: Key,
        dn: Arc<str>,
        generation: u64,
        switches: Arc<Switches>,
    ) -> Self {
        Self(Arc::new(Inner { driver, key, dn, generation, switches, helpers: Mutex::default() }))
    }

    /// Adds one child, a group of its own, and starts it.
    ///
    /// # Errors
    /// See [`SpawnError`]; nothing was added.
    pub fn run(&self, name: impl Into<String>, runnable: impl Runnable) -> Result<(), SpawnError> {
        self.run_group([Child::new(name, runnable)])
    }

    /// Adds a group of children and starts them. When one of them fails, the others are cancelled, and each starts
    /// again as soon as everything below it has exited: those that were cancelled at once, the one that failed after its
    /// backoff.
    ///
    /// # Errors
    /// See [`SpawnError`]; none of the group was added.
    pub fn run_group(&self, children: impl IntoIterator<Item = Child>) -> Result<(), SpawnError> {
        self.0.driver.spawn(self.0.key, children.into_iter().collect())
    }

    /// Says that this runnable does its work from now on. No children can be added after this.
    ///
    /// # Errors
    /// [`SignalError::Stale`], or [`SignalError::ReadyTwice`], which has cancelled this run.
    pub fn ready(&self) -> Result<(), SignalError> {
        self.signal(|machine, now| machine.ready(now, self.0.key))
    }

    /// Says that the work is done and the runnable is about to return `Ok`: it is not started again by itself, and its
    /// children go on.
    ///
    /// # Errors
    /// [`SignalError::Stale`], or a wrong order, which has cancelled this run.
    pub fn done(&self) -> Result<(), SignalError> {
        self.signal(|machine, now| machine.done(now, self.0.key))
    }

    /// The runnable's name in the tree, `root.a.b`.
    pub fn dn(&self) -> &str {
        &self.0.dn
    }

    /// Which run of this DN it is, counted from 1.
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    /// Resolves when the runnable has to stop: return what it gives.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn cancelled(&self) -> Cancelled {
        self.0.switches.cancelled().happened().await;
        Cancelled
    }

    /// Whether the runnable has to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.switches.cancelled().has_happened()
    }

    /// A token that is cancelled with this context, for libraries that take one. Cancelling it does nothing to the tree.
    pub fn token(&self) -> CancellationToken {
        self.0.switches.token()
    }

    /// A span with the field `dn`, by which a subscriber finds the runnable's log. What the runnable does itself is in
    /// it already.
    pub fn span(&self) -> tracing::Span {
        tracing::info_span!(parent: None, "runnable", dn = %self.0.dn)
    }

    /// A span for a part of this runnable that logs below a name of its own.
    ///
    /// # Errors
    /// [`NameError`] when a child has the name, as a child is refused a name that a sub-span has.
    pub fn sub_span(&self, name: &str) -> Result<tracing::Span, NameError> {
        let dn = self.0.driver.apply(|machine, _| machine.sub_span(self.0.key, name))?;
        Ok(tracing::info_span!(parent: None, "part", dn = %dn))
    }

    /// A writer for text that is no log line of this program.
    pub fn raw(&self) -> Box<dyn io::Write + Send> {
        self.output(Stream::Raw)
    }

    /// A writer for one of this run's outputs.
    pub fn output(&self, stream: Stream) -> Box<dyn io::Write + Send> {
        let origin = Origin { dn: &self.0.dn, stream, generation: self.0.generation };
        self.0.driver.output.open(origin)
    }

    /// Runs a helper task: the run does not end before it, and its panic is the runnable's. It should watch
    /// [`cancelled`](Self::cancelled), which also comes when the runnable fails.
    ///
    /// # Errors
    /// [`Stale`] when the runnable has returned.
    pub fn spawn(&self, helper: impl Future<Output = ()> + Send + 'static) -> Result<(), Stale> {
        let mut helpers = self.0.helpers.lock().unwrap_or_else(PoisonError::into_inner);
        if helpers.closed {
            return Err(Stale);
        }
        let context = self.clone();
        let contained = async move {
            if let Some(Err(message)) = task::contain(&context, helper).await {
                context.doom(Exit::Panicked { message });
            }
        };
        let tasks = helpers.tasks.get_or_insert_default();
        tasks.spawn_on(contained, self.0.driver.runtime());
        Ok(())
    }

    /// Waits until the runnable of this DN, anywhere in the tree, is ready or done, however often it and its parent are
    /// restarted until then. That it fails later is not told.
    ///
    /// # Errors
    /// See [`WaitError`].
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn wait_ready(&self, dn: &str) -> Result<(), WaitError> {
        let unknown = || WaitError::UnknownDn { dn: dn.to_owned() };
        let waiting = self.0.driver.wait_ready(dn).ok_or_else(unknown)?;
        let _noted = Dependency::note(self, dn);
        tokio::select! {
            biased;
            ready = waiting => ready.map_err(|_| WaitError::Cancelled(Cancelled)),
            cancelled = self.cancelled() => Err(WaitError::Cancelled(cancelled)),
        }
    }

    /// What runs child processes.
    pub(crate) fn processes(&self) -> io::Result<Arc<Host>> {
        self.0.driver.processes()
    }

    fn signal(
        &self,
        signal: impl FnOnce(&mut Machine, Time) -> Result<(), SignalError>,
    ) -> Result<(), SignalError> {
        if task::is_foreign(self.0.key) {
            return Err(SignalError::Foreign { dn: self.0.dn.to_string() });
        }
        self.0.driver.apply(signal)
    }

    /// The run is to end as failed, whatever its runnable returns.
    fn doom(&self, exit: Exit) {
        self.0.driver.apply(|machine, now| machine.doom(now, self.0.key, exit));
    }

    /// The runnable has begun to end, by itself: from now on it counts as ready no more.
    pub(crate) fn ending(&self) {
        self.0.driver.apply(|machine, now| machine.ending(now, self.0.key));
    }

    /// How the runnable's child process has ended.
    pub(crate) fn process_ended(&self, exit: ProcessExit) {
        self.0.driver.apply(|machine, _| machine.process_ended(self.0.key, Arc::new(exit)));
    }

    pub(crate) fn exited(&self, ended: Ended) {
        self.0.driver.apply(|machine, now| machine.exited(now, self.0.key, ended));
    }

    pub(crate) fn key(&self) -> Key {
        self.0.key
    }

    /// Resolves when the run has been given up on.
    pub(crate) async fn aborted(&self) {
        self.0.switches.aborted.happened().await;
    }

    /// Waits for the helpers, which are told to stop unless the runnable ended well.
    pub(crate) async fn join_helpers(&self, ended: &Ended) {
        let tasks = {
            let mut helpers = self.0.helpers.lock().unwrap_or_else(PoisonError::into_inner);
            helpers.closed = true;
            helpers.tasks.take()
        };
        let Some(tasks) = tasks else { return };
        tasks.close();
        if !tasks.is_empty() {
            self.0.driver.apply(|machine, now| machine.returned(now, self.0.key, ended.clone()));
            tasks.wait().await;
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("dn", &self.0.dn)
            .field("generation", &self.0.generation)
            .finish_non_exhaustive()
    }
}

/// Shows in the status for whom a runnable waits, as long as it does.
struct Dependency<'a>(&'a Context);

impl<'a> Dependency<'a> {
    fn note(context: &'a Context, dn: &str) -> Self {
        context.set_dependency(Some(dn.into()));
        Self(context)
    }
}

impl Drop for Dependency<'_> {
    fn drop(&mut self) {
        self.0.set_dependency(None);
    }
}

impl Context {
    fn set_dependency(&self, dn: Option<Arc<str>>) {
        self.0.driver.note_dependency(self.0.key, dn);
    }
}
