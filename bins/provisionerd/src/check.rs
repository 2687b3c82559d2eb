//! `provisionerd check`: everything that `run` needs, looked at without changing anything.

use std::fmt;
use std::fs;
use std::net::TcpListener;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, ensure};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::api::PostParams;
use kube::{Api, Client};
use nodekeel_fsquota::ProjectQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::OsMounts;
use nodekeel_provisioner::{DirStore, HOSTNAME};

use crate::config::Config;
use crate::rights::{self, Right};
use crate::{cluster, print, volumes};

/// What something needed is missing.
const MISSING: u8 = 4;

/// What was found about one thing.
#[derive(Debug)]
pub(crate) enum Finding {
    Good(String),
    /// It works, and not as one may think.
    Warning(String),
    Bad(anyhow::Error),
}

impl Finding {
    fn is_bad(&self) -> bool {
        matches!(self, Self::Bad(_))
    }

    fn of(found: Result<impl Into<String>>) -> Self {
        match found {
            Ok(text) => Self::Good(text.into()),
            Err(error) => Self::Bad(error),
        }
    }
}

/// One line.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, text) = match self {
            Self::Good(text) => ("ok  ", text.clone()),
            Self::Warning(text) => ("warn", text.clone()),
            Self::Bad(error) => ("FAIL", format!("{error:#}")),
        };
        write!(f, "{word}  {}", text.replace('\n', " "))
    }
}

/// Prints a line for each finding; the exit code says whether `run` would work.
pub(crate) fn check(config: Config) -> Result<ExitCode> {
    let mut findings =
        vec![Finding::of(config.node().map(|node| format!("this is node {node}")).map_err(Into::into))];
    findings.extend(directory(&config));
    if config.csi {
        findings.extend(kubelet(&config));
    }
    findings.push(address(&config));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    findings.extend(runtime.block_on(api(&config)));
    let text: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
    let printed = print(&text);
    Ok(match findings.iter().any(Finding::is_bad) {
        true => ExitCode::from(MISSING),
        false => printed,
    })
}

fn directory(config: &Config) -> Vec<Finding> {
    let (base, quota) = match volumes::open(config) {
        Ok(opened) => opened,
        Err(error) => return vec![Finding::Bad(error.into())],
    };
    let mut findings = vec![Finding::Good(format!(
        "{} is on {} at {}, whose project quotas bind",
        config.directory.display(),
        quota.file_system().kind,
        quota.file_system().mount_point.display()
    ))];
    findings.extend(quota_warnings(&quota));
    if quota.file_system().mount_point == Path::new("/") {
        findings.push(Finding::Warning(
            "volumes share the root file system: limits are no reservations, and full volumes fill it; give them a \
             file system of their own"
                .into(),
        ));
    }
    findings.push(writable(&base));
    match DirStore::is_in_use(&base) {
        Ok(false) => {}
        Ok(true) => {
            findings.push(Finding::Warning("another instance works on the directory at the moment".into()))
        }
        Err(error) => findings.push(Finding::Bad(anyhow!(error).context("see whether somebody works on it"))),
    }
    findings
}

fn quota_warnings(quota: &ProjectQuota) -> impl Iterator<Item = Finding> {
    quota.warnings().into_iter().map(|warning| Finding::Warning(warning.to_string()))
}

fn writable(base: &Dir) -> Finding {
    let write =
        rustix::fs::accessat(base.as_fd(), ".", rustix::fs::Access::WRITE_OK, rustix::fs::AtFlags::EACCESS);
    Finding::of(
        write
            .map(|()| "the directory can be written to")
            .with_context(|| format!("write to {}: run as root", base.path().display())),
    )
}

fn kubelet(config: &Config) -> Vec<Finding> {
    let mut findings: Vec<_> =
        ["pods", "plugins_registry"].into_iter().map(|below| there(&config.kubelet, below)).collect();
    if findings.iter().any(Finding::is_bad) {
        return findings;
    }
    findings.push(shared(&config.kubelet.join("pods"), is_pod()));
    // Any directory can be mounted like any other.
    let probe = || -> Result<()> {
        let dir = Dir::open(&config.kubelet)?;
        Ok(OsMounts::probe(dir.as_fd())?)
    };
    let probed = probe().map(|()| "volumes can be mounted");
    findings.push(Finding::of(
        probed.context("mount a volume: run as root, outside of user namespaces, privileged"),
    ));
    findings
}

fn there(kubelet: &Path, below: &str) -> Finding {
    let path = kubelet.join(below);
    let found = fs::symlink_metadata(&path).with_context(|| {
        format!("find {}: start the kubelet, or give its --root-dir by --kubelet", path.display())
    });
    let is_dir = found.and_then(|file| {
        ensure!(file.is_dir(), "{} is no directory: replace it by what it points to", path.display());
        Ok(format!("the kubelet's {} is there", path.display()))
    });
    Finding::of(is_dir)
}

/// Whether the kubelet sees what is mounted below a directory: it does where that is a shared mount, or where this is no
/// container.
///
/// Where it doesn't, publishing seems to work, and pods write into a bare directory, without a limit.
pub(crate) fn shared(path: &Path, is_pod: bool) -> Finding {
    let advice = || {
        format!(
            "{} is on no shared mount: where this is a container, give it mountPropagation: Bidirectional, and make the \
             host's mount shared (`mount --make-rshared /`)",
            path.display()
        )
    };
    match OsMounts::is_shared(path) {
        Ok(true) => Finding::Good(format!("what is mounted below {} is seen by the kubelet", path.display())),
        Ok(false) if is_pod => Finding::Bad(anyhow!(advice())),
        Ok(false) => Finding::Warning(advice()),
        Err(error) => {
            Finding::Bad(anyhow!(error).context(format!("look at the mounts of {}", path.display())))
        }
    }
}

/// Whether this is a pod's container: the kubelet gives every one this variable.
pub(crate) fn is_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

fn address(config: &Config) -> Finding {
    match TcpListener::bind(config.listen) {
        Ok(_) => Finding::Good(format!("{} can be listened on", config.listen)),
        // It may be the running instance.
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Finding::Warning(format!(
            "{} is taken: end who listens there, or give another by --listen",
            config.listen
        )),
        Err(error) => Finding::Bad(
            anyhow!(error).context(format!("listen on {}: give another by --listen", config.listen)),
        ),
    }
}

async fn api(config: &Config) -> Vec<Finding> {
    let client = match cluster::client(config.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => return vec![Finding::Bad(error)],
    };
    let version = client.apiserver_version().await;
    match version {
        Ok(version) => {
            let mut findings =
                vec![Finding::Good(format!("the API server answers, Kubernetes {}", version.git_version))];
            findings.extend(granted(config, &client).await);
            findings
        }
        Err(error) => {
            let what = "ask the API server: is it up, and is the kubeconfig (or the service account) right?";
            vec![Finding::Bad(anyhow!(error).context(what))]
        }
    }
}

/// What has to be allowed, and to be in the API, for pods to get their volumes.
pub(crate) async fn granted(config: &Config, client: &Client) -> Vec<Finding> {
    let mut findings = vec![allowed(client).await];
    if let Ok(name) = config.node() {
        let node = Api::<Node>::all(client.clone()).get_opt(name.as_str()).await;
        findings.push(hostname(name.as_str(), node));
    }
    if config.csi {
        let driver = Api::<CSIDriver>::all(client.clone()).get_opt(config.driver.as_str()).await;
        findings.push(driver_object(config.driver.as_str(), driver));
    }
    findings
}

/// Volumes are bound to a node by its label, pods are told to it by its name.
fn hostname(name: &str, node: kube::Result<Option<Node>>) -> Finding {
    let node = match node {
        Ok(Some(node)) => node,
        Ok(None) => {
            return Finding::Bad(anyhow!("there is no node {name}: give its name in the API by --node"));
        }
        Err(error) => return Finding::Bad(anyhow!(error).context(format!("look at node {name}"))),
    };
    match node.metadata.labels.unwrap_or_default().get(HOSTNAME) {
        Some(label) if label == name => Finding::Good(format!("node {name} has the label {HOSTNAME}={name}")),
        label => Finding::Bad(anyhow!(
            "node {name} has {HOSTNAME}={:?}, so no pod could use its volumes: `kubectl label node {name} --overwrite \
             {HOSTNAME}={name}`, or start the kubelet with that --hostname-override",
            label.map(String::as_str).unwrap_or_default()
        )),
    }
}

fn driver_object(name: &str, driver: kube::Result<Option<CSIDriver>>) -> Finding {
    match driver {
        Ok(Some(driver)) if driver.spec.attach_required == Some(false) => {
            Finding::Good(format!("there is a CSIDriver {name}"))
        }
        Ok(Some(_)) => Finding::Bad(anyhow!(
            "CSIDriver {name} has attachRequired: true, so pods wait for ever: apply deploy/csidriver.yaml anew"
        )),
        Ok(None) => Finding::Bad(anyhow!(
            "there is no CSIDriver {name}, so pods wait for ever: apply deploy/csidriver.yaml, with this name"
        )),
        Err(error) => Finding::Bad(anyhow!(error).context(format!("look at CSIDriver {name}"))),
    }
}

async fn allowed(client: &Client) -> Finding {
    let mut missing = Vec::new();
    for right in rights::needed() {
        match is_allowed(client, right).await {
            Ok(true) => {}
            Ok(false) => missing.push(right),
            Err(error) => return Finding::Bad(error.context("ask the API server what is allowed")),
        }
    }
    match missing.is_empty() {
        true => Finding::Good("the API server allows what is needed".into()),
        false => Finding::Bad(denied(&missing)),
    }
}

fn denied(missing: &[Right]) -> anyhow::Error {
    let of_a_kind = missing.chunk_by(|a, b| (a.group, a.resource) == (b.group, b.resource));
    let kinds = of_a_kind.map(|rights| {
        let verbs: Vec<_> = rights.iter().map(|right| right.verb).collect();
        let group = if rights[0].group.is_empty() { "core" } else { rights[0].group };
        format!("{} on {} ({group})", verbs.join(", "), rights[0].resource)
    });
    let kinds = kinds.collect::<Vec<_>>().join("; ");
    anyhow!("apply deploy/rbac.yaml, or grant it: the API server doesn't allow {kinds}")
}

async fn is_allowed(client: &Client, right: Right) -> Result<bool> {
    let resource_attributes = ResourceAttributes {
        group: Some(right.group.into()),
        resource: Some(right.resource.into()),
        verb: Some(right.verb.into()),
        ..Default::default()
    };
    let spec =
        SelfSubjectAccessReviewSpec { resource_attributes: Some(resource_attributes), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..Default::default() };
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line() {
        let error = anyhow!("first\nsecond").context("look");
        assert_eq!(Finding::Bad(error).to_string(), "FAIL  look: first second");
        assert!(!Finding::Warning("careful".into()).is_bad());
    }

    #[test]
    fn missing_rights_are_one_line_with_what_to_do() {
        let right = |resource, verb| Right { group: "", resource, verb };
        let missing =
            [right("persistentvolumes", "get"), right("persistentvolumes", "delete"), right("nodes", "get")];
        let text = denied(&missing).to_string();
        assert!(text.contains("get, delete on persistentvolumes (core); get on nodes (core)"), "{text}");
        assert!(text.contains("deploy/rbac.yaml"), "{text}");
    }

    #[test]
    fn a_node_whose_label_isnt_its_name_is_told() {
        let node = |label: &str| -> Node {
            serde_json::from_value(serde_json::json!({ "metadata": { "labels": { HOSTNAME: label } } }))
                .expect("a node")
        };
        assert!(!hostname("node-a", Ok(Some(node("node-a")))).is_bad());
        let other = hostname("node-a", Ok(Some(node("ip-10-0-0-1"))));
        assert!(other.is_bad() && other.to_string().contains("kubectl label node node-a"), "{other}");
        assert!(hostname("node-a", Ok(Some(Node::default()))).is_bad());
        assert!(hostname("node-a", Ok(None)).to_string().contains("--node"));
    }

    #[test]
    fn a_driver_that_pods_would_wait_for_is_told() {
        let driver = |attach: bool| -> CSIDriver {
            serde_json::from_value(serde_json::json!({ "spec": { "attachRequired": attach } }))
                .expect("a driver")
        };
        assert!(!driver_object("d", Ok(Some(driver(false)))).is_bad());
        assert!(driver_object("d", Ok(Some(driver(true)))).is_bad());
        assert!(driver_object("d", Ok(None)).to_string().contains("csidriver.yaml"));
    }

    #[test]
    fn in_a_pod_a_mount_that_the_kubelet_cannot_see_is_bad() {
        // Whether it is shared depends on where this runs.
        let path = Path::new("/proc");
        let is_shared = OsMounts::is_shared(path).expect("procfs is a mount");
        assert_eq!(shared(path, true).is_bad(), !is_shared);
        assert!(!shared(path, false).is_bad());
        assert!(shared(Path::new("/nowhere/at/all"), false).is_bad());
    }

    #[test]
    fn a_kubelet_that_isnt_there_is_told() {
        let directory = tempfile::tempdir().expect("a directory");
        let config = Config { kubelet: directory.path().to_owned(), ..Config::default() };
        let findings = kubelet(&config);
        assert!(findings.iter().all(Finding::is_bad) && findings.len() == 2);
        assert!(findings[0].to_string().contains("--kubelet"), "{}", findings[0]);
        std::os::unix::fs::symlink("/tmp", directory.path().join("pods")).expect("link");
        assert!(there(directory.path(), "pods").to_string().contains("no directory"));
    }
}
