//! The volumes and snapshots of the node, as its directory, its mounts and the API server know them.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::SystemTime;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits, QuotaUsage};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::{BindMounter, VolumeMounter as _};
use nodekeel_provisioner::{
    DirStore, IMAGE_FILE, OpenVolume, OrphanState, ProvisionerIdentity, SnapshotId, SnapshotOwner,
    StoreAction, StoreId, StoreIdentity, StoredEntry, StoredId, StoredPlace, VolumeId, VolumeKind,
    VolumeOwners, VolumeRecovery, VolumeUsage, format_chain, plan_new_store, plan_store, required_volume,
};
use serde::{Deserialize, Serialize};

use crate::config::DaemonConfig;
use crate::disk_process::{DISK_TIMEOUT, DiskError, DiskFlags, DiskProcess, ReportingQuota, print_answer};
use crate::volumes::VolumesError;
use crate::{api_server, exit_code, run, volumes};

/// What the commands `volumes`, `orphans` and `store` read, from the directory and the API server.
pub(crate) struct NodeInventory {
    pub(crate) identity: ProvisionerIdentity,
    /// The identity of the store; `None` if it has none.
    pub(crate) store: Option<StoreId>,
    pub(crate) stored: BTreeMap<VolumeId, VolumeRow>,
    pub(crate) snapshots: BTreeMap<SnapshotId, VolumeRow>,
    /// What is neither a volume nor a snapshot, and takes space.
    leftovers: Vec<VolumeRow>,
    /// The PersistentVolumes and claims on the API server.
    pub(crate) owners: Result<VolumeOwners>,
    /// The contents on the API server that snapshots belong to; none if they could not be listed.
    snapshot_owners: Option<BTreeMap<SnapshotId, SnapshotOwner>>,
    /// The snapshots that should be in the directory.
    ready: BTreeSet<SnapshotId>,
    pub(crate) recovery: Option<VolumeRecovery>,
}

/// What a process reads in the directory of a store. The objects of the rows are unknown to it.
#[derive(Debug, Serialize, Deserialize)]
struct StoreContent {
    store: Option<String>,
    volumes: Vec<VolumeRow>,
    snapshots: Vec<VolumeRow>,
    leftovers: Vec<VolumeRow>,
}

/// The directory of a store can't be read.
#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub(crate) struct UnreadableStore {
    text: String,
    /// True if the directory may be readable once a disk is mounted there.
    pub(crate) may_be_absent: bool,
    pub(crate) exit_code: u8,
}

/// A volume, a snapshot or what is left of one, as the commands print it.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub(crate) struct VolumeRow {
    pub(crate) id: String,
    pub(crate) state: RowState,
    /// `directory`, `block`, `ext4` or `xfs`; `None` if it is unknown.
    pub(crate) kind: Option<String>,
    /// As `namespace/name`; of a snapshot, that of its VolumeSnapshot.
    pub(crate) claim: Option<String>,
    /// The phase of the PersistentVolume.
    pub(crate) phase: Option<String>,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) used_bytes: Option<u64>,
    pub(crate) limit_inodes: Option<u64>,
    pub(crate) used_inodes: Option<u64>,
    /// The targets below the kubelet's directory.
    pub(crate) mounts: Vec<String>,
    /// Seconds since an entry of its directory was created or removed.
    pub(crate) age_seconds: Option<u64>,
}

/// State of a volume and its PersistentVolume, or of a snapshot and its VolumeSnapshotContent.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RowState {
    /// They belong together.
    Ok,
    /// The volume is being provisioned.
    Provisioning,
    /// No object names it.
    Orphan,
    /// The object is of another node.
    OtherNode,
    /// The object is of another store of the node.
    OtherStore,
    /// The directory of the volume is missing.
    Missing,
    /// The API server could not be asked.
    Unknown,
    /// It is being made, or a killed creation has left it: the next start of provisionerd removes it.
    Incomplete,
    /// An import or a move is making it a volume, or has left it.
    Importing,
    /// It was removed, and is being erased.
    Erasing,
}

impl RowState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Provisioning => "provisioning",
            Self::Orphan => "orphan",
            Self::OtherNode => "other-node",
            Self::OtherStore => "other-store",
            Self::Missing => "missing",
            Self::Unknown => "unknown",
            Self::Incomplete => "incomplete",
            Self::Importing => "importing",
            Self::Erasing => "erasing",
        }
    }
}

impl NodeInventory {
    /// Reads the directory, which needs no lock, and asks the API server.
    pub(crate) async fn read(config: &DaemonConfig) -> Result<Self> {
        Self::complete(config, ask_store(config)).await
    }

    /// Asks the API server about what is read of a store.
    async fn complete(config: &DaemonConfig, asked: Result<DiskProcess, DiskError>) -> Result<Self> {
        let identity = config.provisioner_identity(config.node_name()?);
        let content = read_answer(asked)?;
        let store = content.store.map(|store| store.parse()).transpose().context("invalid answer")?;
        let volumes: BTreeMap<VolumeId, _> = by_id(content.volumes)?;
        let (snapshots, leftovers) = (by_id(content.snapshots)?, content.leftovers);
        let recovery = Self::recovery_of(config).await;
        let ids: BTreeSet<_> = volumes.keys().cloned().collect();
        let (recovery, known) = match recovery {
            Ok(recovery) => {
                let known = read_known(&recovery, &ids).await;
                (Some(recovery), known)
            }
            // Without the API server, the directory is shown all the same.
            Err(error) => (None, Err(error)),
        };
        let (owners, ready) = match known {
            Ok((owners, ready)) => (Ok(owners), ready),
            Err(error) => (Err(error), BTreeSet::new()),
        };
        let snapshot_owners = match &recovery {
            Some(recovery) if owners.is_ok() => recovery.list_snapshot_owners().await.ok(),
            _ => None,
        };
        Ok(Self {
            identity,
            store,
            stored: volumes,
            snapshots,
            leftovers,
            owners,
            snapshot_owners,
            ready,
            recovery,
        })
    }

    /// Reads all stores of the node. Those that can't be read are errors of their own.
    pub(crate) async fn read_all(config: &DaemonConfig) -> Vec<(DaemonConfig, Result<Self>)> {
        let mut all = Vec::new();
        // All at once: several that hang take no longer than one.
        let asked: Vec<_> = config.of_stores().map(|config| (ask_store(&config), config)).collect();
        for (asked, config) in asked {
            let mut read = Self::complete(&config, asked).await;
            if !config.stores.is_empty() {
                read = read.with_context(|| format!("can't read the store {}", config.store_label()));
            }
            all.push((config, read));
        }
        // A snapshot names no store: one that another store has is not missing in a new one.
        let snapshots = all.iter().filter_map(|(_, inventory)| inventory.as_ref().ok());
        let snapshots: BTreeSet<_> =
            snapshots.flat_map(|inventory| inventory.snapshots.keys().cloned()).collect();
        for inventory in all.iter_mut().filter_map(|(_, inventory)| inventory.as_mut().ok()) {
            let own = &inventory.snapshots;
            inventory.ready.retain(|id| own.contains_key(id) || !snapshots.contains(id));
        }
        all
    }

    /// Acts on the API server for the operator.
    pub(crate) async fn recovery_of(config: &DaemonConfig) -> Result<VolumeRecovery> {
        let identity = config.provisioner_identity(config.node_name()?);
        let client = api_server::api_client(config.kubeconfig.as_deref()).await?;
        Ok(VolumeRecovery::new(client, identity, run::kill_hook()?))
    }

    /// All volumes and snapshots: what is in the directory, and volumes that should be there.
    pub(crate) fn rows(&self, config: &DaemonConfig) -> Vec<VolumeRow> {
        let mut rows: Vec<_> = self.stored.iter().map(|(id, row)| self.stored_row(id, row)).collect();
        rows.extend(self.snapshots.iter().map(|(id, row)| self.snapshot_row(id, row)));
        rows.extend(self.leftovers.iter().cloned());
        // A PersistentVolume of this node whose volume is not in the directory is shown as missing.
        if let Ok(owners) = &self.owners {
            let missing = owners.volumes.values().filter_map(|object| {
                // One in a store that the node does not have is shown nowhere else.
                let identity = match config.unknown_store(object) {
                    Some(store) if config.store.is_none() => {
                        &ProvisionerIdentity { store: Some(store), ..self.identity.clone() }
                    }
                    _ => &self.identity,
                };
                let id = required_volume(identity, object)?;
                let is_stored = identity.store == self.identity.store && self.stored.contains_key(&id);
                (!is_stored).then(|| missing_row(&id, object))
            });
            rows.extend(missing);
        }
        rows.sort_by(|a, b| a.id.cmp(&b.id));
        rows
    }

    fn stored_row(&self, id: &VolumeId, row: &VolumeRow) -> VolumeRow {
        let owners = self.owners.as_ref().ok();
        let object = owners.and_then(|owners| owners.volumes.get(id.as_str()));
        let claim = owners.and_then(|owners| owners.claims.get(id));
        VolumeRow {
            state: owners.map_or(RowState::Unknown, |owners| self.row_state(owners, id)),
            claim: object.and_then(claim_of_volume).or_else(|| claim.map(claim_name)),
            phase: object.and_then(phase_of_volume),
            ..row.clone()
        }
    }

    fn snapshot_row(&self, id: &SnapshotId, row: &VolumeRow) -> VolumeRow {
        let owner = self.snapshot_owners.as_ref().and_then(|owners| owners.get(id));
        let claim = owner.map(|owner| owner.snapshot.clone());
        VolumeRow { state: self.snapshot_state(id), claim, ..row.clone() }
    }

    pub(crate) fn snapshot_state(&self, id: &SnapshotId) -> RowState {
        match self.snapshot_owners.as_ref().map(|owners| owners.get(id)) {
            None => RowState::Unknown,
            Some(None) => RowState::Orphan,
            Some(Some(SnapshotOwner { node: Some(node), .. })) if node != self.identity.node.as_str() => {
                RowState::OtherNode
            }
            Some(Some(owner)) if !owner.is_in_store(self.identity.store.as_ref()) => RowState::OtherStore,
            Some(Some(_)) => RowState::Ok,
        }
    }

    fn row_state(&self, owners: &VolumeOwners, id: &VolumeId) -> RowState {
        match owners.orphan_state(&self.identity, id) {
            OrphanState::Owned => RowState::Ok,
            OrphanState::Provisioning => RowState::Provisioning,
            OrphanState::OnOtherNode { .. } => RowState::OtherNode,
            OrphanState::InOtherStore { .. } => RowState::OtherStore,
            _ => RowState::Orphan,
        }
    }

    /// Returns whether something is left of a volume or a snapshot that was removed, or is not complete.
    pub(crate) fn is_left(&self, id: &StoredId) -> bool {
        self.leftovers.iter().any(|row| row.id == id.as_str())
    }

    /// Returns whether the store has this volume or snapshot, or what is left of it.
    pub(crate) fn has(&self, id: &StoredId) -> bool {
        let is_stored = match id {
            StoredId::Volume(id) => self.stored.contains_key(id),
            StoredId::Snapshot(id) => self.snapshots.contains_key(id),
        };
        is_stored || self.is_left(id)
    }

    /// Returns whether it is a copy of a snapshot that another store of this node has.
    pub(crate) fn has_copy(&self, id: &StoredId) -> bool {
        match id {
            StoredId::Snapshot(id) => {
                self.snapshots.contains_key(id) && self.snapshot_state(id) == RowState::OtherStore
            }
            StoredId::Volume(_) => false,
        }
    }

    /// Returns whether it is the snapshot that a VolumeSnapshotContent names in this store.
    pub(crate) fn has_original(&self, id: &StoredId) -> bool {
        match id {
            StoredId::Snapshot(id) => {
                self.snapshots.contains_key(id) && self.snapshot_state(id) == RowState::Ok
            }
            StoredId::Volume(_) => false,
        }
    }

    /// Decides if provisionerd serves the store.
    pub(crate) fn store_action(&self, owners: &VolumeOwners) -> StoreAction {
        let found = self.store.clone().map_or(StoreIdentity::Absent, StoreIdentity::Present);
        let present = self.stored.keys().cloned().collect();
        // The decision is that of `run`.
        match plan_store(&self.identity, &found, &present, owners.volumes.values()) {
            StoreAction::CreateIdentity => {
                let snapshots = self.snapshots.keys().cloned().collect();
                plan_new_store(&self.identity, &snapshots, &self.ready, owners.volumes.values())
            }
            action => action,
        }
    }

    /// The limits and the usage of a volume in the directory.
    pub(crate) fn usage(&self, id: &VolumeId) -> Option<VolumeUsage> {
        let row = self.stored.get(id)?;
        let limits = QuotaLimits { bytes: row.limit_bytes.map(Bytes), inodes: row.limit_inodes.map(Inodes) };
        let usage = QuotaUsage { bytes: Bytes(row.used_bytes?), inodes: Inodes(row.used_inodes?) };
        Some(VolumeUsage { limits, usage })
    }

    /// The kind of a volume in the directory.
    pub(crate) fn kind(&self, id: &VolumeId) -> Option<VolumeKind> {
        self.stored.get(id)?.kind.as_deref()?.parse().ok()
    }
}

/// Has the directory of a store read.
pub(crate) fn ask_store(config: &DaemonConfig) -> Result<DiskProcess, DiskError> {
    DiskProcess::start(config, "read-store", &[])
}

/// The identity of a store; `None` if it has none, or can't be read.
pub(crate) fn read_identity(asked: Result<DiskProcess, DiskError>) -> Option<StoreId> {
    read_answer(asked).ok()?.store?.parse().ok()
}

fn read_answer(asked: Result<DiskProcess, DiskError>) -> Result<StoreContent> {
    let content: Result<StoreContent, UnreadableStore> = asked?.answer(DISK_TIMEOUT)?;
    Ok(content?)
}

fn by_id<K: Ord + FromStr<Err: std::error::Error + Send + Sync + 'static>>(
    rows: Vec<VolumeRow>,
) -> Result<BTreeMap<K, VolumeRow>> {
    rows.into_iter().map(|row| Ok((row.id.parse().context("invalid answer")?, row))).collect()
}

/// Reads the directory of a store for the process that has started this one.
pub(crate) fn run_read_store(flags: DiskFlags) -> Result<ExitCode> {
    let content = StoreContent::read(&flags.into_config()).map_err(|error| UnreadableStore {
        text: format_chain(&*error),
        may_be_absent: error.downcast_ref().is_some_and(VolumesError::may_be_absent),
        exit_code: exit_code(&error),
    });
    print_answer(&content)
}

impl StoreContent {
    fn read(config: &DaemonConfig) -> Result<Self> {
        let (base, quota) = volumes::open_for_reading(config)?;
        let path = config.directory.display();
        let store =
            DirStore::read_identity(&base).with_context(|| format!("can't read the store in {path}"))?;
        let quota = ReportingQuota::new(quota);
        let stored = DirStore::list_stored(&base, &quota);
        let stored = stored.with_context(|| format!("can't list the volumes in {path}"))?;
        let mounter = BindMounter::new(&config.kubelet);
        let store = store.map(|store| store.to_string());
        let mut this = Self { store, volumes: Vec::new(), snapshots: Vec::new(), leftovers: Vec::new() };
        for entry in stored {
            match (entry.place, &entry.id) {
                (StoredPlace::Volume, StoredId::Volume(_)) => {
                    let mounts = list_mounts(&mounter, &entry);
                    quota.report_progress();
                    this.volumes.push(VolumeRow { mounts, ..entry_row(&entry) });
                }
                (StoredPlace::Snapshot, StoredId::Snapshot(_)) => this.snapshots.push(entry_row(&entry)),
                _ => this.leftovers.push(leftover_row(&entry)),
            }
        }
        Ok(this)
    }
}

/// The row of an entry whose objects are unknown.
fn entry_row(entry: &StoredEntry) -> VolumeRow {
    let usage = entry.usage.as_ref();
    let age = SystemTime::now().duration_since(entry.modified).ok();
    VolumeRow {
        id: entry.id.as_str().to_owned(),
        state: RowState::Unknown,
        kind: entry.kind.map(|kind| kind.to_string()),
        claim: None,
        phase: None,
        limit_bytes: usage.and_then(|usage| usage.limits.bytes).map(|bytes| bytes.0),
        used_bytes: usage.map(|usage| usage.usage.bytes.0),
        limit_inodes: usage.and_then(|usage| usage.limits.inodes).map(|inodes| inodes.0),
        used_inodes: usage.map(|usage| usage.usage.inodes.0),
        mounts: Vec::new(),
        age_seconds: age.map(|age| age.as_secs()),
    }
}

fn leftover_row(entry: &StoredEntry) -> VolumeRow {
    let state = match entry.place {
        StoredPlace::Trash => RowState::Erasing,
        StoredPlace::Import => RowState::Importing,
        _ => RowState::Incomplete,
    };
    VolumeRow { state, ..entry_row(entry) }
}

/// Reads the owners of volumes, and the ready snapshots of the node.
async fn read_known(
    recovery: &VolumeRecovery,
    ids: &BTreeSet<VolumeId>,
) -> Result<(VolumeOwners, BTreeSet<SnapshotId>)> {
    Ok((recovery.read_owners(ids).await?, recovery.list_ready_snapshots().await?))
}

fn missing_row(id: &VolumeId, object: &PersistentVolume) -> VolumeRow {
    VolumeRow {
        id: id.to_string(),
        state: RowState::Missing,
        kind: None,
        claim: claim_of_volume(object),
        phase: phase_of_volume(object),
        limit_bytes: None,
        used_bytes: None,
        limit_inodes: None,
        used_inodes: None,
        mounts: Vec::new(),
        age_seconds: None,
    }
}

/// The targets at which a volume is mounted; none if it or the directory of the kubelet can't be read.
fn list_mounts(mounter: &BindMounter, volume: &StoredEntry) -> Vec<String> {
    let targets = open_stored(volume).and_then(|volume| mounter.list_targets(&volume).ok());
    targets.unwrap_or_default().iter().map(ToString::to_string).collect()
}

/// Opens a volume for a look at its mounts.
pub(crate) fn open_stored(volume: &StoredEntry) -> Option<OpenVolume> {
    let dir = Dir::open(&volume.path).ok()?;
    match volume.kind? {
        VolumeKind::Directory => dir.as_fd().try_clone_to_owned().ok().map(OpenVolume::Directory),
        VolumeKind::Image(format) => {
            Some(OpenVolume::Image { file: dir.open_file(IMAGE_FILE).ok()?.into(), format })
        }
    }
}

fn phase_of_volume(object: &PersistentVolume) -> Option<String> {
    object.status.as_ref()?.phase.clone()
}

fn claim_of_volume(object: &PersistentVolume) -> Option<String> {
    let claim = object.spec.as_ref()?.claim_ref.as_ref()?;
    Some(format!("{}/{}", claim.namespace.as_deref()?, claim.name.as_deref()?))
}

fn claim_name(claim: &PersistentVolumeClaim) -> String {
    let meta = &claim.metadata;
    format!("{}/{}", meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}
