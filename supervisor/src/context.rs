//! The context of a run: what a runnable can see and do.

use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::select_all;
use thiserror::Error;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cancellation::{RunCancellation, RunSignal};
use crate::containment::await_contained;
use crate::driver::TreeDriver;
use crate::failure::{CanceledError, Failure};
use crate::fsm::{AddChildError, LifecycleSignalError, RunKey, RunOutcome, TreeFsm, TreeTime};
use crate::name::{NameError, resolve_dn};
use crate::output::{OutputSink, OutputStream, SinkWriter};
use crate::policy::GroupPolicy;
use crate::process::ProcessHost;
use crate::process_exit::{AdoptedProcess, ForcedKill, ProcessExit};
use crate::runnable::{ChildSpec, Runnable};
use crate::state::ExitReason;
use crate::task;

/// One incarnation's handle to the tree. It is cheap to clone. It becomes stale when the run ends: it still
/// returns its name, but every other call fails and never reaches the runnable's next incarnation.
#[derive(Clone)]
pub struct Context(Arc<ContextInner>);

struct ContextInner {
    driver: Arc<TreeDriver>,
    key: RunKey,
    dn: Arc<str>,
    generation: u64,
    cancellation: Arc<RunCancellation>,
    helpers: Mutex<HelperTasks>,
    deferred_dependencies: OnceLock<Arc<[Arc<str>]>>,
}

/// The helper tasks of a run. The run does not end before they do.
#[derive(Default)]
struct HelperTasks {
    tasks: Option<TaskTracker>,
    closed: bool,
}

/// The context is stale: its run has ended, or its runnable has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("this context belongs to a run of its runnable that has ended: use the current run's context")]
pub struct StaleContextError;

/// The reason why waiting for another runnable failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WaitReadyError {
    /// The waiting runnable was canceled, or the tree was shut down.
    #[error("canceled while waiting for a runnable to be ready")]
    Canceled(#[source] CanceledError),
    /// No runnable has this DN. Add it before waiting for it.
    #[error("unknown runnable {dn:?}: add it before waiting for it")]
    UnknownDn {
        /// The DN.
        dn: String,
    },
    /// No runnable can ever have this DN.
    #[error("invalid DN {dn:?}: use one like \"root.a.b\"")]
    InvalidDn {
        /// The text as it was given.
        dn: String,
    },
}

impl Context {
    pub(crate) fn new(
        driver: Arc<TreeDriver>,
        key: RunKey,
        dn: Arc<str>,
        generation: u64,
        cancellation: Arc<RunCancellation>,
    ) -> Self {
        let (helpers, deferred_dependencies) = (Mutex::default(), OnceLock::new());
        let inner =
            ContextInner { driver, key, dn, generation, cancellation, helpers, deferred_dependencies };
        Self(Arc::new(inner))
    }

    /// Adds one child as a separate group, and starts it.
    ///
    /// # Errors
    /// See [`AddChildError`]; nothing was added.
    pub fn run_child(&self, name: impl Into<String>, runnable: impl Runnable) -> Result<(), AddChildError> {
        self.run_child_with(ChildSpec::new(name, runnable))
    }

    /// Adds one child with its options as a separate group, and starts it.
    ///
    /// # Errors
    /// See [`AddChildError`]; nothing was added.
    pub fn run_child_with(&self, child: ChildSpec) -> Result<(), AddChildError> {
        self.run_group_with(GroupPolicy::OneForOne, [child])
    }

    /// Adds a group of children whose members end and restart together, see [`GroupPolicy::OneForAll`].
    ///
    /// # Errors
    /// See [`AddChildError`]; none of the group was added.
    pub fn run_group(&self, children: impl IntoIterator<Item = ChildSpec>) -> Result<(), AddChildError> {
        self.run_group_with(GroupPolicy::OneForAll, children)
    }

    /// Adds a group of children and starts them, also when this runnable is ready. They end with this run. The policy
    /// decides which of them end together with a failed one. These restart after all of them, with their subtrees, have
    /// exited: the canceled members at once, each failed member after its backoff.
    ///
    /// The children run when this task next waits: a runnable that blocks its thread holds them up.
    ///
    /// # Errors
    /// See [`AddChildError`]; none of the group was added.
    pub fn run_group_with(
        &self,
        policy: GroupPolicy,
        children: impl IntoIterator<Item = ChildSpec>,
    ) -> Result<(), AddChildError> {
        self.0.driver.add_group(self.0.key, &self.0.dn, policy, children.into_iter().collect())
    }

    /// Signals that this runnable now does its work. It can be repeated only after [`signal_not_ready`](Self::signal_not_ready).
    ///
    /// # Errors
    /// [`LifecycleSignalError::StaleContext`], [`LifecycleSignalError::ForeignContext`], or
    /// [`LifecycleSignalError::ReadyTwice`], which has canceled this run.
    pub fn signal_ready(&self) -> Result<(), LifecycleSignalError> {
        self.apply_signal(|fsm, now| fsm.signal_ready(now, self.0.key))
    }

    /// Signals that this runnable can't do its work at present, and why: a clause that tells what an operator
    /// can do, like `has no leader: start the other members`. It may be sent before the first ready signal, and
    /// repeated when the reason changes. Its children and those who waited for it keep running; the next
    /// [`signal_ready`](Self::signal_ready) ends it. It has no effect after [`signal_done`](Self::signal_done).
    ///
    /// # Errors
    /// [`LifecycleSignalError::StaleContext`], [`LifecycleSignalError::ForeignContext`].
    pub fn signal_not_ready(&self, reason: impl Into<Arc<str>>) -> Result<(), LifecycleSignalError> {
        let reason = reason.into();
        self.apply_signal(|fsm, now| fsm.signal_not_ready(now, self.0.key, reason))?;
        // A reason before the first ready signal, or a repeated one, has no event that would announce it.
        self.0.driver.announce_status_change();
        Ok(())
    }

    /// Signals that the work is done and the runnable is about to return `Ok`. The supervisor does not
    /// restart it, and its children keep running.
    ///
    /// # Errors
    /// [`LifecycleSignalError::StaleContext`], [`LifecycleSignalError::ForeignContext`], or an invalid order,
    /// which has canceled this run.
    pub fn signal_done(&self) -> Result<(), LifecycleSignalError> {
        self.apply_signal(|fsm, now| fsm.signal_done(now, self.0.key))
    }

    /// The runnable's name in the tree, `root.a.b`.
    pub fn dn(&self) -> &str {
        &self.0.dn
    }

    /// The number of this incarnation of its DN, counted from 1.
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    /// Resolves when the runnable has to stop. Return the value that it resolves to.
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub fn canceled(&self) -> impl Future<Output = CanceledError> + Send + '_ {
        self.0.cancellation.wait_for(RunSignal::Cancel).map(|()| CanceledError)
    }

    /// Works until the runnable has to stop, and returns what it then returns: the last line of a runnable whose
    /// work is done by others.
    ///
    /// # Errors
    /// Always [`CanceledError`], in a [`Failure`].
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn until_canceled(&self) -> Result<(), Failure> {
        Err(self.canceled().await.into())
    }

    /// Returns whether the runnable has to stop.
    pub fn is_canceled(&self) -> bool {
        self.0.cancellation.is_canceled()
    }

    /// A token that is canceled with this context, for libraries that take one. Canceling the token does not
    /// affect the tree.
    pub fn cancellation_token(&self) -> CancellationToken {
        self.0.cancellation.child_token()
    }

    /// A span with the field `dn`, by which a subscriber finds the runnable's log. The runnable itself
    /// already runs in it.
    pub fn span(&self) -> tracing::Span {
        // Without a parent: the caller may be in the span of another runnable.
        tracing::info_span!(parent: None, "runnable", dn = %self.0.dn)
    }

    /// A span for a part of this runnable that logs under a separate name.
    ///
    /// # Errors
    /// [`NameError`] when a child has the name. In turn, a child can't take the name of a sub-span.
    pub fn sub_span(&self, name: &str) -> Result<tracing::Span, NameError> {
        let dn = self.0.driver.apply(|fsm, _| fsm.reserve_sub_span(self.0.key, name))?;
        Ok(tracing::info_span!(parent: None, "part", dn = %dn))
    }

    /// A writer for text that is not a log line of this program.
    pub fn open_raw_output(&self) -> Box<dyn io::Write + Send> {
        self.open_output(OutputStream::Raw)
    }

    /// A writer for one of this run's outputs.
    pub fn open_output(&self, stream: OutputStream) -> Box<dyn io::Write + Send> {
        Box::new(self.open_sink(stream))
    }

    pub(crate) fn open_sink(&self, stream: OutputStream) -> SinkWriter {
        self.open_writer(&**self.0.driver.output, stream)
    }

    /// A writer of this sink for one of this run's outputs.
    pub(crate) fn open_writer(&self, sink: &dyn OutputSink, stream: OutputStream) -> SinkWriter {
        SinkWriter::open(sink, &self.0.dn, stream, self.0.generation)
    }

    /// Spawns a helper task. The run does not end before its helpers, and a helper's panic fails the
    /// runnable. A helper should watch [`canceled`](Self::canceled), which also resolves when the runnable
    /// fails.
    ///
    /// # Errors
    /// [`StaleContextError`] when the runnable has returned.
    pub fn spawn_joined(
        &self,
        helper: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), StaleContextError> {
        let mut helpers = self.0.helpers.lock().unwrap_or_else(PoisonError::into_inner);
        // The lock is held until the task is tracked: `join_helpers` takes the tasks under the same lock.
        if helpers.closed {
            return Err(StaleContextError);
        }
        let context = self.clone();
        let contained = async move {
            let mut part = pin!(Some(task::part_of_run(&context, await_contained(helper))));
            let mut aborted = pin!(context.wait_aborted());
            let ended = poll_fn(move |cx| task::poll_part(cx, aborted.as_mut(), part.as_mut())).await;
            if let Some(Err(message)) = ended {
                context.fail_run(ExitReason::panicked(message));
            }
        };
        let tasks = helpers.tasks.get_or_insert_default();
        tasks.spawn_on(contained, self.0.driver.runtime());
        Ok(())
    }

    /// Waits until a child of this runnable, by its name, or a runnable anywhere in the tree, by its DN, is ready or
    /// done, across any restarts of it and its parent. One that is stopping is not ready. A later failure of that
    /// runnable is not reported. With its own DN it waits for its own ready signal, beside what will send that.
    ///
    /// # Errors
    /// See [`WaitReadyError`].
    ///
    /// # Cancel safety
    /// It can be dropped and called again at any time.
    pub async fn wait_ready(&self, name: &str) -> Result<(), WaitReadyError> {
        let dn =
            resolve_dn(&self.0.dn, name).ok_or_else(|| WaitReadyError::InvalidDn { dn: name.to_owned() })?;
        if self.0.driver.read(|fsm| fsm.readiness_of(&dn)).is_none() {
            return Err(WaitReadyError::UnknownDn { dn });
        }
        self.wait_dependency(&dn).await
    }

    /// Waits like [`wait_ready`](Self::wait_ready), also for a DN that is not in the tree yet.
    pub(crate) async fn wait_dependency(&self, dn: &str) -> Result<(), WaitReadyError> {
        let waiting = self.0.driver.wait_readiness(dn, true);
        let _noted = DependencyGuard::set(self, dn);
        tokio::select! {
            biased;
            // A shutdown drops the waiters, and cancels this run in its turn.
            Ok(()) = waiting => Ok(()),
            canceled = self.canceled() => Err(WaitReadyError::Canceled(canceled)),
        }
    }

    pub(crate) fn are_ready(&self, dns: &[Arc<str>]) -> bool {
        self.0.driver.read(|fsm| dns.iter().all(|dn| fsm.readiness_of(dn) == Some(true)))
    }

    /// Resolves with the first of these DNs that is not ready. With `has_started`, each of them has to be ready first.
    pub(crate) async fn wait_lost_dependency(&self, dns: &[Arc<str>], has_started: bool) -> Arc<str> {
        let lost = dns.iter().map(|dn| {
            Box::pin(async move {
                let driver = &self.0.driver;
                // Their senders are dropped in a shutdown, which stops this run in its turn.
                let is_lost = (has_started || driver.wait_readiness(dn, true).await.is_ok())
                    && driver.wait_readiness(dn, false).await.is_ok();
                if is_lost { Arc::clone(dn) } else { std::future::pending().await }
            })
        });
        let (lost, ..) = select_all(lost).await;
        lost
    }

    pub(crate) fn restart_with_dependency(&self, dependency: Arc<str>) {
        self.0.driver.apply(|fsm, now| fsm.restart_with_dependency(now, self.0.key, dependency));
    }

    /// The host that runs child processes, created at the first call.
    pub(crate) fn process_host(&self) -> io::Result<Arc<ProcessHost>> {
        self.0.driver.process_host()
    }

    fn apply_signal(
        &self,
        signal: impl FnOnce(&mut TreeFsm, TreeTime) -> Result<(), LifecycleSignalError>,
    ) -> Result<(), LifecycleSignalError> {
        if task::is_other_run(self.0.key) {
            return Err(LifecycleSignalError::ForeignContext { dn: self.0.dn.to_string() });
        }
        self.0.driver.apply(signal)
    }

    /// Makes the run end as failed with `exit`, regardless of its result.
    fn fail_run(&self, exit: ExitReason) {
        self.0.driver.apply(|fsm, now| fsm.fail_run(now, self.0.key, exit));
    }

    /// The runnable has started to end by itself: from now on it no longer counts as ready.
    pub(crate) fn mark_ending(&self) {
        self.0.driver.apply(|fsm, now| fsm.mark_ending(now, self.0.key));
        self.0.driver.notify_lost(&self.0.dn);
    }

    pub(crate) fn record_process_exit(&self, exit: ProcessExit) {
        self.0.driver.apply(|fsm, _| fsm.record_process_exit(self.0.key, Arc::new(exit)));
    }

    /// The run has adopted a process.
    pub(crate) fn report_adoption(&self, process: AdoptedProcess) {
        self.0.driver.apply(|fsm, _| fsm.report_adoption(self.0.key, process));
    }

    /// Returns whether a process of this DN that an earlier program has kept waits for its adoption.
    pub(crate) fn has_kept_process(&self) -> bool {
        self.0.driver.has_kept_process(&self.0.dn)
    }

    /// The DNs that the run waits for if it has to start a process after all, see
    /// [`wait_deferred_dependencies`](Self::wait_deferred_dependencies).
    pub(crate) fn defer_dependencies(&self, dns: Arc<[Arc<str>]>) {
        // A run defers them once, before its runnable runs.
        let _ = self.0.deferred_dependencies.set(dns);
    }

    pub(crate) async fn wait_deferred_dependencies(&self) -> Result<(), CanceledError> {
        for dn in self.0.deferred_dependencies.get().into_iter().flat_map(|dns| dns.iter()) {
            self.wait_dependency(dn).await.map_err(|_| CanceledError)?;
        }
        Ok(())
    }

    /// The processes of the run did not stop in time, and are being killed.
    pub(crate) fn report_kill(&self, kill: ForcedKill) {
        self.0.driver.apply(|fsm, _| fsm.report_kill(self.0.key, kill));
    }

    /// Nothing in the tree starts any more.
    pub(crate) fn forbid_starts(&self) {
        self.0.driver.apply(TreeFsm::begin_shutdown);
    }

    pub(crate) fn report_exit(&self, outcome: RunOutcome) {
        self.0.driver.report_exit(self.0.key, outcome);
    }

    pub(crate) fn run_key(&self) -> RunKey {
        self.0.key
    }

    /// Resolves when the supervisor has given up on the run.
    pub(crate) fn wait_aborted(&self) -> impl Future<Output = ()> {
        self.0.cancellation.wait_for(RunSignal::Abort)
    }

    /// Waits for the helpers. Cancels them unless the runnable ended successfully.
    pub(crate) async fn join_helpers(&self, outcome: &RunOutcome) {
        let tasks = {
            let mut helpers = self.0.helpers.lock().unwrap_or_else(PoisonError::into_inner);
            // A helper that is spawned from now on would not be waited for.
            helpers.closed = true;
            helpers.tasks.take()
        };
        let Some(tasks) = tasks else { return };
        tasks.close();
        // Without helpers, the exit itself follows at once.
        if !tasks.is_empty() {
            self.0.driver.apply(|fsm, now| fsm.handle_return(now, self.0.key, outcome.clone()));
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

/// Shows in the status which runnable this one waits for, until it is dropped.
struct DependencyGuard<'a>(&'a Context);

impl<'a> DependencyGuard<'a> {
    fn set(context: &'a Context, dn: &str) -> Self {
        context.set_dependency(Some(dn.into()));
        Self(context)
    }
}

impl Drop for DependencyGuard<'_> {
    fn drop(&mut self) {
        self.0.set_dependency(None);
    }
}

impl Context {
    fn set_dependency(&self, dn: Option<Arc<str>>) {
        self.0.driver.set_dependency(self.0.key, dn);
    }
}
