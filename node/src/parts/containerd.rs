//! containerd with private root, state and socket, and the import of preseeded images.

pub(crate) mod config;
pub(crate) mod images;
mod preseed;
mod reserve;

use std::any::Any;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nodekeel_containerd_svc::{
    ConfigFragment, Containerd, ContainerdConfig as DaemonConfig, ContainerdSettings, DirectoryLayout,
    DiskReserve, Preseed,
};
use nodekeel_logtree::parse::LogFormat;
use tonic::Extensions;

use crate::config::{ConfigSection, ConfigViolation, ContainerdConfig, NodedConfig};
use crate::layout::PLACED_IN_MEMORY;
use crate::layout::{ContainerdLayout, ContainerdRunLayout};
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
    is_equal,
};

use self::config::check_containerd;
use self::images::ImageAccess;
use self::reserve::{ImageReserve, ReserveEnforcement, ReserveHealth};
use super::etcd::MIN_ETCD_BYTES;
use super::worker::is_worker;
use crate::program_name::program_name;

const DN: &str = "root.containerd";

/// The part of the node's containerd.
pub(super) struct ContainerdPart;

impl Part for ContainerdPart {
    fn name(&self) -> &str {
        "containerd"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        let tables = ["services.containerd.cri", "services.containerd.cri.runsc"];
        vec![ConfigSection::field("services.containerd").with_tables(tables)]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        check_containerd(&config.services.containerd)
    }

    /// The import of images is below containerd in the tree.
    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let containerd = &config.services.containerd;
        let disabled =
            (!containerd.enable).then_some("which is disabled; set services.containerd.enable = true");
        let entry = DependencyEntry::of_part(self, config).unavailable(disabled);
        // The import has a name of its own in `depends_on`: a service may need the images and not only the daemon.
        let preseed = preseed::dependency_entry(&entry, containerd);
        vec![entry, preseed]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let containerd = &planner.config().services.containerd;
        if !containerd.enable {
            return;
        }
        let hint = "Debian: apt-get install containerd";
        let (binary, mut skipped) = planner.find_program("containerd", containerd.binary.as_deref(), hint);
        if skipped.is_none() && !nix::unistd::geteuid().is_root() {
            let reason = format!(
                "needs root: run {} as root, or set services.containerd.enable = false",
                program_name()
            );
            skipped = planner.skip_or_report("containerd", reason);
        }
        let daemon_config = match read_daemon_config(containerd) {
            Ok(daemon_config) => daemon_config,
            Err(reason) => {
                skipped = skipped.or_else(|| planner.skip_or_report("containerd", reason));
                DaemonConfig::Settings(ContainerdSettings::default())
            }
        };
        for reason in containerd.preseed.iter().filter_map(|images| preseed::check_owner(images)) {
            skipped = skipped.or_else(|| planner.skip_or_report("containerd", reason));
        }
        if skipped.is_none() {
            let missing: Vec<_> =
                containerd.preseed.iter().filter_map(|images| preseed::find_missing(images)).collect();
            // They may be in one that is missing.
            let absent = match missing.is_empty() && !containerd.preseed.is_empty() {
                true => preseed::find_absent_files(&containerd.preseed, &containerd.required),
                false => Vec::new(),
            };
            let misplaced = containerd.preseed.iter().flat_map(|images| preseed::find_misplaced(images));
            missing.into_iter().chain(absent).chain(misplaced).for_each(|missing| planner.warn(missing));
        }
        let placed: ContainerdLayout = planner.volume().add_layout().expect(PLACED_IN_MEMORY);
        let run: ContainerdRunLayout = planner.root().run.add_layout().expect(PLACED_IN_MEMORY);
        let (data, run) = (placed.containerd.path().to_owned(), run.containerd.path().to_owned());
        let directories = match DirectoryLayout::new(data, run) {
            Ok(directories) => directories,
            // A skipped service needs no directories.
            Err(_) if skipped.is_some() => return,
            Err(error) => return planner.report(format!("{error}; use a shorter --data")),
        };
        // The limits of a volume that is not open yet are unknown: they are found when it opens.
        let reserve = if planner.is_volume_known() {
            let existing = directories.data_dir().ancestors().find(|path| path.is_dir());
            ReserveEnforcement::detect(existing.unwrap_or(Path::new("/")), disk_reserve(containerd))
        } else {
            ReserveEnforcement::Unknown
        };
        let plan = ContainerdPlan { binary, directories, config: containerd.clone(), daemon_config, reserve };
        let service = PlannedService::new(DN, plan).layout::<ContainerdLayout>();
        let service = service.run_layout::<ContainerdRunLayout>().log_format(DN, LogFormat::Logfmt);
        planner.add(service.skip(skipped));
    }
}

/// A containerd with private root, state and socket.
#[derive(Debug, Clone, PartialEq)]
struct ContainerdPlan {
    binary: PathBuf,
    /// The directories and the socket, as planned.
    directories: DirectoryLayout,
    config: ContainerdConfig,
    /// The configuration of the daemon.
    daemon_config: DaemonConfig,
    /// The mechanism that keeps the reserve of the disk free.
    reserve: ReserveEnforcement,
}

impl fmt::Display for ContainerdPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, API on {}, data in {}",
            self.binary.display(),
            self.directories.socket_path().display(),
            self.directories.data_dir().display()
        )?;
        let config = &self.config;
        let mut write_path = |what, path: Option<&PathBuf>| {
            path.map_or(Ok(()), |path| write!(f, ", {what} {}", path.display()))
        };
        write_path("configured by", config.config.as_ref())?;
        config.preseed.iter().try_for_each(|path| write_path("images from", Some(path)))?;
        match &config.cri {
            None => {}
            Some(cri) if cri.runsc.is_some() => f.write_str(", for a kubelet, with runc and runsc")?,
            Some(_) => f.write_str(", for a kubelet, with runc")?,
        }
        write!(f, "; {}", self.reserve)
    }
}

impl PlannedRunnable for ContainerdPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let run = node.create_run_layout::<ContainerdRunLayout>()?.containerd.path().to_owned();
        let (path, log_store) = (node.search_path().as_path_variable(), node.log_store().clone());
        // Created once, and shared by all incarnations: the control API and the health keep their references.
        let preseed = preseed::prepare_preseed(&self.config, node);
        let socket = self.directories.socket_path();
        let images = Arc::new(ImageAccess::new(
            socket,
            disk_reserve(&self.config),
            self.config.import_limits(),
            self.config.image_policy(),
            preseed.clone(),
        ));
        node.extensions().insert(Arc::clone(&images));
        let config = node.config();
        let has_etcd = (config.services.etcd.enable || config.cluster.is_some()) && !is_worker(config);
        // An etcd that has not started yet will allocate its space: the images must leave it free.
        let min_others = if has_etcd { MIN_ETCD_BYTES } else { 0 };
        let reserve = Arc::new(ImageReserve::new(Arc::clone(&images), min_others));
        node.health_sources().add("containerd.reserve", ReserveHealth(Arc::clone(&reserve)));
        let (plan, grace) = (self.clone(), node.config().node.grace);
        Ok(node.on_volume(move |volume| {
            let placed: ContainerdLayout = volume.create_layout()?;
            let directories = DirectoryLayout::new(placed.containerd.path(), &run)?;
            // Each start applies the reserve again: the disk may have grown since.
            reserve.apply(&directories.root_dir());
            images.set_root_dir(directories.root_dir());
            let containerd = Containerd::new(&plan.binary, directories, path.clone(), log_store.clone());
            Ok(plan.configure(containerd, grace, preseed.clone()))
        }))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        is_equal(self, new)
    }

    /// The import watches other directories without a restart of containerd, as long as there is one.
    fn is_applicable(&self, new: &dyn PlannedRunnable) -> bool {
        let Some(new) = (new as &dyn Any).downcast_ref::<Self>() else { return false };
        let with_preseed = |preseed: &[PathBuf]| {
            let config = ContainerdConfig { preseed: preseed.to_vec(), ..self.config.clone() };
            Self { config, ..self.clone() }
        };
        let has_import = [self, new].iter().all(|plan| !plan.config.preseed.is_empty());
        has_import && with_preseed(&new.config.preseed) == *new
    }

    fn apply(&self, extensions: &Extensions) {
        if let Some(images) = extensions.get::<Arc<ImageAccess>>() {
            images.set_directories(self.config.preseed.clone());
        }
    }
}

impl ContainerdPlan {
    fn configure(&self, mut containerd: Containerd, grace: Duration, preseed: Option<Preseed>) -> Containerd {
        containerd.extra_args = self.config.extra_args.iter().map(Into::into).collect();
        containerd.grace_period = grace;
        containerd.config = self.daemon_config.clone();
        containerd.disk_reserve = disk_reserve(&self.config);
        containerd.preseed = preseed;
        containerd
    }
}

/// The reserve that images leave free on the disk.
fn disk_reserve(config: &ContainerdConfig) -> DiskReserve {
    config.reserve.map_or_else(DiskReserve::default, |bytes| DiskReserve::from_bytes(bytes.0))
}

/// Reads the configuration of containerd: the operator's file unchanged, or noded's settings.
fn read_daemon_config(containerd: &ContainerdConfig) -> Result<DaemonConfig, String> {
    let invalid = |file: &Path, reason: String, key| {
        format!(
            "containerd's configuration {}: {reason}; correct it, or services.containerd.{key}",
            file.display()
        )
    };
    let read = |file: &Path, key| {
        let text = std::fs::read_to_string(file).map_err(|error| invalid(file, error.to_string(), key))?;
        let fragment = ConfigFragment::parse(file.display().to_string(), &text);
        Ok::<_, String>((text, fragment.map_err(|error| invalid(file, error.to_string(), key))?))
    };
    if let Some(file) = &containerd.config {
        // The file is only checked: containerd gets the operator's text unchanged.
        let (text, _) = read(file, "config")?;
        return Ok(DaemonConfig::Verbatim { text, runsc: false });
    }
    let fragments = containerd.fragments.iter().map(|file| Ok(read(file, "fragments")?.1));
    let (version, cri, fragments) = (None, containerd.cri.clone(), fragments.collect::<Result<_, String>>()?);
    Ok(DaemonConfig::Settings(ContainerdSettings { version, cri, fragments }))
}
