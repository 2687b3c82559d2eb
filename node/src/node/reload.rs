//! Reloads the configuration of a running node: reads the file again, and changes only what differs.

use std::any::Any;
use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::join_all;
use nodekeel_logtree::{Level, LogMessage};
use nodekeel_supervisor::{ControlError, Removal, RunnableStatus, Supervisor, WaitReason};
use thiserror::Error;

use super::state::NodeState;
use super::tree::child_dns;
use super::{NodeHandle, log_skipped};
use crate::config::{ConfigError, read_text};
use crate::control::socket::NodeSocket;
use crate::dependency::is_descendant;
use crate::dn::CONTROL as CONTROL_DN;
use crate::error_chain::error_chain;
use crate::health::{HealthCondition, NODE_PART};
use crate::part::{CallPanic, PlannedService, PrepareError, call_part, part_of_dn};
use crate::parts::control::log_levels::set_configured_levels;
use crate::plan::{
    ChangeEffect, NodePlan, PlanDifference, PlanError, SourceError, compare_plans, merge_plans, stop_waves,
};
use crate::preparation::{PreparedParts, prepare_services};
use crate::program_name::program_name;

/// The reason why a configuration was not reloaded. The node runs on as before.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The configuration is invalid: correct it.
    #[error(transparent)]
    Config(ConfigError),
    /// Requirements are missing, or in use.
    #[error(transparent)]
    Plan(PlanError),
    /// Some of its changes, which the message names, need a restart of the program: restart it, or undo them.
    #[error(
        "can't reload the configuration: {keys} can't change while {name} runs; restart {name}, or undo these changes",
        keys = keys_of(.0), name = program_name()
    )]
    NodeRestart(PlanDifference),
    /// A new or changed runnable can't be prepared. The message has the hint.
    #[error(transparent)]
    Prepare(PrepareError),
    /// The program did not start the node from a file: start it again instead.
    #[error(
        "can't reload the configuration: the node was not started from a file; start {} with --config",
        program_name()
    )]
    NoFile,
    /// A part panicked. The message names it.
    #[error("can't reload the configuration")]
    Panicked(#[source] CallPanic),
    /// The node is stopping.
    #[error("can't reload the configuration: the node is stopping")]
    Stopping,
}

impl ReloadError {
    fn of_panic(payload: Box<dyn Any + Send>) -> Self {
        Self::Panicked(CallPanic::from_payload(payload, "a reload"))
    }

    /// The error with its causes, in one line.
    pub fn describe(&self) -> String {
        match self {
            // One line for each problem.
            Self::Plan(error) => error.to_string().replace('\n', "; "),
            other => error_chain(other),
        }
    }
}

fn keys_of(difference: &PlanDifference) -> String {
    let keys: Vec<_> = difference.node_restarts().flat_map(|change| change.keys.clone()).collect();
    keys.join(", ")
}

impl From<SourceError> for ReloadError {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::Config(error) => Self::Config(error),
            SourceError::Plan(error) => Self::Plan(error),
        }
    }
}

impl NodeHandle {
    /// Reads the file of the configuration again, and applies the differences: starts new runnables, restarts
    /// changed ones, stops removed ones, dependents first, and leaves the rest as it is. Returns the changes when all
    /// of them have stopped and are about to start. It applies the whole file, or nothing. The log has the result.
    ///
    /// # Errors
    /// See [`ReloadError`].
    ///
    /// # Cancel safety
    /// A reload continues when this future is dropped after its first poll; a second one waits for it.
    pub fn reload(&self) -> impl Future<Output = Result<PlanDifference, ReloadError>> + Send + use<> {
        reload_config(Arc::clone(&self.shared))
    }
}

/// Reloads the configuration: see [`NodeHandle::reload`].
pub(super) async fn reload_config(state: Arc<NodeState>) -> Result<PlanDifference, ReloadError> {
    // SIGHUP, too, makes a socket that is gone be bound again, where nothing has notified of it.
    if let Some(socket) = state.running.extension::<Arc<NodeSocket>>() {
        socket.check_path();
    }
    // A task of its own applies the whole file, even if the caller goes away.
    let reload = tokio::spawn(async move {
        let _one_at_a_time = state.reload.lock().await;
        // A part is asked before anything changes.
        let result = AssertUnwindSafe(reload_file(&state)).catch_unwind().await;
        let result = result.unwrap_or_else(|payload| Err(ReloadError::of_panic(payload)));
        log_result(&state, &result);
        // A success also clears the warning about an earlier refusal.
        state
            .running
            .set_refused_reload(result.as_ref().err().and_then(|error| refusal_condition(&state, error)));
        result
    });
    // The task ends early only with the runtime.
    reload.await.unwrap_or(Err(ReloadError::Stopping))
}

/// Compares the running configuration with this text, or with the node's file. Changes nothing.
///
/// # Errors
/// Those of a reload, except that changes that need a restart of the program are part of the difference.
pub(super) async fn check_config(
    state: Arc<NodeState>,
    text: Option<(PathBuf, String)>,
) -> Result<PlanDifference, ReloadError> {
    Ok(plan_again(&state, text).await?.difference)
}

/// A plan that may replace the one that runs.
struct NextPlan {
    running: Arc<NodePlan>,
    new: NodePlan,
    difference: PlanDifference,
}

/// Plans the node by a text, or by its file.
async fn plan_again(state: &NodeState, text: Option<(PathBuf, String)>) -> Result<NextPlan, ReloadError> {
    let running = state.plan();
    blocking(move || {
        // A check may bring its own text. A reload always reads the node's file.
        let (file, text) = match (text, &running.source.file) {
            (Some(given), _) => given,
            (None, Some(file)) => (file.clone(), read_text(file).map_err(ReloadError::Config)?),
            (None, None) => return Err(ReloadError::NoFile),
        };
        let new = running.source.clone().plan_text(&file, &text, Some(&running))?;
        let difference = compare_plans(&running, &new);
        Ok(NextPlan { running, new, difference })
    })
    .await
}

/// Reads files and asks the machine on a thread where that may take its time.
async fn blocking<T: Send + 'static>(
    read: impl FnOnce() -> Result<T, ReloadError> + Send + 'static,
) -> Result<T, ReloadError> {
    tokio::task::spawn_blocking(read).await.unwrap_or_else(|error| {
        // Without a panic, the task ends early only with the runtime.
        Err(error.try_into_panic().map_or(ReloadError::Stopping, ReloadError::of_panic))
    })
}

async fn reload_file(state: &Arc<NodeState>) -> Result<PlanDifference, ReloadError> {
    let supervisor = state.running.supervisor.get().ok_or(ReloadError::Stopping)?;
    // Plan: what differs, and whether a running node can change it. Nothing has changed yet.
    let NextPlan { running, new, difference } = plan_again(state, None).await?;
    if difference.node_restarts().next().is_some() {
        return Err(ReloadError::NodeRestart(difference));
    }
    // Prepare: the new runnables create their directories next to the running ones. An error leaves the node as it is.
    let new = Arc::new(merge_plans(&running, new));
    let starting = [ChangeEffect::Add, ChangeEffect::Restart];
    let started: Vec<String> =
        starting.into_iter().flat_map(|effect| difference.dns_to(effect)).map(str::to_owned).collect();
    let prepared = prepare_again(state, &new, started).await?;
    // Commit: a parent that starts from now on adds the new children.
    let change = TreeChange::new(&running, &new, &difference);
    set_running(state, Arc::clone(&new), prepared);
    if state.running.supervisor.get().is_none() {
        // The handle was dropped, and has cleared the tree before this filled it: what is in the tree owns the tree, and
        // with it the lock of the data directory.
        state.tree.lock().clear();
        return Err(ReloadError::Stopping);
    }
    // Apply: change what runs on, stop what has changed or is gone, dependents first, then start what is new.
    let extensions = state.running.additions().extensions;
    for planned in difference.dns_to(ChangeEffect::Apply).filter_map(|dn| new.active_service(dn)) {
        call_part(part_of_dn(&planned.dn), "apply", || planned.runnable.apply(&extensions));
    }
    apply_change(state, &supervisor, &change).await?;
    Ok(difference)
}

/// Prepares the runnables with these DNs.
async fn prepare_again(
    state: &Arc<NodeState>,
    plan: &Arc<NodePlan>,
    dns: Vec<String>,
) -> Result<PreparedParts, ReloadError> {
    let (state, plan) = (Arc::clone(state), Arc::clone(plan));
    blocking(move || {
        let services = plan.active_services().filter(|planned| dns.contains(&planned.dn));
        prepare_services(&state.running, &plan, services).map_err(ReloadError::Prepare)
    })
    .await
}

/// Makes the plan the one that the node runs: each parent adds these children when it starts the next time.
fn set_running(state: &NodeState, plan: Arc<NodePlan>, prepared: PreparedParts) {
    let PreparedParts { runnables: prepared, additions } = prepared;
    let running = state.plan();
    let mut tree = state.tree.lock();
    for (dn, runnable) in tree.iter_mut() {
        // What is prepared again has its new dependencies; what is not gets them here.
        if let (Some(former), Some(new)) = (running.active_service(dn), plan.active_service(dn)) {
            runnable.replace_dependencies(&former.start_after, &new.start_after);
        }
    }
    // The runnables that the program added besides the plan stay.
    tree.retain(|(dn, _)| {
        let was_planned = running.active_service(dn).is_some();
        !was_planned || plan.active_service(dn).is_some() && prepared.iter().all(|(changed, _)| changed != dn)
    });
    tree.extend(prepared);
    let order = |dn: &str| plan.services.iter().position(|planned| planned.dn == dn);
    // The control API comes first. The program's runnables are not in the plan, and so sort before all that are.
    tree.sort_by_key(|(dn, _)| (dn != CONTROL_DN, order(dn)));
    // The log has the reason of a service already if it was skipped before.
    let is_new = |planned: &&PlannedService| running.skipped_services().all(|known| known.dn != planned.dn);
    log_skipped(&state.running.log_store, plan.skipped_services().filter(is_new));
    // These are set before the new runnables start, which use them from their first line on.
    state.log_sink.set_formats(plan.log_formats().collect());
    set_configured_levels(&state.running.log_store, &running.config.log.levels, &plan.config.log.levels);
    state.running.replace_additions(additions);
    state.replace_plan(plan);
}

/// The changes of a reload in the tree.
#[derive(Debug, PartialEq, Eq)]
struct TreeChange {
    /// The DNs that leave it, in waves; those that return are to be replaced.
    remove: Vec<Vec<(String, Removal)>>,
    /// The DNs that enter it, parents before what is below them.
    add: Vec<String>,
    /// The DNs that stay, and wait for others from their next start on, with the former ones.
    reorder: Vec<(String, Vec<String>)>,
}

impl TreeChange {
    fn new(running: &NodePlan, new: &NodePlan, difference: &PlanDifference) -> Self {
        let of = |effects: &[ChangeEffect]| -> BTreeSet<&str> {
            effects.iter().flat_map(|effect| difference.dns_to(*effect)).collect()
        };
        let waves = stop_waves(running, of(&[ChangeEffect::Restart, ChangeEffect::Remove]));
        // Parents that lose all children are removed after them, in a wave of their own.
        let (former, now) = (parent_dns(running), parent_dns(new));
        let parents: Vec<_> = former.iter().filter(|dn| !now.contains(dn)).cloned().collect();
        let removal = |dn: String| match new.active_service(&dn) {
            Some(_) => (dn, Removal::ForReplacement),
            None => (dn, Removal::ForGood),
        };
        let remove =
            waves.into_iter().chain([parents]).map(|wave| wave.into_iter().map(removal).collect()).collect();
        let (mut add, starting) = (now, of(&[ChangeEffect::Add, ChangeEffect::Restart]));
        add.retain(|dn| !former.contains(dn));
        for planned in new.active_services().filter(|planned| starting.contains(planned.dn.as_str())) {
            // A new parent adds its children by itself.
            if !add.iter().any(|parent| is_descendant(&planned.dn, parent)) {
                add.push(planned.dn.clone());
            }
        }
        let former = |dn: &str| running.active_service(dn).map(|former| former.start_after.clone());
        let reorder = difference.dns_to(ChangeEffect::Reorder);
        let reorder = reorder.map(|dn| (dn.to_owned(), former(dn).unwrap_or_default())).collect();
        Self { remove, add, reorder }
    }
}

/// The DNs of the parents between the root and what a plan runs.
fn parent_dns(plan: &NodePlan) -> Vec<String> {
    let mut parents = child_dns(plan.active_services().map(|planned| planned.dn.as_str()), "root");
    parents.retain(|dn| plan.active_service(dn).is_none());
    parents
}

/// Stops and starts what changes. A parent that does not run adds its children when it starts.
async fn apply_change(
    state: &NodeState,
    supervisor: &Supervisor,
    change: &TreeChange,
) -> Result<(), ReloadError> {
    for wave in &change.remove {
        // The runnables of a wave do not depend on each other and stop at the same time. The next wave waits for
        // all of them.
        for result in
            join_all(wave.iter().map(|(dn, removal)| supervisor.remove_runnable(dn, *removal))).await
        {
            ignore_absent(result)?;
        }
    }
    for dn in &change.add {
        // The tree is locked for this statement only: a parent that starts locks it to add its own children.
        let child = state.tree.child_spec(&state.tree.lock(), dn);
        let parent = dn.rsplit_once('.').map_or("root", |(parent, _)| parent);
        ignore_absent(supervisor.add_child(parent, child))?;
    }
    for (dn, former) in &change.reorder {
        let child = state.tree.child_spec(&state.tree.lock(), dn);
        let parent = dn.rsplit_once('.').map_or("root", |(parent, _)| parent);
        ignore_absent(supervisor.replace_child(parent, child))?;
        // One that has not started yet, since it waits for a former dependency, must not wait for it any longer.
        let waits = |status: &RunnableStatus| matches!(&status.waiting_for, WaitReason::Dependency(awaited) if former.iter().any(|dn| **dn == **awaited));
        if supervisor.snapshot().iter().any(|status| *status.dn == **dn && waits(status)) {
            ignore_absent(supervisor.restart_runnable(dn))?;
        }
    }
    Ok(())
}

/// Ignores a runnable that is not in the tree: its parent adds it or leaves it out by itself.
fn ignore_absent(result: Result<(), ControlError>) -> Result<(), ReloadError> {
    match result {
        Err(ControlError::ShuttingDown) => Err(ReloadError::Stopping),
        _ => Ok(()),
    }
}

/// The node runs, but not by its file.
fn refusal_condition(state: &NodeState, error: &ReloadError) -> Option<HealthCondition> {
    let plan = state.plan();
    // A node that stops has not refused the file.
    let file = plan.source.file.as_ref().filter(|_| !matches!(error, ReloadError::Stopping))?;
    let problem = format!("is not what the node runs: {}", error.describe());
    let mut condition = HealthCondition::warning(file.display().to_string(), problem);
    condition.part = NODE_PART.to_owned();
    Some(condition.hint("correct the file, then `nodectl reload`"))
}

fn log_result(state: &NodeState, result: &Result<PlanDifference, ReloadError>) {
    let dn = program_name().parse().expect("a valid name");
    let log = |level, text: String| state.running.log_store.append_message(&dn, LogMessage::new(level, text));
    match result {
        Ok(difference) if difference.changes.is_empty() => {
            log(Level::Info, "configuration reloaded: no changes".to_owned());
        }
        Ok(difference) => {
            for change in &difference.changes {
                log(Level::Info, format!("configuration reloaded: {change}"));
            }
        }
        Err(error) => {
            let why = error.describe();
            log(Level::Error, format!("configuration not reloaded, the former one stays: {why}"));
        }
    }
}
