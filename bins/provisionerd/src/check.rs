//! `provisionerd check`: checks everything that `run` needs, without changing anything.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use nodekeel_fsquota::ProjectQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::BindMounter;
use nodekeel_provisioner::{
    DirStore, FINALIZER, NodeName, ProvisionerIdentity, StoreAction, StoreIdentity, VolumeId, plan_store,
    required_volume,
};

use crate::config::DaemonConfig;
use crate::permissions::{self, ApiPermission, ScopedPermission};
use crate::{api_server, print_stdout, rules_review, volumes};

/// The exit code for a missing requirement.
const EXIT_CHECK_FAILED: u8 = 4;

/// Timeout of the metrics of a running instance on this machine.
const METRICS_TIMEOUT: Duration = Duration::from_secs(2);

/// What grants the permissions.
const RBAC_MANIFEST: &str = "deploy/rbac.yaml";

/// More than the metrics of an instance.
const MAX_METRICS_BYTES: u64 = 4 << 20;

/// The result of one check.
#[derive(Debug)]
pub(crate) enum CheckFinding {
    Pass(String),
    /// It works, but with a limitation.
    Warning(String),
    Failure(anyhow::Error),
}

impl CheckFinding {
    fn is_failure(&self) -> bool {
        matches!(self, Self::Failure(_))
    }

    fn from_result(found: Result<impl Into<String>>) -> Self {
        match found {
            Ok(text) => Self::Pass(text.into()),
            Err(error) => Self::Failure(error),
        }
    }
}

/// Formats the finding as one line.
impl fmt::Display for CheckFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (word, text) = match self {
            Self::Pass(text) => ("ok  ", text.clone()),
            Self::Warning(text) => ("warn", text.clone()),
            Self::Failure(error) => ("FAIL", format!("{error:#}")),
        };
        write!(f, "{word}  {}", text.replace('\n', " "))
    }
}

/// Prints a line for each finding; the exit code shows whether `run` would work.
pub(crate) fn run_checks(config: DaemonConfig) -> Result<ExitCode> {
    let mut findings = vec![CheckFinding::from_result(
        config.node_name().map(|node| format!("this is node {node}")).map_err(Into::into),
    )];
    let is_running = is_served_by_provisionerd(config.listen);
    findings.extend(check_directory(&config, is_running));
    if config.csi {
        findings.extend(check_kubelet(&config));
    }
    findings.push(check_address(&config, is_running));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("can't start the async runtime")?;
    findings.extend(runtime.block_on(check_api_server(&config)));
    Ok(print_findings(&findings))
}

/// Prints a line for each finding, and returns the exit code.
pub(crate) fn print_findings(findings: &[CheckFinding]) -> ExitCode {
    let text: String = findings.iter().map(|finding| format!("{finding}\n")).collect();
    let printed = print_stdout(&text);
    match findings.iter().any(CheckFinding::is_failure) {
        true => ExitCode::from(EXIT_CHECK_FAILED),
        false => printed,
    }
}

fn check_directory(config: &DaemonConfig, is_running: bool) -> Vec<CheckFinding> {
    let (base, quota) = match volumes::open_directory(config) {
        Ok(opened) => opened,
        Err(error) => return vec![CheckFinding::Failure(error.into())],
    };
    let mut findings = vec![CheckFinding::Pass(format!(
        "{} is on {} at {}, which enforces project quotas",
        config.directory.display(),
        quota.file_system().kind,
        quota.file_system().mount_point.display()
    ))];
    findings.extend(quota_warnings(&quota));
    if quota.file_system().mount_point == Path::new("/") {
        findings.push(CheckFinding::Warning(
            "volumes share the root file system: limits are not reservations, and full volumes fill it; use a \
             dedicated file system"
                .into(),
        ));
    }
    findings.push(check_writable(&base));
    match DirStore::is_in_use(&base) {
        Ok(false) => {}
        Ok(true) if is_running => {
            findings.push(CheckFinding::Pass("provisionerd is running and uses the directory".into()));
        }
        Ok(true) => findings.push(CheckFinding::Warning("another instance is using the directory".into())),
        Err(error) => findings.push(CheckFinding::Failure(
            anyhow!(error).context("can't check whether another instance uses the directory"),
        )),
    }
    findings
}

fn quota_warnings(quota: &ProjectQuota) -> impl Iterator<Item = CheckFinding> {
    quota.enforcement_gaps().into_iter().map(|warning| CheckFinding::Warning(warning.to_string()))
}

fn check_writable(base: &Dir) -> CheckFinding {
    let write =
        rustix::fs::accessat(base.as_fd(), ".", rustix::fs::Access::WRITE_OK, rustix::fs::AtFlags::EACCESS);
    CheckFinding::from_result(
        write
            .map(|()| "the directory is writable")
            .with_context(|| format!("can't write to {}: run as root", base.path().display())),
    )
}

fn check_kubelet(config: &DaemonConfig) -> Vec<CheckFinding> {
    let mut findings: Vec<_> = ["pods", "plugins_registry"]
        .into_iter()
        .map(|below| check_kubelet_dir(&config.kubelet, below))
        .collect();
    if findings.iter().any(CheckFinding::is_failure) {
        return findings;
    }
    findings.push(check_shared_mount(&config.kubelet.join("pods"), is_in_pod()));
    // The probe works with any directory.
    let probe = || -> Result<()> {
        let dir = Dir::open(&config.kubelet)?;
        Ok(BindMounter::probe_support(dir.as_fd())?)
    };
    let probed = probe().map(|()| "volumes can be mounted");
    findings.push(CheckFinding::from_result(
        probed.context("can't mount a volume: run as root, privileged, outside of user namespaces"),
    ));
    findings
}

fn check_kubelet_dir(kubelet: &Path, below: &str) -> CheckFinding {
    let path = kubelet.join(below);
    let found = fs::symlink_metadata(&path).with_context(|| {
        format!("can't find {}: start the kubelet, or set --kubelet to its --root-dir", path.display())
    });
    let is_dir = found.and_then(|file| {
        ensure!(file.is_dir(), "{} is not a directory: replace it by its target", path.display());
        Ok(format!("the kubelet's {} exists", path.display()))
    });
    CheckFinding::from_result(is_dir)
}

/// Checks that the kubelet sees mounts below a directory: it does if that is a shared mount, or outside of a
/// container.
///
/// Otherwise publishing seems to work, but pods write into a plain directory without a limit.
pub(crate) fn check_shared_mount(path: &Path, is_pod: bool) -> CheckFinding {
    let advice = || {
        format!(
            "{} is not on a shared mount: in a container, set mountPropagation: Bidirectional, and make the \
             host's mount shared (`mount --make-rshared /`)",
            path.display()
        )
    };
    match BindMounter::is_shared(path) {
        Ok(true) => CheckFinding::Pass(format!("the kubelet sees mounts below {}", path.display())),
        Ok(false) if is_pod => CheckFinding::Failure(anyhow!(advice())),
        Ok(false) => CheckFinding::Warning(advice()),
        Err(error) => CheckFinding::Failure(
            anyhow!(error).context(format!("can't read the mounts of {}", path.display())),
        ),
    }
}

/// Whether this is a container of a pod: the kubelet sets this variable in every one.
pub(crate) fn is_in_pod() -> bool {
    std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
}

fn check_address(config: &DaemonConfig, is_running: bool) -> CheckFinding {
    match TcpListener::bind(config.listen) {
        Err(_) if is_running => {
            CheckFinding::Pass(format!("provisionerd is running and serves {}", config.listen))
        }
        Ok(_) => CheckFinding::Pass(format!("{} is available to listen on", config.listen)),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => CheckFinding::Warning(format!(
            "{} is in use: stop the process that listens there, or set another --listen",
            config.listen
        )),
        Err(error) => CheckFinding::Failure(
            anyhow!(error).context(format!("can't listen on {}: set another --listen", config.listen)),
        ),
    }
}

/// Whether a running provisionerd serves its metrics at an address: `check` in its pod is not a second instance.
fn is_served_by_provisionerd(address: SocketAddr) -> bool {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, METRICS_TIMEOUT)?;
        stream.set_read_timeout(Some(METRICS_TIMEOUT))?;
        stream.write_all(
            format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes(),
        )?;
        let mut answer = String::new();
        stream.take(MAX_METRICS_BYTES).read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().is_ok_and(|answer| answer.contains("provisionerd_build_info"))
}

async fn check_api_server(config: &DaemonConfig) -> Vec<CheckFinding> {
    let client = match api_server::api_client(config.kubeconfig.as_deref()).await {
        Ok(client) => client,
        Err(error) => return vec![CheckFinding::Failure(error)],
    };
    let version = client.apiserver_version().await;
    match version {
        Ok(version) => {
            let mut findings = vec![CheckFinding::Pass(format!(
                "the API server answers: Kubernetes {}",
                version.git_version
            ))];
            findings
                .push(check_scoped_permissions(&client, needed_permissions(&client), RBAC_MANIFEST).await);
            findings.extend(check_api_objects(config, &client).await);
            if let Ok(node) = config.node_name() {
                findings.push(check_store(config, node, &client).await);
            }
            findings
        }
        Err(error) => {
            let what = "can't call the API server: check that it is up, and that the kubeconfig (or the service account) is valid";
            vec![CheckFinding::Failure(anyhow!(error).context(what))]
        }
    }
}

/// Checks the API objects that pods need for their volumes.
pub(crate) async fn check_api_objects(config: &DaemonConfig, client: &Client) -> Vec<CheckFinding> {
    let mut findings = Vec::new();
    if let Ok(name) = config.node_name() {
        let node = Api::<Node>::all(client.clone()).get_opt(name.as_str()).await;
        findings.push(check_node_label(config, &name, node));
    }
    if config.csi {
        let driver = Api::<CSIDriver>::all(client.clone()).get_opt(config.driver.as_str()).await;
        findings.push(check_csi_driver(config.driver.as_str(), driver));
    }
    findings
}

/// Checks the label that the node affinity of volumes refers to. The kubelet sets it when it registers the
/// driver, so that it may be missing before.
fn check_node_label(
    config: &DaemonConfig,
    name: &NodeName,
    node: kube::Result<Option<Node>>,
) -> CheckFinding {
    let node = match node {
        Ok(Some(node)) => node,
        Ok(None) => {
            return CheckFinding::Failure(anyhow!(
                "node {name} does not exist: set --node to its name in the API"
            ));
        }
        Err(error) => {
            return CheckFinding::Failure(
                anyhow!(error).context(format!("can't read node {name} from the API server")),
            );
        }
    };
    let key = config.driver.topology_key();
    match node.metadata.labels.unwrap_or_default().get(&key) {
        Some(label) if label == name.as_str() => {
            CheckFinding::Pass(format!("node {name} has the label {key}={name}"))
        }
        Some(label) => CheckFinding::Failure(anyhow!(
            "node {name} has {key}={label:?}, so no pod can use its volumes: `kubectl label node {name} {key}-`, and \
             restart provisionerd"
        )),
        None if config.csi => CheckFinding::Pass(format!(
            "node {name} exists; the kubelet adds the label {key} when it registers the driver"
        )),
        None => CheckFinding::Warning(format!(
            "node {name} has no label {key}, so no pod is scheduled to its volumes: without --no-csi, the kubelet \
             adds it"
        )),
    }
}

/// Checks that the directory is the store of the node's volumes.
async fn check_store(config: &DaemonConfig, node: NodeName, client: &Client) -> CheckFinding {
    let found = async {
        let base = Dir::open(&config.directory)?;
        let found = DirStore::read_identity(&base)?.map_or(StoreIdentity::Absent, StoreIdentity::Present);
        let volumes = base.open_dir("volumes").and_then(|volumes| volumes.list()).unwrap_or_default();
        let present: BTreeSet<VolumeId> =
            volumes.iter().filter_map(|entry| entry.name.as_os_str().to_str()?.parse().ok()).collect();
        let objects = Api::<PersistentVolume>::all(client.clone()).list(&ListParams::default()).await?;
        let driver = config.driver.clone();
        let identity = ProvisionerIdentity { driver, node, finalizer: Some(FINALIZER.to_owned()) };
        let required = objects.items.iter().filter_map(|object| required_volume(&identity, object));
        let missing = required.filter(|id| !present.contains(id)).count();
        match (plan_store(&identity, (&found, &present), &objects.items), found.id()) {
            (StoreAction::Reject(rejection), _) => Err(anyhow!(rejection)),
            (_, Some(id)) if missing > 0 => Ok(CheckFinding::Warning(format!(
                "{missing} volumes of this node are missing in store {id}: `provisionerd volumes` names them"
            ))),
            (_, Some(id)) => Ok(CheckFinding::Pass(format!("the directory is store {id}"))),
            (_, None) => Ok(CheckFinding::Pass(
                "the directory becomes a new store: no PersistentVolume of this node names one".into(),
            )),
        }
    };
    let found = found.await;
    found.unwrap_or_else(|error: anyhow::Error| {
        CheckFinding::Failure(
            error.context(format!("can't use the volumes in {}", config.directory.display())),
        )
    })
}

fn check_csi_driver(name: &str, driver: kube::Result<Option<CSIDriver>>) -> CheckFinding {
    match driver {
        Ok(Some(driver)) if driver.spec.attach_required == Some(false) => {
            match driver.spec.storage_capacity {
                Some(true) => CheckFinding::Pass(format!("CSIDriver {name} exists")),
                _ => CheckFinding::Warning(format!(
                    "CSIDriver {name} has storageCapacity: false, so pods are scheduled to nodes without free space: \
                 apply deploy/csidriver.yaml again"
                )),
            }
        }
        Ok(Some(_)) => CheckFinding::Failure(anyhow!(
            "CSIDriver {name} has attachRequired: true, so pods wait forever: apply deploy/csidriver.yaml again"
        )),
        Ok(None) => CheckFinding::Failure(anyhow!(
            "CSIDriver {name} does not exist, so pods wait forever: apply deploy/csidriver.yaml, with this name"
        )),
        Err(error) => CheckFinding::Failure(
            anyhow!(error).context(format!("can't read CSIDriver {name} from the API server")),
        ),
    }
}

/// All permissions that the provisioner needs.
fn needed_permissions(client: &Client) -> Vec<ScopedPermission> {
    let needed = permissions::required_permissions().map(ScopedPermission::from);
    needed.chain(permissions::namespace_permissions(client.default_namespace())).collect()
}

/// Checks the permissions with one call where all are listed: each node does so at each start.
pub(crate) async fn check_permissions(client: &Client) -> CheckFinding {
    let unlisted = rules_review::find_unlisted(client, needed_permissions(client)).await;
    check_scoped_permissions(client, unlisted, RBAC_MANIFEST).await
}

/// Checks that the API server grants permissions; `manifest` is what grants them.
pub(crate) async fn check_scoped_permissions(
    client: &Client,
    needed: impl IntoIterator<Item = ScopedPermission>,
    manifest: &str,
) -> CheckFinding {
    let mut missing = Vec::new();
    for right in needed {
        match is_allowed(client, &right).await {
            Ok(true) => {}
            Ok(false) => missing.push(right.permission),
            Err(error) => {
                return CheckFinding::Failure(error.context("can't query permissions at the API server"));
            }
        }
    }
    match missing.is_empty() {
        true => CheckFinding::Pass("the API server grants all permissions needed".into()),
        false => CheckFinding::Failure(missing_permissions(&missing, manifest)),
    }
}

fn missing_permissions(missing: &[ApiPermission], manifest: &str) -> anyhow::Error {
    let of_a_kind = missing.chunk_by(|a, b| (a.group, a.resource) == (b.group, b.resource));
    let kinds = of_a_kind.map(|rights| {
        let verbs: Vec<_> = rights.iter().map(|right| right.verb).collect();
        let group = if rights[0].group.is_empty() { "core" } else { rights[0].group };
        format!("{} on {} ({group})", verbs.join(", "), rights[0].resource)
    });
    let kinds = kinds.collect::<Vec<_>>().join("; ");
    anyhow!("missing permissions: {kinds}; apply {manifest}, or grant them")
}

async fn is_allowed(client: &Client, right: &ScopedPermission) -> Result<bool> {
    let ApiPermission { group, resource, verb } = right.permission;
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.into())),
        None => (resource, None),
    };
    let resource_attributes = ResourceAttributes {
        group: Some(group.into()),
        resource: Some(resource.into()),
        subresource,
        verb: Some(verb.into()),
        namespace: right.namespace.clone(),
        name: right.name.clone(),
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
        assert_eq!(CheckFinding::Failure(error).to_string(), "FAIL  look: first second");
        assert!(!CheckFinding::Warning("careful".into()).is_failure());
    }

    #[test]
    fn missing_permissions_are_one_line_with_a_hint() {
        let right = |resource, verb| ApiPermission { group: "", resource, verb };
        let missing =
            [right("persistentvolumes", "get"), right("persistentvolumes", "delete"), right("nodes", "get")];
        let text = missing_permissions(&missing, "deploy/rbac.yaml").to_string();
        assert!(text.contains("get, delete on persistentvolumes (core); get on nodes (core)"), "{text}");
        assert!(text.contains("deploy/rbac.yaml"), "{text}");
    }

    #[test]
    fn a_topology_label_other_than_the_nodes_name_fails_the_check() {
        let name = NodeName::try_new("node-a").expect("a node name");
        let find = |labels: serde_json::Value, csi: bool| {
            let node = serde_json::from_value(serde_json::json!({ "metadata": { "labels": labels } }));
            let config = DaemonConfig { csi, ..DaemonConfig::default() };
            check_node_label(&config, &name, Ok(Some(node.expect("a node"))))
        };
        let labels = |value: &str| serde_json::json!({ "topology.volumes.nodekeel/node": value });
        assert!(matches!(find(labels("node-a"), true), CheckFinding::Pass(_)));
        let other = find(labels("ip-10-0-0-1"), true);
        assert!(other.is_failure() && other.to_string().contains("kubectl label node node-a"), "{other}");
        let hostname = serde_json::json!({ "kubernetes.io/hostname": "ip-10-0-0-1" });
        assert!(matches!(find(hostname.clone(), true), CheckFinding::Pass(_)), "the kubelet adds the label");
        assert!(matches!(find(hostname, false), CheckFinding::Warning(_)), "and without CSI nothing does");
        let missing = check_node_label(&DaemonConfig::default(), &name, Ok(None));
        assert!(missing.to_string().contains("--node"), "{missing}");
    }

    #[test]
    fn a_check_beside_the_running_instance_does_not_warn_of_it() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let config =
            DaemonConfig { listen: listener.local_addr().expect("bound"), ..DaemonConfig::default() };
        let serve = |body: &'static str| {
            let listener = listener.try_clone().expect("a descriptor");
            std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().expect("a connection");
                let _ = stream.read(&mut [0; 1024]);
                let _ = write!(stream, "HTTP/1.1 200 OK\r\n\r\n{body}");
            })
        };
        for (body, is_ours) in [("provisionerd_build_info{version=\"0.1.0\"} 1\n", true), ("ok\n", false)] {
            let server = serve(body);
            let found = is_served_by_provisionerd(config.listen);
            server.join().expect("no panic");
            assert_eq!(found, is_ours, "{body}");
            let finding = check_address(&config, found);
            assert_eq!(matches!(finding, CheckFinding::Pass(_)), is_ours, "{finding}");
        }
    }

    #[test]
    fn a_driver_object_that_blocks_pods_fails_the_check() {
        let driver = |attach: bool, capacity: bool| -> CSIDriver {
            let spec = serde_json::json!({ "attachRequired": attach, "storageCapacity": capacity });
            serde_json::from_value(serde_json::json!({ "spec": spec })).expect("a driver")
        };
        let pass = check_csi_driver("d", Ok(Some(driver(false, true))));
        assert!(matches!(pass, CheckFinding::Pass(_)), "{pass}");
        let unaware = check_csi_driver("d", Ok(Some(driver(false, false))));
        assert!(
            matches!(&unaware, CheckFinding::Warning(text) if text.contains("storageCapacity")),
            "{unaware}"
        );
        assert!(check_csi_driver("d", Ok(Some(driver(true, true)))).is_failure());
        assert!(check_csi_driver("d", Ok(None)).to_string().contains("csidriver.yaml"));
    }

    #[test]
    fn in_a_pod_a_mount_hidden_from_the_kubelet_fails_the_check() {
        // The result depends on the environment of the test.
        let path = Path::new("/proc");
        let is_shared = BindMounter::is_shared(path).expect("procfs is a mount");
        assert_eq!(check_shared_mount(path, true).is_failure(), !is_shared);
        assert!(!check_shared_mount(path, false).is_failure());
        assert!(check_shared_mount(Path::new("/nowhere/at/all"), false).is_failure());
    }

    #[test]
    fn a_missing_kubelet_directory_fails_the_check() {
        let directory = tempfile::tempdir().expect("a directory");
        let config = DaemonConfig { kubelet: directory.path().to_owned(), ..DaemonConfig::default() };
        let findings = check_kubelet(&config);
        assert!(findings.iter().all(CheckFinding::is_failure) && findings.len() == 2);
        assert!(findings[0].to_string().contains("--kubelet"), "{}", findings[0]);
        std::os::unix::fs::symlink("/tmp", directory.path().join("pods")).expect("link");
        assert!(check_kubelet_dir(directory.path(), "pods").to_string().contains("not a directory"));
    }
}
