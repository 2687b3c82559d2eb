//! `provisionerd orphans`: volumes and snapshots that no object names.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use k8s_openapi::api::core::v1::PersistentVolume;
use kube::Api;
use kube::runtime::wait::{await_condition, conditions};
use nodekeel_provisioner::{
    DirStore, OrphanState, OrphanVolume, SnapshotId, SnapshotOwner, StoreAction, StoredId, VolumeId,
    adopted_snapshot, format_chain,
};
use serde_json::json;

use crate::config::{ConfigFlags, DaemonConfig};
use crate::inventory::{NodeInventory, RowState, VolumeRow};
use crate::volumes_cmd::format_table;
use crate::{api_server, print_stdout, run, start_runtime, volumes};

/// Maximum time until a running provisionerd has removed a volume.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);

/// Which orphans to act on, and how.
#[derive(Debug, Args)]
pub(crate) struct OrphansFlags {
    /// Create a PersistentVolume for each of these
    ///
    /// It is retained, and bound to the claim that the volume was created for; if that does not exist, it is available.
    /// For a snapshot, it prints a VolumeSnapshotContent and a VolumeSnapshot for `kubectl apply -f -`.
    #[arg(long, value_name = "ID", num_args = 0.., conflicts_with = "remove")]
    adopt: Option<Vec<StoredId>>,
    /// Remove each of these with all data
    ///
    /// A volume is removed by the provisionerd of the node, after it has checked again that no claim and no mount needs it;
    /// a snapshot at once, if no VolumeSnapshotContent names it.
    #[arg(long, value_name = "ID", num_args = 0..)]
    remove: Option<Vec<StoredId>>,
    /// Adopt or remove all of them
    #[arg(long)]
    all: bool,
    /// Storage class of adopted volumes without a claim
    #[arg(long, value_name = "NAME", requires = "adopt")]
    class: Option<String>,
    /// Namespace of the VolumeSnapshots of adopted snapshots
    #[arg(long, value_name = "NAME", requires = "adopt", default_value = "default")]
    namespace: String,
    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OrphanTask<'a> {
    List,
    Adopt { class: Option<&'a str>, namespace: &'a str },
    Remove,
}

pub(crate) fn run_orphans(flags: OrphansFlags) -> Result<ExitCode> {
    let (task, ids) = match (&flags.adopt, &flags.remove) {
        (Some(ids), _) => {
            (OrphanTask::Adopt { class: flags.class.as_deref(), namespace: &flags.namespace }, ids.clone())
        }
        (_, Some(ids)) => (OrphanTask::Remove, ids.clone()),
        (None, None) => (OrphanTask::List, Vec::new()),
    };
    let ids = match (task, flags.all, ids.is_empty()) {
        (OrphanTask::List, true, _) => bail!("--all needs --adopt or --remove"),
        (OrphanTask::List, false, _) | (_, true, true) => None,
        (_, false, false) => Some(ids),
        (_, true, false) => bail!("name volumes, or use --all, not both"),
        (_, false, true) => bail!("name the volumes, or use --all: `provisionerd orphans` lists them"),
    };
    let config = flags.config.load_config()?;
    start_runtime()?.block_on(act_on_orphans(&config, task, ids))
}

async fn act_on_orphans(
    config: &DaemonConfig,
    task: OrphanTask<'_>,
    ids: Option<Vec<StoredId>>,
) -> Result<ExitCode> {
    let (mut stores, mut failed, mut text) = (Vec::new(), Vec::new(), String::new());
    for (config, inventory) in NodeInventory::read_all(config).await {
        match inventory.and_then(with_owners) {
            Ok(inventory) => stores.push((config, inventory)),
            // A store that can't be read does not hide the others.
            Err(error) => failed.push(error),
        }
    }
    if task == OrphanTask::List && !stores.is_empty() {
        let mut rows: Vec<_> = stores.iter().flat_map(|(config, inventory)| inventory.rows(config)).collect();
        rows.retain(|row| match row.state {
            RowState::Orphan | RowState::OtherNode | RowState::OtherStore => true,
            RowState::Incomplete | RowState::Importing | RowState::Erasing => row.used_bytes != Some(0),
            _ => false,
        });
        text = if rows.is_empty() { "no orphans\n".to_owned() } else { format_table(&rows) + &advice(&rows) };
    } else {
        for (at, (config, inventory)) in stores.iter().enumerate() {
            let wanted: Vec<StoredId> = match &ids {
                None => list_orphans(inventory),
                // One that no store has is an error of the first.
                Some(ids) => {
                    let has = |id: &StoredId| stores.iter().position(|(_, store)| store.has(id));
                    let has_copy = |id: &StoredId| stores.iter().position(|(_, store)| store.has_copy(id));
                    let place = |id: &StoredId| has_copy(id).or_else(|| has(id)).unwrap_or(0);
                    ids.iter().filter(|id| place(id) == at).cloned().collect()
                }
            };
            let others = stores.iter().map(|(_, other)| other);
            // Of a copy, the original must be seen: it may be the only one that is left.
            let (wanted, unseen): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|id| {
                !inventory.has_copy(id) || others.clone().any(|other| other.has_original(id))
            });
            failed.extend(unseen.iter().map(|id| {
                anyhow!(
                    "can't act on the copy of {} in {}: the store that its VolumeSnapshotContent names does not have it; see \
                     `provisionerd volumes`",
                    id.as_str(),
                    config.directory.display()
                )
            }));
            if let Err(error) = act_in_store(config, inventory, task, wanted, &mut text, &mut failed).await {
                failed.push(error);
            }
        }
    }
    let printed = print_stdout(&text);
    match failed.len() {
        0 => Ok(printed),
        1 => Err(failed.remove(0)),
        _ => {
            let texts: Vec<_> = failed.iter().map(|error| format_chain(&**error)).collect();
            bail!("{}", texts.join("\nprovisionerd: "))
        }
    }
}

/// What to type for the states of these rows.
fn advice(rows: &[VolumeRow]) -> String {
    let of_state = [
        (
            RowState::Orphan,
            "`provisionerd orphans --adopt ID` keeps it, `provisionerd orphans --remove ID` removes it",
        ),
        (RowState::OtherNode, "`provisionerd volumes settle ID` removes the copy that a move has left here"),
        (
            RowState::OtherStore,
            "`provisionerd orphans --remove ID` removes the copy of a snapshot; compare that of a volume, and remove its \
             directory",
        ),
        (
            RowState::Importing,
            "repeat the import or the move, or `provisionerd volumes settle ID` removes what a move has left",
        ),
    ];
    let has = |state| rows.iter().any(|row| row.state == state);
    let lines = of_state.into_iter().filter(|(state, _)| has(*state));
    lines.map(|(state, text)| format!("{}: {text}\n", state.as_str())).collect()
}

/// An inventory whose owners are known.
fn with_owners(mut inventory: NodeInventory) -> Result<NodeInventory> {
    let owners = std::mem::replace(&mut inventory.owners, Err(anyhow!("not known")));
    let owners = owners.context("can't tell orphans from other volumes without the API server")?;
    inventory.owners = Ok(owners);
    Ok(inventory)
}

/// Acts on these orphans of a store. A failure does not keep the others from being handled.
async fn act_in_store(
    config: &DaemonConfig,
    inventory: &NodeInventory,
    task: OrphanTask<'_>,
    ids: Vec<StoredId>,
    text: &mut String,
    failed: &mut Vec<anyhow::Error>,
) -> Result<()> {
    let Ok(owners) = &inventory.owners else { return Ok(()) };
    if ids.is_empty() {
        return Ok(());
    }
    // The volumes may be those of another node, and would be served here.
    if let StoreAction::Reject(rejection) = inventory.store_action(owners) {
        bail!("can't act on the volumes in {}: {rejection}", config.directory.display());
    }
    for id in ids {
        let done = match &id {
            StoredId::Volume(id) => act_on_orphan(config, inventory, task, id).await,
            StoredId::Snapshot(id) => act_on_snapshot(config, inventory, task, id).await,
        };
        match done {
            Ok(done) => *text += &format!("{done}\n"),
            Err(error) => failed.push(error),
        }
    }
    Ok(())
}

/// The volumes and snapshots in the directory that no object names.
fn list_orphans(inventory: &NodeInventory) -> Vec<StoredId> {
    let Ok(owners) = &inventory.owners else { return Vec::new() };
    let is_orphan = |id: &VolumeId| {
        let state = owners.orphan_state(&inventory.identity, id);
        matches!(state, OrphanState::Claimed { .. } | OrphanState::Unclaimed)
    };
    let volumes = inventory.stored.keys().filter(|id| is_orphan(id)).cloned().map(StoredId::from);
    let is_orphan = |id: &SnapshotId| inventory.snapshot_state(id) == RowState::Orphan;
    volumes
        .chain(inventory.snapshots.keys().filter(|id| is_orphan(id)).cloned().map(StoredId::from))
        .collect()
}

async fn act_on_snapshot(
    config: &DaemonConfig,
    inventory: &NodeInventory,
    task: OrphanTask<'_>,
    id: &SnapshotId,
) -> Result<String> {
    let directory = config.directory.display();
    // One that a killed call has begun to remove is no snapshot any more, and is still to be erased.
    let entry = inventory.snapshots.get(id);
    if entry.is_none() && !inventory.is_left(&id.clone().into()) {
        bail!("can't find snapshot {id} in {directory}: `provisionerd orphans` lists the orphans");
    }
    let recovery = inventory.recovery.as_ref().context("can't act without the API server")?;
    // Again, since an earlier snapshot may have taken long to erase.
    let owners = recovery.list_snapshot_owners().await.with_context(|| {
        format!(
            "can't see whom snapshot {id} belongs to: if the API server has no snapshot API, install its CRDs"
        )
    })?;
    let is_copy = |owner: &SnapshotOwner| !owner.is_in_store(inventory.identity.store.as_ref());
    if let Some(owner) = owners.get(id)
        && !(task == OrphanTask::Remove && inventory.has_copy(&id.clone().into()) && is_copy(owner))
    {
        bail!(
            "can't adopt or remove snapshot {id}: VolumeSnapshotContent {} names it; delete that, if its data are not needed",
            owner.content
        );
    }
    match task {
        OrphanTask::Remove => {
            let (base, quota) = volumes::open_with_warnings(config)?;
            DirStore::remove_stored_snapshot(base, quota, id, run::kill_hook()?)?;
            Ok(format!("removed snapshot {id}"))
        }
        OrphanTask::Adopt { namespace, .. } => {
            let kind = entry.and_then(|row| row.kind.as_deref()?.parse().ok()).with_context(|| {
                format!("can't tell what snapshot {id} is: its mark in {directory}/kinds is invalid; write it again")
            })?;
            let objects = adopted_snapshot(&inventory.identity, id, kind, namespace);
            let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
            // A document of a YAML stream, so that the output can be applied whatever else it names.
            Ok(format!("---\n{}", serde_json::to_string_pretty(&list).context("can't format the objects")?))
        }
        OrphanTask::List => Ok(String::new()),
    }
}

async fn act_on_orphan(
    config: &DaemonConfig,
    inventory: &NodeInventory,
    task: OrphanTask<'_>,
    id: &VolumeId,
) -> Result<String> {
    let directory = config.directory.display();
    if !inventory.stored.contains_key(id) {
        bail!("can't find volume {id} in {directory}: `provisionerd orphans` lists the orphans");
    }
    let usage = inventory.usage(id).with_context(|| {
        format!("volume {id} has no limits: set some, `dirquota set {directory}/volumes/{id} --bytes …`")
    })?;
    let kind = inventory.kind(id).with_context(|| {
        format!("can't tell what volume {id} is: its mark in {directory}/kinds is invalid; write it again")
    })?;
    let store = inventory.store.clone().with_context(|| {
        format!("{directory} has no store-id: start provisionerd once, or mount the disk")
    })?;
    let recovery = inventory.recovery.as_ref().context("can't act without the API server")?;
    let orphan = OrphanVolume { store, id: id.clone(), kind, usage };
    match task {
        OrphanTask::Remove => {
            // The command only asks for it: the provisioner checks again whether the volume is needed.
            recovery.remove_volume(&orphan).await?;
            wait_removed(config, id).await?;
            Ok(format!("removed volume {id}"))
        }
        OrphanTask::Adopt { class, .. } => {
            recovery.adopt_volume(&orphan, class).await?;
            Ok(format!("# created PersistentVolume {id}"))
        }
        OrphanTask::List => Ok(String::new()),
    }
}

/// Waits until the provisioner has deleted the PersistentVolume, and with it the volume.
async fn wait_removed(config: &DaemonConfig, id: &VolumeId) -> Result<()> {
    let client = api_server::api_client(config.kubeconfig.as_deref()).await?;
    let volumes: Api<PersistentVolume> = Api::all(client);
    let Some(volume) = volumes.get_opt(id.as_str()).await.context("can't read the PersistentVolume")? else {
        return Ok(());
    };
    // An object of the same name that is created later has another UID.
    let uid = volume.metadata.uid.unwrap_or_default();
    let removed = await_condition(volumes, id.as_str(), conditions::is_deleted(&uid));
    match tokio::time::timeout(REMOVAL_TIMEOUT, removed).await {
        Ok(waited) => waited.map(drop).context("can't watch the PersistentVolume"),
        Err(_) => bail!(
            "volume {id} is not removed yet, and will be when it is not in use and provisionerd runs: `kubectl describe pv {id}`"
        ),
    }
}
