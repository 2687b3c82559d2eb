//! The data volume of the node.
//!
//! ```text
//!  location ──▶ inspect ──▶ decide ──▶ open or create ──▶ grow ──▶ record
//!  disk, GPT    no writes   pure       localstorage       XFS      esp/data-volume.record
//! ```

mod adoption;
pub(crate) mod config;
pub(crate) mod control;
mod decision;
mod device;
mod error;
mod esp;
mod faults;
mod gap;
mod health;
mod identity;
pub(crate) mod keys;
mod location;
mod opener;
mod peers;
mod presence;
mod reading;
mod record;
mod reencryption;
mod scrub;
mod scrub_report;
mod service;
pub(crate) mod tang;
mod tpm_seal;
pub(crate) mod unlock;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nodekeel_localstorage::Dir;
use nodekeel_localstorage::mount::{MountSpec, Mounter as _, OsMounter};
use nodekeel_localstorage::volume::{ColdStart, DataVolume, KeyPolicy};
use prometheus_client::registry::Registry;

use self::config::device::{DeviceConfig, EncryptionConfig, SealConfig};
use self::control::StorageControl;
use self::device::{DeviceOpener, VolumePrograms, describe_device};
use self::esp::mount_esp;
use self::faults::{FaultCollector, VolumeFaults};
use self::keys::{VolumeKeys, key_health};
use self::opener::VolumeOpener;
use self::peers::{PeerKeySource, peers_health};
use self::reencryption::VolumeReencryption;
use self::scrub::VolumeScrub;
use self::service::StorageService;
use self::tang::TangKeyStore;
use self::tpm_seal::find_signer_problem;
use self::unlock::{ClusterKeySource, VolumeUnlock};
use super::PartDeps;
use super::api::{Api, is_on as is_api_on};
use super::worker::is_worker;
use crate::config::{ConfigSection, ConfigViolation, NodedConfig};
use crate::device_faults::DeviceFaults;
use crate::dn::STORAGE as DN;
use crate::layout::PLACED_IN_MEMORY;
use crate::layout::{ESP_DIR, StorageLayout, StorageRunLayout, VOLUME_DIR};
use crate::part::PartPlanner;
use crate::part::{NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable};
use crate::program_name::{metric_prefix, program_name};

/// In memory: on the system's disk, the copy of a header could be found again after its slots were removed.
const HEADER_COPIES: MountSpec = MountSpec { options: &["mode=700"], ..MountSpec::RUN };

/// The part that opens the data volume.
pub(super) struct StoragePart {
    provided: Option<Arc<dyn DataVolume>>,
    cluster_keys: Option<Arc<dyn ClusterKeySource>>,
}

impl StoragePart {
    pub(super) fn new(deps: &PartDeps) -> Self {
        Self { provided: deps.volume.clone(), cluster_keys: deps.cluster_keys.clone() }
    }

    fn plan_source(&self, planner: &mut PartPlanner<'_>) -> VolumeSource {
        let config = planner.config();
        if let Some(volume) = &self.provided {
            return VolumeSource::Provided(Arc::clone(volume));
        }
        match config.storage.device_config() {
            Ok(Some(device)) => VolumeSource::Device(Box::new(plan_device(planner, device))),
            Ok(None) => VolumeSource::Directory(config.node.data.join(VOLUME_DIR)),
            // Only a configuration that was parsed for other parts gets here.
            Err(violation) => {
                planner.report(violation.to_string());
                VolumeSource::Directory(config.node.data.join(VOLUME_DIR))
            }
        }
    }
}

impl Part for StoragePart {
    fn name(&self) -> &str {
        "storage"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::field("storage")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        let Some(device) = config.storage.device_config()? else { return Ok(()) };
        if self.provided.is_some() {
            return Err(ConfigViolation::new(
                "storage.kind",
                "the program provides the data volume; remove this key",
            ));
        }
        let cold_start = device.encryption.and_then(|encryption| encryption.cold_start);
        match (cold_start, &self.cluster_keys) {
            // A worker has an API.
            (Some(ColdStart::Peers), None)
                if !is_worker(config) && (config.cluster.is_none() || !is_api_on(config)) =>
            {
                Err(ConfigViolation::new(
                    "storage.cold_start",
                    "\"peers\" requires [cluster] and [api], or [worker], by which the nodes of a cluster ask each other; add them, or choose \
                     \"operator\", \"tang\" or \"local\"",
                ))
            }
            _ => Ok(()),
        }
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let volume = self.plan_source(planner);
        let is_on_device = matches!(volume, VolumeSource::Device(_));
        let loss = match &volume {
            VolumeSource::Directory(path) => find_loss(planner, path),
            _ => None,
        };
        let cluster_keys = self.cluster_keys.clone();
        let plan = StoragePlan { volume, loss, cluster_keys };
        let service = PlannedService::new(DN, plan).node_layout::<StorageLayout>();
        planner.add(if is_on_device { service.run_layout::<StorageRunLayout>() } else { service });
    }
}

/// How the directory of the volume is not the node's volume: the node starts, and root.storage waits for it.
fn find_loss(planner: &PartPlanner<'_>, volume: &Path) -> Option<&'static str> {
    let placed: StorageLayout = planner.root().add_layout().expect(PLACED_IN_MEMORY);
    let data = &planner.config().node.data;
    let is_mounted = Dir::open(data).ok()?.is_mount_point(VOLUME_DIR).ok()?;
    if placed.mounted.path().exists() && !is_mounted {
        return Some("is not mounted");
    }
    identity::describe_loss(data, volume)
}

/// Finds the programs of a volume on a device, and looks at the device. A disk that does not open is reported by
/// root.storage: the node starts without it, to be asked why.
fn plan_device(planner: &mut PartPlanner<'_>, config: DeviceConfig) -> DevicePlan {
    if !nix::unistd::geteuid().is_root() {
        planner.report(format!(
            "storage: opening a disk needs root: run {} as root, or set storage.kind = \"directory\"",
            program_name()
        ));
    }
    let mut find = |program: &str, package: &str| match planner.search_path().find_program(Path::new(program))
    {
        Ok(path) => path,
        Err(not_found) => {
            planner.report(format!("storage: {not_found}; Debian: apt-get install {package}"));
            program.into()
        }
    };
    let mkfs = find("mkfs.xfs", "xfsprogs");
    let cryptsetup = match config.encryption {
        Some(_) => find("cryptsetup", "cryptsetup-bin"),
        None => PathBuf::new(),
    };
    if let Some(EncryptionConfig { seal: SealConfig::Tpm(tpm), .. }) = &config.encryption
        && let Some(problem) = find_signer_problem(tpm)
    {
        planner.warn(format!("{DN}: {problem}"));
    }
    let found = match planner.running_config() {
        // The running node has the device open, or reports why not.
        Some(_) => config.location.to_string(),
        None => describe_device(&config, &planner.config().node.data),
    };
    let node = planner.config().node.name.clone();
    DevicePlan { config, programs: VolumePrograms { mkfs, cryptsetup }, node, found }
}

/// The origin of the data volume.
#[derive(Debug, Clone)]
enum VolumeSource {
    /// This directory, or what is mounted on it.
    Directory(PathBuf),
    /// A disk or partition.
    Device(Box<DevicePlan>),
    /// The program.
    Provided(Arc<dyn DataVolume>),
}

/// A data volume on a disk or partition.
#[derive(Debug, Clone)]
struct DevicePlan {
    config: DeviceConfig,
    programs: VolumePrograms,
    node: String,
    /// The place and the contents of the device, for people.
    found: String,
}

impl fmt::Display for DevicePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.config.encryption {
            None => f.write_str("the data volume, not encrypted")?,
            Some(encryption) => {
                write!(f, "the data volume, {}", encryption.encryption)?;
                match (encryption.keys, encryption.cold_start) {
                    (KeyPolicy::Split, Some(ColdStart::Local)) => {
                        f.write_str(", opened by node and cluster, or by the node alone")?;
                    }
                    (KeyPolicy::Split, Some(ColdStart::Peers)) => {
                        f.write_str(
                            ", opened by node and cluster, whose other nodes give it, or by an operator when all were off",
                        )?;
                    }
                    (KeyPolicy::Split, Some(ColdStart::Tang)) => {
                        f.write_str(", opened by node and Tang server ")?;
                        let urls: Vec<_> =
                            encryption.tang.iter().map(|server| server.url.to_string()).collect();
                        f.write_str(&urls.join(" or "))?;
                    }
                    (KeyPolicy::Split, _) => {
                        f.write_str(", opened by node and cluster, or by an operator")?
                    }
                    _ => f.write_str(", opened by the node alone")?,
                }
                if let SealConfig::Tpm(tpm) = &encryption.seal {
                    f.write_str(" with its TPM")?;
                    if let Some(signer) = &tpm.signer {
                        write!(f, " and PCRs {} that a key has signed", signer.pcrs)?;
                    }
                }
            }
        }
        write!(f, ", {}", self.found)
    }
}

/// The data volume of the node.
#[derive(Debug)]
struct StoragePlan {
    volume: VolumeSource,
    /// How it is not the node's volume.
    loss: Option<&'static str>,
    cluster_keys: Option<Arc<dyn ClusterKeySource>>,
}

impl fmt::Display for StoragePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.volume {
            VolumeSource::Directory(path) => write!(f, "the data volume, directory {}", path.display())?,
            VolumeSource::Device(device) => device.fmt(f)?,
            VolumeSource::Provided(_) => f.write_str("the data volume that the program provides")?,
        }
        if let Some(loss) = self.loss {
            write!(
                f,
                ", which is lost: it {loss}; attach or mount the node's own, or, if its data are lost, type: {} reset",
                program_name()
            )?;
        }
        Ok(())
    }
}

impl PlannedRunnable for StoragePlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let unlock = Arc::<VolumeUnlock>::default();
        let StorageLayout { mounted, esp, .. } = node.create_node_layout::<StorageLayout>()?;
        let esp = || Ok::<_, PrepareError>(Arc::new(esp.open()?));
        let opener = match &self.volume {
            VolumeSource::Directory(path) => {
                VolumeOpener::Directory { path: path.clone(), mounted, esp: esp()? }
            }
            VolumeSource::Device(plan) => plan.prepare(node, &unlock)?,
            VolumeSource::Provided(volume) => {
                VolumeOpener::Provided { volume: Arc::clone(volume), mounted_at: Arc::default(), esp: esp()? }
            }
        };
        // Without its ESP, root.storage opens nothing.
        let faults = opener.esp().map(VolumeFaults::read_from).unwrap_or_default();
        let changes = node.health_sources().changes();
        let reencryption = VolumeReencryption::new(Arc::clone(&unlock), opener.clone(), changes);
        let source =
            health::health_source(Arc::clone(&unlock), opener.clone(), faults.clone(), reencryption.clone());
        node.health_sources().add("storage", source);
        let mut registry = Registry::with_prefix(metric_prefix());
        registry.register_collector(Box::new(FaultCollector(faults.clone())));
        node.metrics().add("storage", registry);
        let tang = self.tang_keys(&opener, &unlock);
        // The API is prepared before this part.
        let voters = node.extensions().get::<Arc<Api>>().filter(|api| api.worker_joined.is_some()).cloned();
        let keys = Arc::new(VolumeKeys::new(Arc::clone(&unlock), tang.clone(), voters));
        node.health_sources().add("storage.keys", key_health(Arc::clone(&keys)));
        // The cluster finds the keys, and the control API all of it.
        node.extensions().insert(Arc::clone(&keys));
        let (volume, supervisor) = (node.running().volume.clone(), node.running().supervisor.clone());
        let config = node.config().storage.clone();
        let grace = node.config().node.grace;
        let cluster_keys = tang.map(|tang| tang as _).or_else(|| self.asked_peers(node, &unlock));
        let service = StorageService {
            opener,
            cluster_keys,
            keys: Arc::clone(&keys),
            unlock: Arc::clone(&unlock),
            volume: volume.clone(),
            faults: faults.clone(),
            reencryption: reencryption.clone(),
            device_faults: node.extensions().get_or_insert_default::<DeviceFaults>().clone(),
            health: node.health_sources().changes(),
            grace,
        };
        let (opener, health) = (service.opener.clone(), service.health.clone());
        let scrub = VolumeScrub::new(opener.clone(), faults.clone(), health.clone());
        let control = StorageControl {
            keys,
            unlock,
            volume,
            supervisor,
            config,
            opener,
            faults,
            scrub,
            reencryption,
            health,
        };
        node.extensions().insert(Arc::new(control));
        Ok(PreparedRunnable::new(service))
    }
}

impl StoragePlan {
    /// The Tang servers that keep the cluster's key, if that is configured.
    fn tang_keys(&self, opener: &VolumeOpener, unlock: &Arc<VolumeUnlock>) -> Option<Arc<TangKeyStore>> {
        let VolumeSource::Device(plan) = &self.volume else { return None };
        let servers = plan.config.encryption.as_ref()?.tang.clone();
        let keys = || Arc::new(TangKeyStore::new(servers.clone(), opener.clone(), Arc::clone(unlock)));
        (!servers.is_empty()).then(keys)
    }

    /// The peers that are asked for the cluster's key, if that is configured: those of the program, or the other nodes by the API.
    fn asked_peers(
        &self,
        node: &mut NodePreparation<'_>,
        unlock: &Arc<VolumeUnlock>,
    ) -> Option<Arc<dyn ClusterKeySource>> {
        let VolumeSource::Device(plan) = &self.volume else { return None };
        if plan.config.encryption.as_ref()?.cold_start != Some(ColdStart::Peers) {
            return None;
        }
        if let Some(provided) = &self.cluster_keys {
            return Some(Arc::clone(provided));
        }
        let health = peers_health(Arc::clone(unlock), Arc::downgrade(node.running()));
        node.health_sources().add("storage.peers", health);
        // Prepared before this part.
        let api = node.extensions().get::<Arc<Api>>()?;
        Some(Arc::new(PeerKeySource { api: Arc::clone(api), unlock: Arc::clone(unlock) }))
    }
}

impl DevicePlan {
    /// Mounts the ESP, which the parts after this one use, too, and the directory for copies of headers. Both stay mounted.
    fn prepare(
        &self,
        node: &NodePreparation<'_>,
        unlock: &Arc<VolumeUnlock>,
    ) -> Result<VolumeOpener, PrepareError> {
        // Nothing is mounted through a link.
        let data = Dir::open(node.data().path().canonicalize()?)?;
        let runtime = node.create_run_layout::<StorageRunLayout>()?.storage.path().canonicalize()?;
        // The header of an encrypted volume is copied while cryptsetup reads it.
        if self.config.encryption.is_some() {
            OsMounter.mount(&HEADER_COPIES, None, &runtime)?;
        }
        // The node starts without its ESP: root.storage reports the error, and clients can read it.
        if let Err(error) = mount_esp(&data, &self.config) {
            return Ok(VolumeOpener::Device(Err(Arc::new(error))));
        }
        Ok(VolumeOpener::Device(Ok(Arc::new(DeviceOpener {
            config: self.config.clone(),
            programs: self.programs.clone(),
            node: self.node.clone(),
            esp: data.open_dir(ESP_DIR)?,
            data,
            runtime: Dir::open(runtime)?,
            unlock: Arc::clone(unlock),
            last: Mutex::default(),
            size_problem: Mutex::default(),
            read: Mutex::default(),
            former: Mutex::default(),
        }))))
    }
}
