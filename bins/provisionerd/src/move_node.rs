//! What a move does on a node: `provisionerd volumes send`, `receive` and `settle`, in the container of the daemon.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::PersistentVolume;
use nodekeel_fsquota::{Bytes, Inodes, QuotaLimits};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::{BindMounter, VolumeMounter as _};
use nodekeel_provisioner::{
    DirStore, DriverName, MoveHeader, NodeName, OrphanState, ProvisionerIdentity, StoreAction, StoreId,
    StoreIdentity, StoreName, StoredEntry, StoredId, StoredPlace, VolumeId, VolumeImporter, VolumeKind,
    format_chain, plan_orphan, plan_store, store_of_volume,
};
use tokio::runtime::Runtime;

use crate::config::{ConfigError, ConfigFlags, DaemonConfig};
use crate::inventory::{NodeInventory, open_stored};
use crate::{print_stdout, run, start_runtime, volumes};

/// The length of the hash that ends a stream.
const DIGEST_BYTES: usize = 32;

/// Whom the mover takes this process for: another node or driver does nothing.
#[derive(Debug, Args)]
struct Expectation {
    /// Node of the mover's choice
    #[arg(long, value_name = "NODE")]
    expect_node: Option<NodeName>,
    /// Driver of the volume
    #[arg(long, value_name = "NAME")]
    expect_driver: Option<DriverName>,
}

#[derive(Debug, Args)]
pub(crate) struct SendFlags {
    id: VolumeId,
    /// Store of the volume, if it has a name
    #[arg(long, value_name = "NAME")]
    store: Option<StoreName>,
    /// Write only the header
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    expected: Expectation,
    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Debug, Args)]
pub(crate) struct ReceiveFlags {
    id: VolumeId,
    /// UID of the move
    #[arg(long)]
    owner: String,
    /// Store of the volume, if it has a name
    #[arg(long, value_name = "NAME")]
    store: Option<StoreName>,
    /// Capacity of its PersistentVolume
    #[arg(long, value_name = "BYTES")]
    bytes: Bytes,
    /// Inodes of its VolumeAttributesClass
    #[arg(long, value_name = "COUNT")]
    inodes: Option<u64>,
    /// Check whether there is room
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    expected: Expectation,
    #[command(flatten)]
    config: ConfigFlags,
}

#[derive(Debug, Args)]
pub(crate) struct SettleFlags {
    id: VolumeId,
    #[command(flatten)]
    expected: Expectation,
    #[command(flatten)]
    config: ConfigFlags,
}

pub(crate) fn run_send(flags: SendFlags) -> Result<ExitCode> {
    let SendFlags { id, store, check, expected, config } = flags;
    let config = expected.load_config(config)?;
    let store = store_config(&config, store)?;
    check_other_stores(&config, &store, &id)?;
    let entry = list_volume(&store, &id)?;
    let entry = entry.with_context(|| format!("volume {id} is not in {}", store.store_label()))?;
    read_served(&start_runtime()?, &store)?;
    let kind = entry.kind.with_context(|| format!("can't read the kind of volume {id}"))?;
    ensure!(kind == VolumeKind::Directory, "can't send volume {id}: it is a {kind} volume, and no directory");
    check_unmounted(&config, &entry)?;
    let usage = entry.usage.filter(|usage| usage.limits.bytes.is_some()).with_context(|| {
        format!("volume {id} has no limit, or it can't be read: `provisionerd check` says why")
    })?;
    let header = MoveHeader::new(&usage).to_line();
    if check {
        return Ok(print_stdout(&header));
    }
    let mut stdout = io::stdout().lock();
    stdout.write_all(header.as_bytes()).context("can't write the volume")?;
    let dir = Dir::open(&entry.path).with_context(|| format!("can't open volume {id}"))?;
    let mut held = HeldTail { inner: stdout, tail: Vec::new() };
    dir.send_tree(&mut held).with_context(|| format!("can't send volume {id}"))?;
    // Before the hash: a tree that a pod may have changed is never complete.
    check_unmounted(&config, &entry)?;
    held.release().context("can't write the volume")?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_receive(flags: ReceiveFlags) -> Result<ExitCode> {
    let ReceiveFlags { id, owner, store, bytes, inodes, check, expected, config } = flags;
    let config = expected.load_config(config)?;
    let store = store_config(&config, store)?;
    let runtime = start_runtime()?;
    check_other_stores(&config, &store, &id)?;
    // Before it is changed: it may be the store of another node.
    let inventory = read_served(&runtime, &store)?;
    let importer = open_importer(&store)?.with_ceiling(store.capacity_policy()?);
    let mut stdin = io::stdin().lock();
    let header =
        MoveHeader::read(&mut stdin).context("can't read the volume: the other node did not send it")?;
    let promised = QuotaLimits { bytes: Some(bytes), inodes: inodes.map(Inodes) };
    let limits = header.limits(promised).map_err(|used| {
        anyhow::anyhow!(
            "volume {id} uses {} and {} inodes, more than its PersistentVolume promises, {bytes}: if it is being expanded, \
             wait; else remove files",
            used.bytes,
            used.inodes.0
        )
    })?;
    if check {
        let state = inventory.owners.as_ref().map(|owners| owners.orphan_state(&inventory.identity, &id));
        let is_elsewhere = matches!(state, Ok(OrphanState::OnOtherNode { .. }));
        ensure!(is_elsewhere, "volume {id} has no PersistentVolume on another node");
        importer.check_arrival(&id, &owner, limits)?;
    } else {
        importer.receive(&id, &owner, limits, &mut stdin, &|| {
            Ok(runtime.block_on(check_without_object(&store, &id))?)
        })?;
    }
    Ok(print_stdout(&format!("{}\n", importer.identity())))
}

/// Checks that a volume has no PersistentVolume, as during its move alone: one that was cancelled, or is complete, has it.
async fn check_without_object(config: &DaemonConfig, id: &VolumeId) -> Result<()> {
    let recovery = NodeInventory::recovery_of(config).await?;
    let owners = recovery.read_owners(&BTreeSet::from([id.clone()])).await?;
    match owners.volumes.contains_key(id.as_str()) {
        false => Ok(()),
        true => bail!("it has a PersistentVolume, so its move was cancelled, or is complete"),
    }
}

/// The end of a move in a store of a node.
#[derive(Debug, PartialEq, Eq)]
enum SettleAction {
    /// The volume is used here, and its move is over.
    Keep,
    /// It is used on another node.
    Discard,
    /// It is used in another store of this node: nothing is known of this one.
    Leave,
}

/// Decides what becomes of a volume in a store, by its PersistentVolume. `present` are the volumes in the store.
fn plan_settle(
    identity: &ProvisionerIdentity,
    store: &StoreId,
    present: &BTreeSet<VolumeId>,
    volumes: &BTreeMap<String, PersistentVolume>,
    id: &VolumeId,
) -> Result<SettleAction> {
    let Some(object) = volumes.get(id.as_str()) else {
        bail!(
            "volume {id} has no PersistentVolume, so it is not known which node has it: `provisionerd orphans`"
        )
    };
    let (_, named) = store_of_volume(object);
    let is_named = named.as_ref() == Some(store);
    match plan_orphan(identity, Some(object), None) {
        OrphanState::Owned if is_named || named.is_none() => Ok(SettleAction::Keep),
        OrphanState::Owned | OrphanState::InOtherStore { .. } => Ok(SettleAction::Leave),
        // The disk of that node, say, which is in this one: the data are the ones that are used there.
        _ if is_named => bail!(
            "the PersistentVolume of volume {id} is on another node, and in this very store {store}: move its disk back"
        ),
        _ => {
            let found = StoreIdentity::Present(store.clone());
            match plan_store(identity, &found, present, volumes.values()) {
                StoreAction::Reject(rejection) => {
                    bail!("can't remove volume {id} from a store that is not served: {rejection}")
                }
                _ => Ok(SettleAction::Discard),
            }
        }
    }
}

pub(crate) fn run_settle(flags: SettleFlags) -> Result<ExitCode> {
    let SettleFlags { id, expected, config } = flags;
    let config = expected.load_config(config)?;
    let node = config.node_name()?;
    // Locked before the PersistentVolume is read: until the end, no move makes the volume one of this node again.
    let (mut stores, mut failed) = (Vec::new(), None);
    for config in config.of_stores() {
        match open_importer(&config).and_then(|importer| Ok((importer, list_volumes(&config)?))) {
            Ok((importer, entries)) => stores.push((config, importer, entries)),
            // One that can't be read keeps no other from being settled.
            Err(error) => failed = Some(error),
        }
    }
    let owners = start_runtime()?.block_on(async {
        let recovery = NodeInventory::recovery_of(&config).await?;
        anyhow::Ok(recovery.read_owners(&BTreeSet::from([id.clone()])).await?)
    })?;
    let mut is_kept = false;
    for (config, importer, entries) in &stores {
        let Some(entry) = entries.iter().find(|entry| volume_id(entry).as_ref() == Some(&id)) else {
            continue;
        };
        let identity = config.provisioner_identity(node.clone());
        let present = entries.iter().filter_map(volume_id).collect();
        match plan_settle(&identity, importer.identity(), &present, &owners.volumes, &id)? {
            SettleAction::Keep => {
                importer.finish(&id)?;
                is_kept = true;
            }
            SettleAction::Discard => {
                check_unmounted(config, entry)?;
                importer.discard(&id)?;
            }
            SettleAction::Leave => {}
        }
    }
    let identity = config.provisioner_identity(node);
    // It may be in a store with a name.
    let is_here =
        matches!(owners.orphan_state(&identity, &id), OrphanState::Owned | OrphanState::InOtherStore { .. });
    match failed {
        _ if is_here && is_kept => Ok(ExitCode::SUCCESS),
        Some(error) => Err(error),
        None if is_here => bail!("volume {id} is missing on node {}", identity.node),
        None => Ok(ExitCode::SUCCESS),
    }
}

impl Expectation {
    fn load_config(&self, flags: ConfigFlags) -> Result<DaemonConfig> {
        let config = flags.load_config()?;
        let (node, driver) = (config.node_name()?, &config.driver);
        let is_node = self.expect_node.as_ref().is_none_or(|expected| *expected == node);
        let is_driver = self.expect_driver.as_ref().is_none_or(|expected| expected == driver);
        ensure!(
            is_node && is_driver,
            "this is driver {driver} on node {node}, and not the one of the move: set --driver, and --selector to the \
             labels of its pods"
        );
        Ok(config)
    }
}

fn store_config(config: &DaemonConfig, store: Option<StoreName>) -> Result<DaemonConfig> {
    Ok(match store {
        Some(name) => config.of_store(Some(&name)).ok_or(ConfigError::UnknownStore { name })?,
        None => config.clone(),
    })
}

/// Reads a store that provisionerd serves, by the volumes of this node and driver.
fn read_served(runtime: &Runtime, config: &DaemonConfig) -> Result<NodeInventory> {
    let inventory = runtime.block_on(NodeInventory::read(config))?;
    let owners = match &inventory.owners {
        Ok(owners) => owners,
        Err(error) => bail!("can't ask the API server: {}", format_chain(&**error)),
    };
    match inventory.store_action(owners) {
        StoreAction::Serve => Ok(inventory),
        StoreAction::Reject(rejection) => {
            bail!("{} is not a store of this node: {rejection}", config.store_label())
        }
        _ => bail!("{} has no store-id: start provisionerd once, or mount the disk", config.store_label()),
    }
}

/// Checks that no other store of the node has the volume: its name says which node has it, and not which store.
fn check_other_stores(config: &DaemonConfig, store: &DaemonConfig, id: &VolumeId) -> Result<()> {
    for other in config.of_stores().filter(|other| other.store != store.store) {
        // What can't be read is not served by this name.
        if let Ok(Some(entry)) = list_volume(&other, id) {
            bail!(
                "volume {id} is in another store of this node, {}: if it is not needed, and its PersistentVolume is on \
                 another node, run `provisionerd volumes settle {id}` here; else move it out of that directory",
                entry.path.display()
            );
        }
    }
    Ok(())
}

fn open_importer(config: &DaemonConfig) -> Result<VolumeImporter> {
    let (base, quota) = volumes::open_with_warnings(config)?;
    Ok(VolumeImporter::open(base, quota, run::kill_hook()?)?)
}

fn list_volume(config: &DaemonConfig, id: &VolumeId) -> Result<Option<StoredEntry>> {
    Ok(list_volumes(config)?.into_iter().find(|entry| volume_id(entry).as_ref() == Some(id)))
}

fn list_volumes(config: &DaemonConfig) -> Result<Vec<StoredEntry>> {
    let (base, quota) = volumes::open_for_reading(config)?;
    let mut stored = DirStore::list_stored(&base, &*quota)
        .with_context(|| format!("can't list the volumes in {}", config.directory.display()))?;
    stored.retain(|entry| entry.place == StoredPlace::Volume);
    Ok(stored)
}

fn volume_id(entry: &StoredEntry) -> Option<VolumeId> {
    match &entry.id {
        StoredId::Volume(id) => Some(id.clone()),
        StoredId::Snapshot(_) => None,
    }
}

fn check_unmounted(config: &DaemonConfig, entry: &StoredEntry) -> Result<()> {
    let id = entry.id.as_str();
    let volume = open_stored(entry).with_context(|| format!("can't open volume {id}"))?;
    let targets = BindMounter::new(&config.kubelet).list_targets(&volume);
    let targets = targets.with_context(|| format!("can't see where volume {id} is mounted"))?;
    match targets.first() {
        None => Ok(()),
        Some(target) => bail!("volume {id} is mounted at {target}: wait until its pod has ended"),
    }
}

/// Writes all but the hash at the end, without which a stream is not complete.
struct HeldTail<W> {
    inner: W,
    tail: Vec<u8>,
}

impl<W: Write> HeldTail<W> {
    fn release(mut self) -> io::Result<()> {
        self.inner.write_all(&self.tail)?;
        self.inner.flush()
    }
}

impl<W: Write> Write for HeldTail<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.tail.extend_from_slice(bytes);
        let ready = self.tail.len().saturating_sub(DIGEST_BYTES);
        self.inner.write_all(&self.tail[..ready])?;
        self.tail.drain(..ready);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;
    use nodekeel_provisioner::{ReclaimPolicy, VolumeSpec, build_persistent_volume};

    use super::*;

    #[test]
    fn the_hash_is_written_last_and_on_release_alone() {
        let mut written = Vec::new();
        let mut held = HeldTail { inner: &mut written, tail: Vec::new() };
        for part in [&[1; 10][..], &[2; 100], &[3; 1]] {
            held.write_all(part).expect("written");
        }
        assert_eq!(held.tail.len(), DIGEST_BYTES);
        assert_eq!(held.inner.len(), 111 - DIGEST_BYTES);
        held.release().expect("written");
        assert_eq!(written, [&[1; 10][..], &[2; 100], &[3; 1]].concat());
    }

    #[test]
    fn a_volume_is_kept_or_removed_by_the_store_that_its_persistent_volume_names() {
        use SettleAction::{Discard, Keep, Leave};
        let uid = |number: u32| format!("9f0e5d3c-1b2a-4c5d-8e6f-{number:012x}");
        let id = VolumeId::from_uid(&uid(1)).expect("a UUID");
        let fast = || Some(StoreName::try_new("fast").expect("a name"));
        let identity = |store| {
            DaemonConfig { store, ..DaemonConfig::default() }
                .provisioner_identity(NodeName::try_new("node-a").expect("a name"))
        };
        let owners = |node: &str, store: u32, name: Option<StoreName>| {
            let spec = VolumeSpec {
                id: id.clone(),
                capacity: Bytes(1),
                kind: VolumeKind::Directory,
                limits: QuotaLimits::default(),
                source: None,
                claim_ref: ObjectReference::default(),
                access_modes: Vec::new(),
                storage_class: String::new(),
                mount_options: Vec::new(),
                reclaim_policy: ReclaimPolicy::Delete,
                attributes_class: None,
            };
            let owner = ProvisionerIdentity {
                node: NodeName::try_new(node).expect("a name"),
                store: name,
                ..identity(None)
            };
            let object = build_persistent_volume(&owner, Some(&uid(store).parse().expect("a UUID")), &spec);
            BTreeMap::from([(id.to_string(), object)])
        };
        let plan = |store: u32, name, owners: &BTreeMap<String, PersistentVolume>| {
            let present = BTreeSet::from([id.clone()]);
            plan_settle(&identity(name), &uid(store).parse().expect("a UUID"), &present, owners, &id).ok()
        };
        for (name, store, of_store, owners, action) in [
            ("its store", 7, None, owners("node-a", 7, None), Some(Keep)),
            ("a named one", 7, fast(), owners("node-a", 7, fast()), Some(Keep)),
            ("another store of its node", 8, None, owners("node-a", 7, fast()), Some(Leave)),
            ("another disk by its name", 8, fast(), owners("node-a", 7, fast()), Some(Leave)),
            ("used on another node", 8, None, owners("node-b", 7, None), Some(Discard)),
            ("used on another node, in another store", 8, None, owners("node-b", 7, fast()), Some(Discard)),
            ("the disk of that node", 7, None, owners("node-b", 7, None), None),
            ("nobody's", 7, None, BTreeMap::new(), None),
        ] {
            assert_eq!(plan(store, of_store, &owners), action, "{name}");
        }
    }
}
