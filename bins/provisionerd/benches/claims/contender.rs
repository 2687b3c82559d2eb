//! The provisioners that are compared.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use nodekeel_provisioner::{DriverName, NodeName, ProvisionerIdentity};
use testbed::{Daemon, ScratchDir};

use crate::bench_cluster::BenchCluster;

/// The line that a child of this program prints once its first lists are complete.
pub(crate) const READY: &str = "serving";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    Ours,
    Null,
    /// The provisionerd binary.
    Program,
    /// The local-path-provisioner of k3s.
    LocalPath,
}

impl Contender {
    pub(crate) const ALL: [Self; 4] = [Self::Ours, Self::Null, Self::Program, Self::LocalPath];

    /// Its name, also that of its StorageClass.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Null => "null",
            Self::Program => "program",
            Self::LocalPath => "local-path",
        }
    }

    pub(crate) fn driver(self) -> String {
        format!("{}.bench.nodekeel", self.name())
    }

    pub(crate) fn node(self) -> String {
        format!("node-{}", self.name())
    }

    pub(crate) fn identity(self, finalizer: Option<&str>) -> Result<ProvisionerIdentity> {
        let (driver, node) = (DriverName::try_new(self.driver())?, NodeName::try_new(self.node())?);
        Ok(ProvisionerIdentity { driver, node, finalizer: finalizer.map(str::to_owned), store: None })
    }

    /// Starts a child of this program as this contender.
    pub(crate) fn start(self, cluster: &BenchCluster) -> Result<Daemon> {
        let scratch = ScratchDir::new()?;
        let mut command =
            Command::new(std::env::current_exe().context("find the executable of this program")?);
        command.env_clear().arg(self.name()).arg(cluster.account_kubeconfig()?);
        if self == Self::Ours {
            command.arg(scratch.path());
        }
        let log = scratch.path().join("output.log");
        Daemon::start(command, scratch, || {
            let text = std::fs::read_to_string(&log).context("read the log")?;
            ensure!(text.contains(READY), "{} is not ready yet", self.name());
            Ok(())
        })
    }
}

pub(crate) async fn api_client(kubeconfig: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig).context("read the kubeconfig")?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Client::try_from(config).context("create the client")
}
