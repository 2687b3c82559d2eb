//! Who serves a claim.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use nodekeel_provisioner::{DriverName, Identity, NodeName};
use testbed::{Daemon, Scratch};

use crate::scene::Scene;

/// What a child of this program says once its first lists are complete.
pub(crate) const READY: &str = "serving";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Null,
    /// Provisionerd itself.
    Program,
}

impl Side {
    pub(crate) const ALL: [Self; 3] = [Self::Ours, Self::Null, Self::Program];

    /// Its name, which is its class's, too.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Null => "null",
            Self::Program => "program",
        }
    }

    pub(crate) fn driver(self) -> String {
        format!("{}.bench.nodekeel", self.name())
    }

    pub(crate) fn node(self) -> String {
        format!("node-{}", self.name())
    }

    pub(crate) fn identity(self, finalizer: Option<&str>) -> Result<Identity> {
        let (driver, node) = (DriverName::try_new(self.driver())?, NodeName::try_new(self.node())?);
        Ok(Identity { driver, node, finalizer: finalizer.map(str::to_owned) })
    }

    /// Starts a child of this program that is this side.
    pub(crate) fn start(self, scene: &Scene) -> Result<Daemon> {
        let scratch = Scratch::new()?;
        let mut command = Command::new(std::env::current_exe().context("find this program")?);
        command.env_clear().arg(self.name()).arg(scene.account()?);
        if self == Self::Ours {
            command.arg(scratch.path());
        }
        let log = scratch.path().join("output.log");
        Daemon::start(command, scratch, || {
            let said = std::fs::read_to_string(&log).context("read what it said")?;
            ensure!(said.contains(READY), "{} isn't ready", self.name());
            Ok(())
        })
    }
}

pub(crate) async fn client(kubeconfig: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig).context("read the kubeconfig")?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Client::try_from(config).context("make a client")
}
