//! `provisionerd check`: everything that `run` needs, looked at without changing anything.

use std::fmt;
use std::fs;
use std::net::TcpListener;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, ensure};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use nodekeel_fsquota::ProjectQuota;
use nodekeel_localstorage::Dir;
use nodekeel_provisioner::csi::OsMounts;

use crate::config::Config;
use crate::rights::{self, Right};
use crate::{cluster, print, volumes};

/// What something needed is missing.
const MISSING: u8 = 4;

/// What was found about one thing.
#[derive(Debug)]
enum Finding {
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
    match volumes::lock(&base) {
        Ok(true) => {}
        Ok(false) => {
            findings.push(Finding::Warning("another instance works on the directory at the moment".into()))
        }
        Err(error) => findings.push(Finding::Bad(anyhow!(error).context("lock the directory"))),
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
    findings.push(shared(&config.kubelet.join("pods")));
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
fn shared(path: &Path) -> Finding {
    let is_shared = || -> Result<bool> {
        let device = fs::metadata(path)?.dev();
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
        let number = (rustix::fs::major(device), rustix::fs::minor(device));
        let number = format!("{}:{}", number.0, number.1);
        // The mount that the path is on: the longest mount point above it on its device, the last of its kind.
        let above = mounts.lines().filter_map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            let point = fields.get(4)?;
            let is_above = fields.get(2) == Some(&number.as_str()) && path.starts_with(point);
            is_above.then(|| (point.len(), fields.iter().any(|field| field.starts_with("shared:"))))
        });
        Ok(above.max_by_key(|(length, _)| *length).is_some_and(|(_, is_shared)| is_shared))
    };
    match is_shared() {
        Ok(true) => Finding::Good(format!("what is mounted below {} is seen by the kubelet", path.display())),
        Ok(false) => Finding::Warning(format!(
            "{} is on no shared mount: where this is a container, give it mountPropagation: Bidirectional, and make the \
             host's mount shared (`mount --make-rshared /`)",
            path.display()
        )),
        Err(error) => Finding::Bad(error.context(format!("look at the mounts of {}", path.display()))),
    }
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
            findings.extend(allowed(&client).await);
            findings
        }
        Err(error) => {
            let what = "ask the API server: is it up, and is the kubeconfig (or the service account) right?";
            vec![Finding::Bad(anyhow!(error).context(what))]
        }
    }
}

async fn allowed(client: &Client) -> Vec<Finding> {
    let mut missing = Vec::new();
    for right in rights::needed() {
        match is_allowed(client, right).await {
            Ok(true) => {}
            Ok(false) => missing.push(Finding::Bad(denied(right))),
            Err(error) => return vec![Finding::Bad(error.context("ask the API server what is allowed"))],
        }
    }
    match missing.is_empty() {
        true => vec![Finding::Good("the API server allows what is needed".into())],
        false => missing,
    }
}

fn denied(Right { group, resource, verb }: Right) -> anyhow::Error {
    let group = if group.is_empty() { "core" } else { group };
    anyhow!(
        "the API server doesn't allow {verb} on {resource} ({group}): apply deploy/rbac.yaml, or grant it"
    )
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
    fn a_missing_right_is_named_with_what_to_do() {
        let right = Right { group: "", resource: "persistentvolumes", verb: "delete" };
        let text = denied(right).to_string();
        assert!(text.contains("delete on persistentvolumes (core)") && text.contains("rbac.yaml"), "{text}");
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
