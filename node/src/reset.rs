//! Reset: the node gives up its enrolment, and a data volume that is lost. Nothing else is removed: no volume that is there, and
//! no key of one.
//!
//! ```text
//!  collect ──▶ plan ──▶ the operator agrees ──▶ perform ──▶ a new node
//!  no writes   pure     to exactly this         one step after the other, each can be repeated
//! ```
//!
//! A reset that was interrupted leaves a node that fails to enrol until it is reset again.

#![allow(clippy::result_large_err, reason = "tonic's services return its status")]

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nodekeel_cluster::enrolment::ClusterNode;
use nodekeel_localstorage::volume::{DataVolume, EncryptionStatus, KeyPolicy, SlotKind};
use nodekeel_localstorage::{Dir, Error as DirError};
use nodekeel_logtree::LogStore;
use nodekeel_supervisor::{ControlError, Supervisor};
use thiserror::Error;
use tokio::task::{JoinError, spawn_blocking};

use crate::config::NodedConfig;
use crate::control::stopping_status;
use crate::data::{DataDir, has_run};
use crate::error_chain::error_chain;
use crate::layout::{CLUSTER_DIR, ESP_DIR, MEMBERSHIP, RESTORE_FILE, VOLUMES_DIR};
use crate::parts::cluster::bootstrap_record;
use crate::parts::storage::control::{StorageControl, describe_state};
use crate::parts::storage::unlock::UnlockStatus;
use crate::parts::worker::DN as WORKER_DN;
use crate::plan::NodePlan;
use crate::preparation::{PreparedParts, StartError, prepare_services};
use crate::running::{AnswerConfig, RunningNode};
use crate::volume::{CloseOnDrop, has_running_descendant};
use crate::{dn, v1};

/// The start of the names of an enrolment's files in `esp/`: its ticket, and its step journal.
const ENROLMENT: &str = "enrolment.";

/// The reason why a node is not reset.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResetError {
    /// The data volume is there, but not open: what is to be removed from it can't be reached.
    #[error(
        "can't reset the node: its data volume is {state}: {detail}; open it first (nodectl storage status), or, if nothing \
         opens it any more, add --give-up-volume"
    )]
    VolumeNotOpen {
        /// The state of root.storage.
        state: String,
        /// The reason.
        detail: String,
    },
    /// The cluster has a half of the key of the data volume, and nothing else would open it.
    #[error(
        "can't reset the node: only its cluster opens its data volume with it; add a recovery passphrase first: nodectl \
         storage recovery, and nodectl storage recovery --confirm"
    )]
    KeyInCluster,
    /// The plan differs from what the operator has agreed to.
    #[error("the node has changed since the plan was shown: look at it again")]
    Changed,
    /// A file can't be read or removed.
    #[error("can't reset the node")]
    File(#[source] DirError),
    /// The keys of the data volume can't be read, or the record of a lost one can't be removed.
    #[error("can't reset the node")]
    Volume(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No node has run in this data directory.
    #[error("no node has run in {}: name its directory by --data or --config", path.display())]
    NoNode {
        /// The directory.
        path: PathBuf,
    },
    /// The node has no part for storage.
    #[error("can't reset the node: its program has no part \"storage\"")]
    NoStorage,
    /// The node can't be opened. The message has the hint.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The cluster can't be stopped or started.
    #[error("can't reset the node")]
    Control(#[source] ControlError),
    /// A step has panicked.
    #[error("can't reset the node")]
    Panicked(#[source] JoinError),
}

/// The choices of the operator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResetOptions {
    /// Whether the node may bootstrap a cluster again.
    pub bootstrap_again: bool,
    /// Whether the node gives up a data volume that is there and does not open, as if it were lost.
    pub give_up_volume: bool,
}

impl ResetOptions {
    /// These choices.
    pub fn new(bootstrap_again: bool, give_up_volume: bool) -> Self {
        Self { bootstrap_again, give_up_volume }
    }
}

/// What the machine has, as far as a reset is concerned.
#[derive(Debug, Clone)]
struct ResetFacts {
    data: PathBuf,
    /// The files in `esp/`, by name.
    esp: Vec<String>,
    /// Whether it is a worker that has joined a cluster.
    has_membership: bool,
    volume: VolumeFacts,
    /// The record that permits no other bootstrap; `None` if it does not exist.
    bootstrap_record: Option<PathBuf>,
}

/// The data volume, as far as a reset is concerned.
#[derive(Debug, Clone)]
enum VolumeFacts {
    /// The node has had none.
    Absent,
    /// The node's is not there. The volume of the next start, once this one is forgotten.
    Lost { next: String },
    /// It is there, and does not open. The volume of the next start, once this one is given up.
    Closed { state: String, detail: String, next: String },
    Open {
        path: PathBuf,
        has_cluster: bool,
        has_pod_volumes: bool,
        /// Without the cluster, nothing opens it.
        needs_cluster: bool,
    },
}

/// What a reset removes, in this order, and what it keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResetPlan {
    steps: Vec<ResetStep>,
    keeps: Vec<String>,
    notes: Vec<String>,
}

/// A step of a reset. Each can be repeated.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ResetStep {
    /// Removes the cluster's directory on the data volume.
    RemoveCluster { directory: PathBuf },
    /// Removes this file of the enrolment in `esp/`.
    RemoveEnrolment { esp: PathBuf, name: String },
    /// Removes what a worker keeps of its cluster.
    RemoveMembership { path: PathBuf },
    /// Removes the record that permits no other bootstrap.
    RemoveBootstrapRecord { path: PathBuf },
    /// Removes what the node knows of the volume that is lost.
    ForgetVolume { esp: PathBuf, next: String },
    /// Records that the operator gave up the volume that does not open: its disk can be erased then.
    GiveUpVolume { esp: PathBuf, next: String },
}

impl fmt::Display for ResetStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RemoveCluster { directory } => write!(
                f,
                "{}: the node's keys in its cluster, and its copy of the cluster's data",
                directory.display()
            ),
            Self::RemoveEnrolment { esp, name } => {
                let what = if name.ends_with(".pb") { "the ticket" } else { "the record of the enrolment" };
                write!(f, "{}: {what}", esp.join(name).display())
            }
            Self::RemoveMembership { path } => {
                write!(f, "{}: the node's place in its cluster", path.display())
            }
            Self::RemoveBootstrapRecord { path } => {
                write!(f, "{}: the record that permits no other bootstrap", path.display())
            }
            Self::ForgetVolume { esp, next } => write!(
                f,
                "the record of the lost data volume in {}; the volume of the next start: {next}",
                esp.display()
            ),
            Self::GiveUpVolume { esp, next } => write!(
                f,
                "the record of the data volume in {}; the volume of the next start: {next}",
                esp.display()
            ),
        }
    }
}

impl ResetPlan {
    /// Decides what goes and what stays.
    fn decide(facts: &ResetFacts, options: ResetOptions) -> Result<Self, ResetError> {
        let esp = facts.data.join(ESP_DIR);
        let (mut steps, mut keeps, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        // The cluster's data first, and the journal last: until it is gone, the next start is not that of a new node.
        if let VolumeFacts::Open { path, has_cluster, has_pod_volumes, needs_cluster } = &facts.volume {
            if *needs_cluster && (*has_cluster || facts.has_membership) {
                return Err(ResetError::KeyInCluster);
            }
            if *has_cluster {
                steps.push(ResetStep::RemoveCluster { directory: path.join(CLUSTER_DIR) });
            }
            keeps.push(format!("{}: the data volume, with everything else on it", path.display()));
            if *has_pod_volumes {
                notes.push(format!(
                    "volumes of pods stay in {}: a cluster that is left still has PersistentVolumes for them",
                    path.join(VOLUMES_DIR).display()
                ));
            }
        }
        let is_enrolment = |name: &&String| name.starts_with(ENROLMENT);
        let enrolment = facts.esp.iter().filter(is_enrolment).rev();
        steps.extend(
            enrolment.map(|name| ResetStep::RemoveEnrolment { esp: esp.clone(), name: name.clone() }),
        );
        if facts.has_membership {
            steps.push(ResetStep::RemoveMembership { path: facts.data.join(MEMBERSHIP) });
        }
        match &facts.bootstrap_record {
            Some(path) if options.bootstrap_again => {
                steps.push(ResetStep::RemoveBootstrapRecord { path: path.clone() });
            }
            Some(path) => keeps.push(format!(
                "{}: the node bootstraps no other cluster; to permit one, add --bootstrap",
                path.display()
            )),
            None => {}
        }
        match &facts.volume {
            VolumeFacts::Lost { next } => {
                steps.push(ResetStep::ForgetVolume { esp: esp.clone(), next: next.clone() });
            }
            VolumeFacts::Closed { next, .. } if options.give_up_volume => {
                steps.push(ResetStep::GiveUpVolume { esp: esp.clone(), next: next.clone() });
            }
            VolumeFacts::Closed { state, detail, .. } => {
                let (state, detail) = (state.clone(), detail.clone());
                return Err(ResetError::VolumeNotOpen { state, detail });
            }
            VolumeFacts::Absent | VolumeFacts::Open { .. } => {}
        }
        let is_key = |name: &&String| name.ends_with(".key") || name.ends_with(".tpm");
        keeps.extend(
            facts
                .esp
                .iter()
                .filter(is_key)
                .map(|name| format!("{}: a key of a volume", esp.join(name).display())),
        );
        let leaves_cluster = |step: &ResetStep| {
            matches!(
                step,
                ResetStep::RemoveCluster { .. }
                    | ResetStep::RemoveEnrolment { .. }
                    | ResetStep::RemoveMembership { .. }
            )
        };
        if steps.iter().any(leaves_cluster) {
            notes.push(
                "its membership stays in its cluster: remove it on another member, by nodectl cluster remove NODE; nodectl \
                 cluster members shows the names. A ticket by which it has not joined is revoked by nodectl cluster ticket revoke. A cluster of \
                 this node alone ends, with all its data"
                    .to_owned(),
            );
        }
        Ok(Self { steps, keeps, notes })
    }

    /// Returns whether there is nothing to reset.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// The lines that the operator agrees to.
    fn removes(&self) -> Vec<String> {
        self.steps.iter().map(ToString::to_string).collect()
    }

    /// The plan for people.
    pub fn to_wire(&self) -> v1::ResetResponse {
        v1::ResetResponse {
            removes: self.removes(),
            keeps: self.keeps.clone(),
            notes: self.notes.clone(),
            is_done: false,
        }
    }
}

/// Returns whether nothing opens the volume without the cluster's half of its key.
fn needs_cluster(status: &EncryptionStatus) -> bool {
    let lasting = status.slots.iter().filter(|slot| !slot.is_stale && !slot.is_unconfirmed);
    opens_by_cluster_alone(status.keys, lasting.filter_map(|slot| slot.name.map(|(kind, _)| kind)))
}

fn opens_by_cluster_alone(keys: KeyPolicy, mut slots: impl Iterator<Item = SlotKind>) -> bool {
    keys == KeyPolicy::Split && !slots.any(|kind| matches!(kind, SlotKind::Recovery | SlotKind::Local))
}

/// Plans the reset of a node that runs, or that is [open](OfflineReset).
pub(crate) async fn plan_reset(
    running: &RunningNode,
    options: ResetOptions,
) -> Result<ResetPlan, ResetError> {
    let storage = running.extension::<Arc<StorageControl>>().ok_or(ResetError::NoStorage)?;
    let volume = match storage.unlock_status() {
        UnlockStatus::Open { .. } => {
            let encryption = storage.encryption_status().await.map_err(ResetError::Volume)?;
            // The handle keeps the volume open while it is looked at.
            let handle = running.volume.handle_of_call();
            let Some(handle) = handle else {
                return Err(ResetError::VolumeNotOpen {
                    state: "closing".into(),
                    detail: "try again".into(),
                });
            };
            let exists = |name| handle.dir().exists(name).map_err(ResetError::File);
            VolumeFacts::Open {
                path: handle.path().to_owned(),
                has_cluster: exists(CLUSTER_DIR)?,
                has_pod_volumes: exists(VOLUMES_DIR)?,
                needs_cluster: encryption.as_ref().is_some_and(needs_cluster),
            }
        }
        UnlockStatus::Closed { is_lost: true, .. } => {
            let next = storage.describe_next_start(true).await.map_err(ResetError::Panicked)?;
            VolumeFacts::Lost { next }
        }
        UnlockStatus::Closed { error: None, .. } if running.supervisor.get().is_none() => VolumeFacts::Absent,
        UnlockStatus::Opening { .. } => {
            let (state, detail) = ("being opened".to_owned(), "try again".to_owned());
            return Err(ResetError::VolumeNotOpen { state, detail });
        }
        other => {
            let v1::StorageResponse { state, detail, .. } = describe_state(other);
            let next = storage.describe_next_start(false).await.map_err(ResetError::Panicked)?;
            VolumeFacts::Closed { state, detail, next }
        }
    };
    let (config, data) = (running.plan(), running.data().path().to_owned());
    let facts = ResetFacts {
        esp: list_esp(&data.join(ESP_DIR))?,
        has_membership: data.join(MEMBERSHIP).symlink_metadata().is_ok(),
        volume,
        bootstrap_record: find_bootstrap_record(&config.config, &data),
        data,
    };
    ResetPlan::decide(&facts, options)
}

fn list_esp(esp: &Path) -> Result<Vec<String>, ResetError> {
    let entries = Dir::open(esp).and_then(|esp| esp.list()).map_err(ResetError::File)?;
    Ok(entries.iter().filter_map(|entry| entry.name.as_os_str().to_str().map(str::to_owned)).collect())
}

fn find_bootstrap_record(config: &NodedConfig, data: &Path) -> Option<PathBuf> {
    let record = bootstrap_record(config.cluster.as_ref()?, data);
    record.symlink_metadata().is_ok().then_some(record)
}

/// Performs a plan: stops the cluster, removes, and starts the cluster as that of a new node.
pub(crate) async fn perform_reset(running: &Arc<RunningNode>, plan: &ResetPlan) -> Result<(), ResetError> {
    let tree = running.supervisor.with(Supervisor::snapshot);
    let runs = |dn: &&str| tree.iter().flatten().any(|status| *status.dn == **dn);
    let stopped: Vec<_> = [dn::CLUSTER, WORKER_DN].into_iter().filter(runs).collect();
    for dn in &stopped {
        stop_runnable(running, dn).await?;
    }
    let (node, steps) = (Arc::clone(running), plan.steps.clone());
    let performed = spawn_blocking(move || steps.iter().try_for_each(|step| perform_step(&node, step)));
    let performed = performed.await.map_err(ResetError::Panicked)?;
    // What an operator has requested of the former node, which may have got no further.
    if let Some(cluster) = running.extension::<ClusterNode>() {
        cluster.withdraw_request();
    }
    // Also after an error: the cluster reports then what is missing.
    let start = |dn: &str, start: fn(&Supervisor, &str) -> Result<(), ControlError>| {
        let started = running.supervisor.with(|supervisor| start(supervisor, dn));
        started.unwrap_or(Ok(())).map_err(ResetError::Control)
    };
    for dn in stopped {
        start(dn, |supervisor, dn| supervisor.start_runnable(dn))?;
    }
    performed?;
    let changes_volume =
        |step: &ResetStep| matches!(step, ResetStep::ForgetVolume { .. } | ResetStep::GiveUpVolume { .. });
    if plan.steps.iter().any(changes_volume) && tree.is_some() {
        start(dn::STORAGE, |supervisor, dn| supervisor.restart_runnable(dn))?;
    }
    Ok(())
}

/// Stops the cluster or the worker, and waits until it has stopped, with its member.
async fn stop_runnable(running: &RunningNode, dn: &str) -> Result<(), ResetError> {
    let stopped = running.supervisor.with(|supervisor| supervisor.stop_runnable(dn));
    stopped.unwrap_or(Ok(())).map_err(ResetError::Control)?;
    let dns = [dn.to_owned()].into();
    let watch = |supervisor: &Supervisor| (supervisor.watch_changes(), supervisor.snapshot());
    while let Some((mut changes, tree)) = running.supervisor.with(watch) {
        if !has_running_descendant(&tree, &dns) || changes.changed().await.is_err() {
            break;
        }
    }
    Ok(())
}

fn perform_step(running: &RunningNode, step: &ResetStep) -> Result<(), ResetError> {
    let remove = |path: &Path| {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
        Dir::open(parent).and_then(|dir| dir.remove_file(name)).map(drop).map_err(ResetError::File)
    };
    match step {
        ResetStep::RemoveCluster { .. } => {
            let volume = running.volume.handle_of_call().ok_or(ResetError::Changed)?;
            volume.dir().remove_file(RESTORE_FILE).map_err(ResetError::File)?;
            volume.dir().remove_tree(CLUSTER_DIR).map(drop).map_err(ResetError::File)
        }
        ResetStep::RemoveEnrolment { esp, name } => remove(&esp.join(name)),
        ResetStep::RemoveMembership { path } | ResetStep::RemoveBootstrapRecord { path } => remove(path),
        ResetStep::ForgetVolume { .. } => {
            let storage = running.extension::<Arc<StorageControl>>().ok_or(ResetError::NoStorage)?;
            storage.forget_volume().map_err(ResetError::Volume)
        }
        ResetStep::GiveUpVolume { .. } => {
            let storage = running.extension::<Arc<StorageControl>>().ok_or(ResetError::NoStorage)?;
            storage.give_up_volume().map_err(ResetError::Volume)
        }
    }
}

/// Answers the call of the control API: the plan, and its performance if the client has agreed to exactly this plan.
pub(crate) async fn answer_reset(
    running: &Arc<RunningNode>,
    request: v1::ResetRequest,
) -> Result<v1::ResetResponse, tonic::Status> {
    let refused = |error: ResetError| tonic::Status::failed_precondition(error_chain(&error));
    let options = ResetOptions::new(request.bootstrap_again, request.give_up_volume);
    let plan = plan_reset(running, options).await.map_err(refused)?;
    if request.agreed.is_empty() {
        return Ok(plan.to_wire());
    }
    if request.agreed != plan.removes() {
        return Err(refused(ResetError::Changed));
    }
    // A client that disconnects does not end it.
    let (node, performed) = (Arc::clone(running), plan.clone());
    let performed = tokio::spawn(async move { perform_reset(&node, &performed).await }).await;
    performed.unwrap_or_else(|error| Err(ResetError::Panicked(error))).map_err(refused)?;
    Ok(v1::ResetResponse { is_done: true, ..plan.to_wire() })
}

/// A node that does not run, opened to reset it: its data directory is locked, and its data volume open, if it has one.
#[derive(Debug)]
pub struct OfflineReset {
    running: Arc<RunningNode>,
    volume: Option<Arc<dyn DataVolume>>,
}

impl OfflineReset {
    /// Opens the node. Creates no volume. It blocks.
    ///
    /// # Errors
    /// See [`ResetError`].
    pub fn open(plan: NodePlan, log_store: LogStore) -> Result<Self, ResetError> {
        if !has_run(&plan.config.node.data) {
            return Err(ResetError::NoNode { path: plan.config.node.data });
        }
        let running = open_storage(&plan, log_store)?;
        let storage = running.extension::<Arc<StorageControl>>().ok_or(ResetError::NoStorage)?;
        Ok(Self { volume: storage.open_offline(), running })
    }

    /// Plans the reset.
    ///
    /// # Errors
    /// See [`ResetError`].
    pub async fn plan(&self, options: ResetOptions) -> Result<ResetPlan, ResetError> {
        plan_reset(&self.running, options).await
    }

    /// Performs a plan.
    ///
    /// # Errors
    /// See [`ResetError`]; a second try completes it.
    pub async fn perform(&self, plan: &ResetPlan) -> Result<(), ResetError> {
        perform_reset(&self.running, plan).await
    }
}

/// Opens the data directory of a node that does not run, and prepares its part for storage alone: nothing runs.
fn open_storage(plan: &NodePlan, log_store: LogStore) -> Result<Arc<RunningNode>, StartError> {
    let data = Arc::new(DataDir::acquire(&plan.config.node.data)?);
    // No client reaches it.
    let answer: AnswerConfig = Box::new(|_| Box::pin(async { Err(stopping_status()) }));
    let running = Arc::new(RunningNode::new(plan.to_running(), data, log_store, answer));
    let storage = plan.active_services().filter(|planned| planned.dn == dn::STORAGE);
    let PreparedParts { additions, .. } = prepare_services(&running, plan, storage)?;
    running.replace_additions(additions);
    Ok(running)
}

impl Drop for OfflineReset {
    fn drop(&mut self) {
        drop(CloseOnDrop(self.running.volume.clone()));
        // What something still uses stays mounted: the next start uses it as it is.
        if let Some(Err(error)) = self.volume.take().map(|volume| volume.unmount()) {
            tracing::warn!("the data volume stays open: {}", error_chain(&error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(volume: VolumeFacts) -> ResetFacts {
        let esp = ["0a1b.1.key", "data-volume.id", "enrolment.0", "enrolment.1", "enrolment.pb"];
        ResetFacts {
            data: "/d".into(),
            esp: esp.map(str::to_owned).into(),
            has_membership: false,
            volume,
            bootstrap_record: Some("/d.bootstrapped".into()),
        }
    }

    fn open(needs_cluster: bool) -> VolumeFacts {
        VolumeFacts::Open { path: "/d/data".into(), has_cluster: true, has_pod_volumes: true, needs_cluster }
    }

    /// The first words of each line: what it names.
    fn names(lines: &[String]) -> Vec<&str> {
        lines.iter().map(|line| line.split(": ").next().unwrap_or_default()).collect()
    }

    #[test]
    fn a_reset_removes_the_enrolment_and_no_key_of_a_volume() {
        let plan = ResetPlan::decide(&facts(open(false)), ResetOptions::default()).expect("possible");
        let enrolment =
            ["/d/data/cluster", "/d/esp/enrolment.pb", "/d/esp/enrolment.1", "/d/esp/enrolment.0"];
        assert_eq!(names(&plan.removes()), enrolment);
        assert_eq!(names(&plan.keeps), ["/d/data", "/d.bootstrapped", "/d/esp/0a1b.1.key"]);
        let notes = plan.notes.concat();
        assert!(notes.contains("nodectl cluster remove") && notes.contains("/d/data/volumes"), "{notes}");
        let again = ResetPlan::decide(&facts(open(false)), ResetOptions::new(true, false)).expect("possible");
        assert_eq!(names(&again.removes()), [&enrolment[..], &["/d.bootstrapped"]].concat());
    }

    #[test]
    fn a_lost_volume_is_given_up_and_its_key_is_not() {
        let plan =
            ResetPlan::decide(&facts(VolumeFacts::Lost { next: "/d/data".into() }), ResetOptions::default())
                .expect("possible");
        assert!(matches!(plan.steps.last(), Some(ResetStep::ForgetVolume { .. })), "{plan:?}");
        assert!(plan.keeps.iter().any(|kept| kept.starts_with("/d/esp/0a1b.1.key")), "{plan:?}");
        assert!(plan.steps.iter().all(|step| !step.to_string().contains(".key")), "{plan:?}");
    }

    #[test]
    fn a_volume_that_is_there_is_given_up_only_if_that_is_asked_for() {
        let closed = || VolumeFacts::Closed {
            state: "locked".into(),
            detail: "no key".into(),
            next: "/d/data".into(),
        };
        let refused = ResetPlan::decide(&facts(closed()), ResetOptions::default());
        assert!(matches!(refused, Err(ResetError::VolumeNotOpen { .. })), "{refused:?}");
        let plan = ResetPlan::decide(&facts(closed()), ResetOptions::new(false, true)).expect("asked for");
        assert!(matches!(plan.steps.last(), Some(ResetStep::GiveUpVolume { .. })), "{plan:?}");
    }

    #[test]
    fn a_node_without_an_enrolment_has_nothing_to_reset() {
        for volume in [VolumeFacts::Absent, open(false)] {
            let mut facts = facts(volume);
            facts.esp.retain(|name| !name.starts_with(ENROLMENT));
            if let VolumeFacts::Open { has_cluster, .. } = &mut facts.volume {
                *has_cluster = false;
            }
            let plan = ResetPlan::decide(&facts, ResetOptions::default()).expect("possible");
            assert!(plan.is_empty(), "{plan:?}");
        }
    }

    #[test]
    fn a_worker_that_is_reset_forgets_its_cluster() {
        let worker = |needs_cluster| {
            let VolumeFacts::Open { path, has_pod_volumes, .. } = open(false) else { panic!("open") };
            let volume = VolumeFacts::Open { path, has_cluster: false, has_pod_volumes, needs_cluster };
            let facts = ResetFacts { esp: Vec::new(), has_membership: true, ..facts(volume) };
            ResetPlan::decide(&facts, ResetOptions::default())
        };
        let plan = worker(false).expect("possible");
        assert_eq!(names(&plan.removes()), ["/d/api/membership"]);
        assert!(plan.notes.concat().contains("nodectl cluster remove"), "{plan:?}");
        assert!(matches!(worker(true), Err(ResetError::KeyInCluster)), "its cluster has half of the key");
    }

    #[test]
    fn a_volume_that_only_the_cluster_opens_keeps_the_node_from_its_reset() {
        let plan = ResetPlan::decide(&facts(open(true)), ResetOptions::default());
        assert!(matches!(plan, Err(ResetError::KeyInCluster)), "{plan:?}");
        for (keys, slots, is_needed) in [
            (KeyPolicy::Split, &[SlotKind::Split][..], true),
            (KeyPolicy::Split, &[SlotKind::Split, SlotKind::Recovery], false),
            (KeyPolicy::Split, &[SlotKind::Local], false),
            (KeyPolicy::Local, &[SlotKind::Local], false),
        ] {
            assert_eq!(opens_by_cluster_alone(keys, slots.iter().copied()), is_needed, "{keys:?} {slots:?}");
        }
    }
}
