//! Volumes for the claims of a Kubernetes cluster.

pub(crate) mod config;
mod health;
mod image_support;
mod kubelet_dir;
mod no_quota;
mod volume_service;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kube::config::Kubeconfig;
use nodekeel_fsquota::{OpenError, ProjectQuota};
use nodekeel_provisioner::{CapacityPolicy, DriverName, NodeName, PrometheusMetrics, StoreName};
use prometheus_client::registry::Registry;

use self::health::{ApiHealth, CertificateHealth, CurrentProvisioner};
use self::image_support::ImageSupport;
use self::volume_service::{ServiceReports, VolumeService};
use crate::config::{
    AuditSettings, ConfigSection, ConfigViolation, NodedConfig, ProvisionerConfig, QuotaMode,
};
use crate::data::{self, DataError, check_writable};
use crate::error_chain::error_chain;
use crate::layout::PLACED_IN_MEMORY;
use crate::layout::{VOLUMES_DIR, VolumesLayout};
use crate::listen_address::check_socket_path;
use crate::part::PartPlanner;
use crate::part::{
    DependencyEntry, NodePreparation, Part, PlannedRunnable, PlannedService, PrepareError, PreparedRunnable,
};
use crate::program_name::program_name;
use crate::search_path::SearchPath;

const DN: &str = "root.provisioner";

/// Gives loop devices to the files of block and strict volumes.
const LOOP_CONTROL: &str = "/dev/loop-control";

/// The part of a node with `[provisioner]`.
pub(super) struct ProvisionerPart;

impl Part for ProvisionerPart {
    fn name(&self) -> &str {
        "provisioner"
    }

    fn sections(&self) -> Vec<ConfigSection> {
        vec![ConfigSection::field("provisioner")]
    }

    fn check(&self, config: &NodedConfig) -> Result<(), ConfigViolation> {
        config.provisioner.as_ref().map_or(Ok(()), |provisioner| provisioner.check(&config.node.name))
    }

    fn dependencies(&self, config: &NodedConfig) -> Vec<DependencyEntry> {
        let unavailable =
            config.provisioner.is_none().then_some("which is disabled; set provisioner.kubeconfig");
        vec![DependencyEntry::of_part(self, config).unavailable(unavailable)]
    }

    fn plan(&self, planner: &mut PartPlanner<'_>) {
        let Some(provisioner) = &planner.config().provisioner else { return };
        let placed: VolumesLayout = planner.volume().add_layout().expect(PLACED_IN_MEMORY);
        let is_on_volume = provisioner.directory.is_none();
        let directory = provisioner.directory.clone().unwrap_or_else(|| placed.volumes.path().to_owned());
        let (limits, skipped) = check_requirements(planner, provisioner, &directory, is_on_volume);
        for (name, path) in &provisioner.stores {
            // It may be absent, and is served once it is there.
            if let Some(why) = find_store_problem(path, provisioner.quota) {
                planner.warn(format!(
                    "provisioner.stores.{name}: no volumes are served there until it is repaired: {why}"
                ));
            }
        }
        let node = provisioner
            .node_name_or(&planner.config().node.name)
            .expect("a checked configuration has a valid name");
        if skipped.is_none() && provisioner.csi {
            for socket in kubelet_sockets(provisioner) {
                let hint = "use a shorter provisioner.kubelet or provisioner.driver";
                check_socket_path(&socket, hint).into_iter().for_each(|problem| planner.report(problem));
            }
        }
        let plan = ProvisionerPlan {
            kubeconfig: provisioner.kubeconfig.clone(),
            node,
            driver: provisioner.driver.clone(),
            directory,
            stores: provisioner.stores.clone(),
            is_on_volume,
            limits: limits.unwrap_or(LimitEnforcement::None),
            kubelet: provisioner.csi.then(|| provisioner.kubelet.clone()),
            capacity: provisioner.capacity.policy().expect("a checked configuration has a valid ratio"),
            audit: provisioner.audit,
            images: ImageSupport::find(planner.search_path(), Path::new(LOOP_CONTROL)),
        };
        let service = PlannedService::new(DN, plan).skip(skipped);
        planner.add(if is_on_volume { service.layout::<VolumesLayout>() } else { service });
    }
}

/// Volumes for the claims of a Kubernetes cluster.
#[derive(Debug, Clone)]
struct ProvisionerPlan {
    /// Address and credentials of the API server.
    kubeconfig: PathBuf,
    /// Name of this node in the API.
    node: NodeName,
    /// Name of the CSI driver.
    driver: DriverName,
    /// Directory of volumes; that on the data volume as planned, until the volume is open.
    directory: PathBuf,
    /// Directories of the stores with a name.
    stores: BTreeMap<StoreName, PathBuf>,
    /// True if that directory is the default one, on the data volume.
    is_on_volume: bool,
    /// The enforcement of the limits of volumes.
    limits: LimitEnforcement,
    /// The kubelet's directory; `None` if volumes are not mounted into pods.
    kubelet: Option<PathBuf>,
    /// The share of the disk that may be promised to volumes.
    capacity: CapacityPolicy,
    /// The audit of the limits of volumes.
    audit: AuditSettings,
    /// The programs and devices that block and strict volumes need.
    images: ImageSupport,
}

/// The enforcement of the limits of volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LimitEnforcement {
    /// By project quotas of a file system.
    Enforced {
        /// The file system, for people.
        by: String,
    },
    /// Not at all, as configured.
    None,
}

impl PlannedRunnable for ProvisionerPlan {
    fn prepare(&self, node: &mut NodePreparation<'_>) -> Result<PreparedRunnable, PrepareError> {
        let (current, kubeconfig) = (CurrentProvisioner::default(), self.kubeconfig.clone());
        let health = node.health_sources();
        health.add("provisioner", ApiHealth { current: current.clone(), kubeconfig: kubeconfig.clone() });
        health.add("provisioner.certificate", CertificateHealth { kubeconfig });
        let mut registry = Registry::default();
        let metrics = Arc::new(PrometheusMetrics::register_in(&mut registry));
        node.metrics().add("provisioner", registry);
        self.stores.values().for_each(|path| node.health_sources().add_disk(path));
        let (plan, reports) =
            (self.clone(), ServiceReports { log_store: node.log_store().clone(), metrics, current });
        // A directory of the operator is not on the data volume: it does not wait for root.storage, and does not
        // close with it.
        if !self.is_on_volume {
            let directory = self.directory.clone();
            node.health_sources().add_disk(&directory);
            // The store opens the directory again when its disk was lost and is back.
            let base = move || data::open_trusted_directory(&directory);
            return Ok(PreparedRunnable::new(VolumeService::open(plan, reports, base)?));
        }
        Ok(node.on_volume(move |volume| {
            let placed: VolumesLayout = volume.create_layout()?;
            let directory = placed.volumes.path().to_owned();
            let base = volume.dir().open_dir(VOLUMES_DIR)?;
            let base = move || Ok(base.try_clone()?);
            let plan = ProvisionerPlan { directory, ..plan.clone() };
            Ok(VolumeService::open(plan, reports.clone(), base)?)
        }))
    }
}

/// The reason why a store with a name can't be served now.
fn find_store_problem(path: &Path, quota: QuotaMode) -> Option<String> {
    let existing = match find_existing_directory("stores", path, false) {
        Ok(existing) => existing,
        Err(why) => return Some(why),
    };
    let is_needed = quota == QuotaMode::Require;
    is_needed
        .then(|| detect_enforcement(&existing).err().map(|error| quota_error_with_hint(&error)))
        .flatten()
}

/// Finds how limits will be enforced, and the reason to skip the service; without `dev`, a problem for each
/// missing requirement.
fn check_requirements(
    planner: &mut PartPlanner<'_>,
    config: &ProvisionerConfig,
    directory: &Path,
    is_on_volume: bool,
) -> (Option<LimitEnforcement>, Option<String>) {
    let kubeconfig = check_kubeconfig(&config.kubeconfig);
    if let Ok(kubeconfig) = &kubeconfig {
        find_missing_files(kubeconfig, planner.search_path()).into_iter().for_each(|missing| {
            let file = config.kubeconfig.display();
            planner.warn(format!(
                "provisioner: the kubeconfig {file} names {missing}; put it there, or correct the file"
            ));
        });
    }
    let mut skipped = None;
    let is_volume_known = planner.is_volume_known();
    // Each missing requirement is reported. The first one is the reason to skip the service.
    let mut report = |reason: Option<String>| {
        if let Some(reason) = reason {
            let reason = planner.skip_or_report("provisioner", reason);
            skipped = skipped.take().or(reason);
        }
    };
    report(kubeconfig.err());
    let existing = find_existing_directory("directory", directory, is_on_volume);
    report(existing.as_ref().err().cloned());
    let limits = match (&existing, config.quota) {
        (_, QuotaMode::None) => Some(LimitEnforcement::None),
        // Known when it is open.
        (_, QuotaMode::Require) if is_on_volume && !is_volume_known => {
            Some(LimitEnforcement::Enforced { by: "project quotas of the data volume".to_owned() })
        }
        (Ok(existing), QuotaMode::Require) => match detect_enforcement(existing) {
            Ok(limits) => Some(limits),
            Err(error) => {
                report(Some(quota_error_with_hint(&error)));
                None
            }
        },
        (Err(_), QuotaMode::Require) => None,
    };
    report(config.csi.then(|| check_kubelet(&config.kubelet)).flatten());
    (limits, skipped)
}

/// The files and the program that the current context of a kubeconfig names, and that can't be read or found.
fn find_missing_files(kubeconfig: &Kubeconfig, search: &SearchPath) -> Vec<String> {
    let context =
        kubeconfig.contexts.iter().find(|context| Some(&context.name) == kubeconfig.current_context.as_ref());
    let Some(context) = context.and_then(|context| context.context.as_ref()) else { return Vec::new() };
    let cluster = kubeconfig.clusters.iter().find(|cluster| cluster.name == context.cluster);
    let user = kubeconfig.auth_infos.iter().find(|user| Some(&user.name) == context.user.as_ref());
    let (cluster, user) =
        (cluster.and_then(|named| named.cluster.as_ref()), user.and_then(|named| named.auth_info.as_ref()));
    let files = [
        ("certificate-authority", cluster.and_then(|cluster| cluster.certificate_authority.as_ref())),
        ("client-certificate", user.and_then(|user| user.client_certificate.as_ref())),
        ("client-key", user.and_then(|user| user.client_key.as_ref())),
        ("tokenFile", user.and_then(|user| user.token_file.as_ref())),
    ];
    // The reader has made paths absolute that were relative to the file.
    let unreadable = files.into_iter().filter_map(|(key, path)| {
        let error = File::open(path?).err()?;
        Some(format!("{key} {}, which can't be read: {error}", path?))
    });
    let program = user.and_then(|user| user.exec.as_ref()?.command.as_ref());
    let not_found = program.and_then(|program| search.find_program(Path::new(program)).err());
    unreadable.chain(not_found.map(|error| format!("an exec command: {error}"))).collect()
}

/// Checks that the file names an API server.
fn check_kubeconfig(kubeconfig: &Path) -> Result<Kubeconfig, String> {
    let hint = "correct it, or provisioner.kubeconfig";
    let invalid = |why: &str| Err(format!("the kubeconfig {} {why}; {hint}", kubeconfig.display()));
    let file = match Kubeconfig::read_from(kubeconfig) {
        Ok(file) => file,
        Err(error) => return invalid(&format!("can't be used: {}", error_chain(&error))),
    };
    let Some(name) = &file.current_context else { return invalid("has no current-context") };
    let context = file.contexts.iter().find(|context| context.name == *name);
    match context.and_then(|context| context.context.as_ref()) {
        None => invalid(&format!("has no context {name:?}, which is its current one")),
        Some(context) if !file.clusters.iter().any(|cluster| cluster.name == context.cluster) => {
            invalid(&format!("has no cluster {:?}, which its current context names", context.cluster))
        }
        Some(_) => Ok(file),
    }
}

/// The directory of volumes, or its nearest existing ancestor, which is on the same file system.
fn find_existing_directory(key: &str, directory: &Path, is_on_volume: bool) -> Result<PathBuf, String> {
    if is_on_volume {
        let found = directory.ancestors().find(|path| path.is_dir());
        return Ok(found.unwrap_or(Path::new("/")).to_owned());
    }
    let name = directory.display();
    let dir = data::open_directory(directory)
        .map_err(|_| format!("provisioner.{key} {name} does not exist: create it, or correct the key"))?;
    dir.check_owner_and_parents().map_err(|error| error_chain(&error))?;
    match check_writable(&dir) {
        Ok(()) => {}
        Err(DataError::Unusable { why, .. }) => {
            return Err(format!("can't store data in {name}: it is {why}; correct provisioner.{key}"));
        }
        Err(_) => {
            return Err(format!("permission denied to write to {name}: run {} as root", program_name()));
        }
    }
    Ok(directory.to_owned())
}

fn detect_enforcement(existing: &Path) -> Result<LimitEnforcement, OpenError> {
    let quota = ProjectQuota::open(existing)?;
    let system = quota.file_system();
    Ok(LimitEnforcement::Enforced {
        by: format!("project quotas of {} at {}", system.kind, system.mount_point.display()),
    })
}

/// The error of missing project quotas, with a hint.
pub(crate) fn quota_error_with_hint(error: &OpenError) -> String {
    format!(
        "limits of volumes can't be enforced: {}; or set provisioner.quota = \"none\" for volumes without limits",
        error_chain(error)
    )
}

/// The reason why volumes can't be mounted for this kubelet. Its directory need not exist: it may be a service of this
/// node, which creates it when it starts.
fn check_kubelet(kubelet: &Path) -> Option<String> {
    let why = match std::fs::metadata(kubelet) {
        Ok(found) if !found.is_dir() => {
            format!("{} is not a directory: correct provisioner.kubelet", kubelet.display())
        }
        _ if !nix::unistd::geteuid().is_root() => {
            format!("mounting volumes needs root: run {} as root", program_name())
        }
        _ => return None,
    };
    Some(format!("{why}, or set provisioner.csi = false to provision volumes without mounting them"))
}

/// Sockets of the plugin: for calls of the kubelet, and for its registration.
fn kubelet_sockets(config: &ProvisionerConfig) -> [PathBuf; 2] {
    let driver = &config.driver;
    [format!("plugins/{driver}/csi.sock"), format!("plugins_registry/{driver}@reg.sock")]
        .map(|below| config.kubelet.join(below))
}

impl fmt::Display for ProvisionerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volumes of {} for node {}, in {}, ", self.driver, self.node, self.directory.display())?;
        for (name, path) in &self.stores {
            write!(f, "and of store {name} in {}, ", path.display())?;
        }
        match &self.limits {
            LimitEnforcement::Enforced { by } => write!(f, "limited by {by}")?,
            LimitEnforcement::None => f.write_str("WITHOUT LIMITS (provisioner.quota is \"none\")")?,
        }
        match &self.kubelet {
            Some(kubelet) => write!(f, ", mounted into pods through the kubelet in {}", kubelet.display())?,
            None => f.write_str(", not mounted into pods (provisioner.csi is false)")?,
        }
        write!(f, ", {}", self.images)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn an_incomplete_kubeconfig_is_rejected_with_the_reason() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = scratch.path().join("config");
        let complete = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{name: c, context: {cluster: k, user: u}}]\n\
             clusters: [{name: k, cluster: {server: \"https://127.0.0.1:1\"}}]\nusers: [{name: u, user: {}}]\n";
        for (text, says) in [
            ("{", "can't be used: "),
            ("apiVersion: v1\nkind: Config\n", "has no current-context"),
            (&complete.replace("{name: c,", "{name: d,"), "has no context \"c\""),
            (&complete.replace("{name: k,", "{name: l,"), "has no cluster \"k\""),
        ] {
            fs::write(&file, text).expect("written");
            let error = check_kubeconfig(&file).expect_err(text);
            assert!(error.contains(says) && error.ends_with("or provisioner.kubeconfig"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(
            check_kubeconfig(&scratch.path().join("absent")).expect_err("absent").contains("No such file")
        );
        fs::write(&file, complete).expect("written");
        check_kubeconfig(&file).expect("a complete kubeconfig");
    }

    #[test]
    fn files_and_programs_that_a_kubeconfig_names_must_be_there() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = scratch.path().join("config");
        let missing = |cluster: &str, user: &str| {
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
                 clusters: [{{name: other, cluster: {{server: \"https://127.0.0.1:1\", certificate-authority: none}}}}, \
                 {{name: k, cluster: {{server: \"https://127.0.0.1:1\"{cluster}}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n"
            );
            fs::write(&file, text).expect("written");
            let search = SearchPath::with_default_directories(None, None);
            find_missing_files(&check_kubeconfig(&file).expect("complete"), &search)
        };
        fs::write(scratch.path().join("there.pem"), "").expect("written");
        assert_eq!(
            missing(
                ", certificate-authority: there.pem",
                "client-certificate: there.pem, client-key: there.pem"
            ),
            [""; 0]
        );
        assert_eq!(missing("", "exec: {apiVersion: client.authentication.k8s.io/v1, command: sh}"), [""; 0]);
        let found = missing(
            ", certificate-authority: ca.pem",
            "client-certificate: cert.pem, client-key: key.pem, tokenFile: token",
        );
        let at = |name: &str| scratch.path().join(name).display().to_string();
        for (found, (key, name)) in found.iter().zip([
            ("certificate-authority", "ca.pem"),
            ("client-certificate", "cert.pem"),
            ("client-key", "key.pem"),
            ("tokenFile", "token"),
        ]) {
            assert!(
                found.starts_with(&format!("{key} {}, which can't be read: No such file", at(name))),
                "{found}"
            );
        }
        assert_eq!(found.len(), 4, "{found:?}");
        let found =
            missing("", "exec: {apiVersion: client.authentication.k8s.io/v1, command: no-such-helper}");
        assert!(
            found.len() == 1
                && found[0].starts_with("an exec command: ")
                && found[0].contains("no-such-helper"),
            "{found:?}"
        );
    }

    #[test]
    fn a_file_system_without_quotas_is_reported_with_a_hint() {
        let error =
            quota_error_with_hint(&detect_enforcement(Path::new("/proc")).expect_err("no quotas there"));
        assert!(error.contains("use XFS or ext4; or set provisioner.quota = \"none\""), "{error}");
    }

    #[test]
    fn a_kubelet_directory_may_be_missing_but_not_be_a_file() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = scratch.path().join("file");
        fs::write(&file, "").expect("written");
        let rejected = check_kubelet(&file).expect("a file");
        assert!(rejected.contains("is not a directory") && rejected.contains("csi = false"), "{rejected}");
        for path in [scratch.path().join("absent"), scratch.path().to_owned()] {
            let reason = check_kubelet(&path);
            let needs_root = reason.as_ref().is_some_and(|reason| reason.contains("needs root"));
            assert_eq!(reason.is_some(), needs_root, "{reason:?}");
            assert_eq!(needs_root, !nix::unistd::geteuid().is_root());
        }
    }
}
