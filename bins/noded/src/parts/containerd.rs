//! containerd with private root, state and socket, and the import of preseeded images.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nodekeel_containerd_svc::{
    Containerd, ContainerdConfig as DaemonConfig, ContainerdSettings, DirectoryLayout, DiskReserve, Preseed,
    daemon_version,
};
use nodekeel_logtree::parse::LogFormat;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::config::{ConfigSection, ConfigViolation, ContainerdConfig, NodedConfig, check_containerd};
use crate::health::{HealthProbe, NodeSnapshot};
use crate::layout::{ContainerdLayout, ContainerdRunLayout};
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
    is_equal,
};
use crate::plan::{PLACED_IN_MEMORY, PartPlanner};

const DN: &str = "root.containerd";

/// The DN of the import.
const PRESEED_DN: &str = "root.containerd.preseed";

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
        let no_images =
            containerd.preseed.is_none().then_some("which is disabled; set services.containerd.preseed");
        let entry = DependencyEntry::of_part(self, config);
        let preseed = entry.child("preseed").unavailable(disabled.or(no_images));
        vec![entry.unavailable(disabled), preseed]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let containerd = &planner.config().services.containerd;
        if !containerd.enable {
            return;
        }
        let hint = "Debian: apt-get install containerd";
        let (binary, mut skipped) = planner.find_program("containerd", containerd.binary.as_deref(), hint);
        if skipped.is_none() && !nix::unistd::geteuid().is_root() {
            let reason = "needs root: run noded as root, or set services.containerd.enable = false";
            skipped = planner.skip_or_report("containerd", reason);
        }
        let daemon_config = match read_daemon_config(containerd) {
            Ok(daemon_config) => daemon_config,
            Err(reason) => {
                skipped = skipped.or_else(|| planner.skip_or_report("containerd", reason));
                DaemonConfig::Settings(ContainerdSettings::default())
            }
        };
        let placed: ContainerdLayout = planner.volume().add_layout().expect(PLACED_IN_MEMORY);
        let run: ContainerdRunLayout = planner.root().run.add_layout().expect(PLACED_IN_MEMORY);
        let (data, run) = (placed.containerd.path().to_owned(), run.containerd.path().to_owned());
        let directories = match DirectoryLayout::new(data, run) {
            Ok(directories) => directories,
            // A skipped service needs no directories.
            Err(_) if skipped.is_some() => return,
            Err(error) => return planner.report(format!("{error}; use a shorter --data")),
        };
        let plan = ContainerdPlan { binary, directories, config: containerd.clone(), daemon_config };
        let service = PlannedService::new(DN, plan).layout::<ContainerdLayout>();
        let service = service.run_layout::<ContainerdRunLayout>().log_format(DN, LogFormat::Logfmt);
        planner.add(service.skip(skipped));
    }
}

/// A containerd with private root, state and socket.
#[derive(Debug, Clone, PartialEq)]
struct ContainerdPlan {
    binary: PathBuf,
    /// Its directories and its socket, as planned.
    directories: DirectoryLayout,
    config: ContainerdConfig,
    /// The configuration of the daemon.
    daemon_config: DaemonConfig,
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
        write_path("images from", config.preseed.as_ref())?;
        match &config.cri {
            None => Ok(()),
            Some(cri) if cri.runsc.is_some() => f.write_str(", for a kubelet, with runc and runsc"),
            Some(_) => f.write_str(", for a kubelet, with runc"),
        }
    }
}

impl PlannedRunnable for ContainerdPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let run = node.create_run_layout::<ContainerdRunLayout>()?.containerd.path().to_owned();
        let (path, log_store) = (node.search_path().as_path_variable(), node.log_store().clone());
        let images = Arc::new(ImageAccess {
            socket: self.directories.socket_path(),
            root: Mutex::default(),
            reserve: disk_reserve(&self.config),
        });
        node.extensions().insert(Arc::clone(&images));
        let socket = self.directories.socket_path();
        let probe = move || {
            let socket = socket.clone();
            async move { Ok(daemon_version(&socket).await.map(drop)?) }
        };
        node.health_sources().add("containerd", HealthProbe::new(DN, probe));
        let preseed = self
            .config
            .preseed
            .as_ref()
            .map(|images| Preseed::new(images).with_unpacking(self.config.unpack));
        if let Some(preseed) = &preseed {
            let mut registry = Registry::default();
            registry.register_collector(Box::new(BundleCollector(preseed.clone())));
            node.metrics().add("containerd", registry);
            let images = preseed.bundle_dir().to_owned();
            node.health_sources().add("containerd.preseed", move |node: &NodeSnapshot| {
                let found = node.condition_of(PRESEED_DN);
                found.map(|found| found.hint(preseed_hint(&images))).into_iter().collect()
            });
        }
        let (plan, grace) = (self.clone(), node.config().node.grace);
        Ok(node.on_volume(move |volume| {
            let placed: ContainerdLayout = volume.create_layout()?;
            let directories = DirectoryLayout::new(placed.containerd.path(), &run)?;
            images.set_root_dir(directories.root_dir());
            let containerd = Containerd::new(&plan.binary, directories, path.clone(), log_store.clone());
            Ok(plan.configure(containerd, grace, preseed.clone()))
        }))
    }

    fn is_same(&self, new: &dyn PlannedRunnable) -> Option<bool> {
        is_equal(self, new)
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

/// Reads at each scrape how many bundles are imported.
#[derive(Debug)]
struct BundleCollector(Preseed);

impl Collector for BundleCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(counts) = self.0.bundle_counts() else { return Ok(()) };
        let help = "Bundles of images, by whether they are imported";
        let mut bundles =
            encoder.encode_descriptor("nodekeel_image_bundles", help, None, MetricType::Gauge)?;
        for (state, count) in [("imported", counts.imported), ("failed", counts.failed)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            ConstGauge::new(count).encode(bundles.encode_family(&[("state", state)])?)?;
        }
        Ok(())
    }
}

/// What to do about bundles that are not imported.
fn preseed_hint(images: &Path) -> String {
    let images = images.display();
    format!(
        "repair or delete the named bundles in {images}, or free space; then `nodectl restart {PRESEED_DN}` imports at once"
    )
}

/// How the control API reaches the images.
#[derive(Debug)]
pub(crate) struct ImageAccess {
    pub(crate) socket: PathBuf,
    /// The directory of the images on the data volume, once that was open.
    root: Mutex<Option<PathBuf>>,
    /// What images leave free on the disk.
    pub(crate) reserve: DiskReserve,
}

impl ImageAccess {
    /// The directory of the images; `None` before containerd has started.
    pub(crate) fn root_dir(&self) -> Option<PathBuf> {
        self.root.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_root_dir(&self, root: PathBuf) {
        *self.root.lock().unwrap_or_else(PoisonError::into_inner) = Some(root);
    }
}

/// What images leave free on the disk.
fn disk_reserve(config: &ContainerdConfig) -> DiskReserve {
    config.reserve.map_or_else(DiskReserve::default, DiskReserve::from_bytes)
}

/// Reads the configuration of containerd: the operator's file unchanged, or noded's settings.
fn read_daemon_config(containerd: &ContainerdConfig) -> Result<DaemonConfig, String> {
    let Some(file) = &containerd.config else {
        let cri = containerd.cri.clone();
        return Ok(DaemonConfig::Settings(ContainerdSettings { cri, ..ContainerdSettings::default() }));
    };
    let hint = "correct it, or services.containerd.config";
    let invalid = |reason: String| format!("containerd's configuration {}: {reason}; {hint}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| invalid(error.to_string()))?;
    let parsed = text.parse::<toml::Table>();
    parsed.map_err(|error| invalid(format!("invalid TOML: {}", error.message())))?;
    Ok(DaemonConfig::Verbatim { text, runsc: false })
}
