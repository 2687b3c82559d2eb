//! A control plane for the tests of the program, and the program in it.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::Value;
use testbed::{Kube, User};
use tokio::process::{Child, Command};

/// How long what has to come is waited for, on a machine that does much else.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) const DRIVER: &str = "volumes.nodekeel";

/// A control plane with what deploy/ puts into it.
pub(crate) fn start() -> Kube {
    let account = User::service_account("nodekeel", "provisionerd");
    let builder = Kube::builder().user(account).user(User::new("nobody")).controller_requests_per_second(500);
    let kube = builder.start().expect("a control plane");
    kube.apply(include_str!("../../../../deploy/namespace.yaml")).expect("the namespace");
    kube.apply(include_str!("../../../../deploy/rbac.yaml")).expect("the rights");
    kube.apply(include_str!("../../../../deploy/storageclass.yaml")).expect("the classes");
    kube
}

/// The kubeconfig of the account that deploy/rbac.yaml is for.
pub(crate) fn account(kube: &Kube) -> PathBuf {
    kube.kubeconfig("system:serviceaccount:nodekeel:provisionerd").expect("an account")
}

pub(crate) async fn admin(kube: &Kube) -> Client {
    let file = Kubeconfig::read_from(kube.kubeconfig("admin").expect("a user")).expect("a kubeconfig");
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
    Client::try_from(config.expect("a configuration")).expect("a client")
}

pub(crate) fn claims(client: &Client) -> Api<PersistentVolumeClaim> {
    Api::namespaced(client.clone(), "default")
}

pub(crate) fn volumes(client: &Client) -> Api<PersistentVolume> {
    Api::all(client.clone())
}

pub(crate) async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Clone + Debug + DeserializeOwned + serde::Serialize,
{
    let object: K = serde_json::from_value(object).expect("an object of its kind");
    api.create(&PostParams::default(), &object).await.expect("the API server takes it")
}

/// Waits until an object is as it should be; `None` is one that isn't there.
pub(crate) async fn until<K>(api: &Api<K>, name: &str, is_so: impl Fn(Option<&K>) -> bool) -> Option<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut states = pin!(watch_object(api.clone(), name).default_backoff());
    let mut last = None;
    let wait = async {
        while let Some(state) = states.next().await {
            if let Ok(object) = state {
                if is_so(object.as_ref()) {
                    return object;
                }
                last = object;
            }
        }
        panic!("a watch never ends")
    };
    let found = tokio::time::timeout(PATIENCE, wait).await;
    found.unwrap_or_else(|_| panic!("{name} is not as it should be: {last:?}"))
}

/// The program with a directory of its own, for one node.
pub(crate) struct Program {
    pub(crate) base: tempfile::TempDir,
    pub(crate) books: tempfile::TempDir,
    pub(crate) node: String,
    pub(crate) kubeconfig: PathBuf,
}

impl Program {
    pub(crate) fn new(kubeconfig: &Path, node: String) -> Self {
        let [base, books] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        Self { base, books, node, kubeconfig: kubeconfig.to_owned() }
    }

    /// Starts it. It is killed where the child is dropped.
    pub(crate) fn start(&self, environment: &[(&str, &str)]) -> Child {
        let mut command = Command::new(env!("CARGO_BIN_EXE_provisionerd"));
        command.args(["run", "--no-csi", "--listen=127.0.0.1:0", "--driver", DRIVER, "--node", &self.node]);
        command.arg("--directory").arg(self.base.path()).arg("--kubeconfig").arg(&self.kubeconfig);
        command.env_clear().env("PROVISIONERD_BOOKS", self.books.path()).envs(environment.iter().copied());
        let log =
            fs::OpenOptions::new().create(true).append(true).open(self.books.path().with_extension("log"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.expect("a log"));
        command.kill_on_drop(true).spawn().expect("it starts")
    }

    /// What it has said so far, in all its lives.
    pub(crate) fn said(&self) -> String {
        fs::read_to_string(self.books.path().with_extension("log")).unwrap_or_default()
    }

    /// The names in one of its directories.
    pub(crate) fn names(&self, place: &str) -> Vec<String> {
        names(&self.base.path().join(place))
    }

    /// The projects that are on its books.
    pub(crate) fn projects(&self) -> Vec<String> {
        names(self.books.path())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.books.path().with_extension("log"));
    }
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
}
