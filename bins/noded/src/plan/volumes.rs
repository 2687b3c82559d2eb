//! What a configured provisioner comes to on this machine.

use std::fmt;
use std::path::{Path, PathBuf};

use kube::config::Kubeconfig;
use nodekeel_fsquota::{OpenError, ProjectQuota};
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::{DriverName, NodeName};

use super::{Planned, Planner, SHORT, Service, too_long};
use crate::config::{Config, ProvisionerConfig, Quota};
use crate::data::{self, DataError, probe_directory};
use crate::layout::OfVolumes;

/// Volumes for the claims of a Kubernetes cluster.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Volumes {
    /// How the API server is reached.
    pub kubeconfig: PathBuf,
    /// What the API calls this node.
    pub node: NodeName,
    /// The driver.
    pub driver: DriverName,
    /// Where volumes are kept.
    pub directory: PathBuf,
    /// Whether the directory is the node's own, below its data directory.
    pub is_own: bool,
    /// How volumes are held to their limits.
    pub limits: Limits,
    /// The kubelet's directory; `None` where pods are not given volumes.
    pub kubelet: Option<PathBuf>,
}

/// How volumes are held to their limits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limits {
    /// By the project quotas of a file system.
    Enforced {
        /// Which one, for people.
        by: String,
    },
    /// Not at all, as the operator wants it.
    None,
}

impl Planner<'_> {
    pub(super) fn provisioner(&mut self, config: &Config) {
        let Some(provisioner) = &config.provisioner else { return };
        let own = self.root.extend::<OfVolumes>().expect(SHORT).volumes.path().to_owned();
        let is_own = provisioner.directory.is_none();
        let directory = provisioner.directory.clone().unwrap_or(own);
        let (limits, skipped) = self.what_is_missing(provisioner, &directory, is_own);
        let node = provisioner.node_name(&config.node.name).expect("a parsed configuration has one");
        if skipped.is_none() && provisioner.csi {
            for socket in sockets(provisioner) {
                let remedy = "set provisioner.kubelet or provisioner.driver to something shorter";
                self.problems.extend(too_long(&socket, remedy));
            }
        }
        let volumes = Volumes {
            kubeconfig: provisioner.kubeconfig.clone(),
            node,
            driver: provisioner.driver.clone(),
            directory,
            is_own,
            limits: limits.unwrap_or(Limits::None),
            kubelet: provisioner.csi.then(|| provisioner.kubelet.clone()),
        };
        let service = Service::Provisioner(Box::new(volumes));
        self.services.push(Planned { dn: "root.provisioner".into(), service, skipped });
    }

    /// How limits will bind; and where something is missing, why the service is skipped or a problem for each of it.
    fn what_is_missing(
        &mut self,
        config: &ProvisionerConfig,
        directory: &Path,
        is_own: bool,
    ) -> (Option<Limits>, Option<String>) {
        let mut skipped = None;
        let mut missing = |reason: Option<String>| {
            if let Some(reason) = reason {
                let told = self.missing("provisioner", reason);
                skipped = skipped.take().or(told);
            }
        };
        missing(no_api(&config.kubeconfig).err());
        let place = existing(directory, is_own);
        missing(place.as_ref().err().cloned());
        let limits = match (&place, config.quota) {
            (_, Quota::None) => Some(Limits::None),
            (Ok(place), Quota::Require) => match enforced(place) {
                Ok(limits) => Some(limits),
                Err(error) => {
                    missing(Some(no_limits(&error)));
                    None
                }
            },
            (Err(_), Quota::Require) => None,
        };
        missing(config.csi.then(|| no_kubelet(&config.kubelet)).flatten());
        (limits, skipped)
    }
}

/// Why the file doesn't say how an API server is reached.
fn no_api(kubeconfig: &Path) -> Result<(), String> {
    let remedy = "correct it, or provisioner.kubeconfig";
    let wrong = |why: &str| Err(format!("the kubeconfig {} {why}; {remedy}", kubeconfig.display()));
    let file = match Kubeconfig::read_from(kubeconfig) {
        Ok(file) => file,
        Err(error) => return wrong(&format!("can't be used: {}", chain(&error))),
    };
    let Some(name) = file.current_context else { return wrong("has no current-context") };
    let context = file.contexts.iter().find(|context| context.name == name);
    match context.and_then(|context| context.context.as_ref()) {
        None => wrong(&format!("has no context {name:?}, which is its current one")),
        Some(context) if !file.clusters.iter().any(|cluster| cluster.name == context.cluster) => {
            wrong(&format!("has no cluster {:?}, which its current context names", context.cluster))
        }
        Some(_) => Ok(()),
    }
}

/// The directory of volumes, or the nearest one above it that is there: it is on the same file system.
fn existing(directory: &Path, is_own: bool) -> Result<PathBuf, String> {
    if is_own {
        let found = directory.ancestors().find(|path| path.is_dir());
        return Ok(found.unwrap_or(Path::new("/")).to_owned());
    }
    let name = directory.display();
    let dir = data::open(directory).map_err(|_| {
        format!("there is no directory {name}, which is provisioner.directory: create it, or correct that")
    })?;
    match probe_directory(&dir) {
        Ok(()) => {}
        Err(DataError::Unfit { why, .. }) => {
            return Err(format!("nothing can be kept in {name}: it is {why}; correct provisioner.directory"));
        }
        Err(_) => return Err(format!("no permission to write to {name}: run noded as root")),
    }
    Ok(directory.to_owned())
}

fn enforced(place: &Path) -> Result<Limits, OpenError> {
    let quota = ProjectQuota::open(place)?;
    let system = quota.file_system();
    Ok(Limits::Enforced {
        by: format!("project quotas of {} at {}", system.kind, system.mount_point.display()),
    })
}

/// What to do where no limits bind.
pub(crate) fn no_limits(error: &OpenError) -> String {
    format!(
        "volumes can't have limits that bind: {}; or set provisioner.quota = \"none\" to have volumes without limits",
        chain(error)
    )
}

fn no_kubelet(kubelet: &Path) -> Option<String> {
    let path = kubelet.display();
    let why = match Dir::open(kubelet) {
        Ok(dir) => match dir.open_dir("pods").and_then(|_| dir.open_dir("plugins_registry")) {
            Ok(_) if nix::unistd::geteuid().is_root() => return None,
            Ok(_) => "mounting volumes needs root: run noded as root".to_owned(),
            Err(error) => format!("{path} is not a running kubelet's ({error}): start the kubelet"),
        },
        Err(_) => format!(
            "there is no kubelet's directory {path}: start the kubelet, or correct provisioner.kubelet"
        ),
    };
    Some(format!("{why}, or set provisioner.csi = false to have volumes that no pod is given"))
}

/// Where the kubelet calls the plugin, and where it finds it.
fn sockets(config: &ProvisionerConfig) -> [PathBuf; 2] {
    let driver = &config.driver;
    [format!("plugins/{driver}/csi.sock"), format!("plugins_registry/{driver}@reg.sock")]
        .map(|below| config.kubelet.join(below))
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        // Some libraries' texts hold their cause's already.
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text.replace('\n', " ")
}

impl fmt::Display for Volumes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volumes of {} for node {}, in {}, ", self.driver, self.node, self.directory.display())?;
        match &self.limits {
            Limits::Enforced { by } => write!(f, "limited by {by}")?,
            Limits::None => f.write_str("WITHOUT LIMITS (provisioner.quota is \"none\")")?,
        }
        match &self.kubelet {
            Some(kubelet) => write!(f, ", given to pods through the kubelet of {}", kubelet.display()),
            None => f.write_str(", given to no pods (provisioner.csi is false)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_kubeconfig_that_says_nothing_is_refused_with_the_reason() {
        let scratch = tempfile::tempdir().expect("a directory");
        let file = scratch.path().join("config");
        let whole = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             contexts: [{name: c, context: {cluster: k, user: u}}]\n\
             clusters: [{name: k, cluster: {server: \"https://127.0.0.1:1\"}}]\nusers: [{name: u, user: {}}]\n";
        for (text, says) in [
            ("{", "can't be used: "),
            ("apiVersion: v1\nkind: Config\n", "has no current-context"),
            (&whole.replace("{name: c,", "{name: d,"), "has no context \"c\""),
            (&whole.replace("{name: k,", "{name: l,"), "has no cluster \"k\""),
        ] {
            fs::write(&file, text).expect("written");
            let error = no_api(&file).expect_err(text);
            assert!(error.contains(says) && error.ends_with("or provisioner.kubeconfig"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        assert!(no_api(&scratch.path().join("absent")).expect_err("absent").contains("No such file"));
        fs::write(&file, whole).expect("written");
        no_api(&file).expect("it is whole");
    }

    #[test]
    fn what_keeps_limits_from_binding_is_said_with_what_to_do() {
        let error = no_limits(&enforced(Path::new("/proc")).expect_err("no quotas there"));
        assert!(error.contains("use XFS or ext4; or set provisioner.quota = \"none\""), "{error}");
    }

    #[test]
    fn a_kubelet_that_is_not_there_is_said() {
        let scratch = tempfile::tempdir().expect("a directory");
        let absent = no_kubelet(&scratch.path().join("absent")).expect("absent");
        assert!(absent.contains("there is no kubelet's directory"), "{absent}");
        let empty = no_kubelet(scratch.path()).expect("empty");
        assert!(
            empty.contains("is not a running kubelet's") && empty.contains("provisioner.csi = false"),
            "{empty}"
        );
    }
}
