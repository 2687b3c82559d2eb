//! The API server.

use std::path::Path;

use anyhow::{Context as _, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// A client, by this kubeconfig or by what the environment says.
pub(crate) async fn client(kubeconfig: Option<&Path>) -> Result<Client> {
    let config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("read the kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("use the kubeconfig {}", path.display()))?
        }
        None => Config::infer()
            .await
            .context("find the API server: give --kubeconfig, or run in a pod with a service account")?,
    };
    Client::try_from(config).context("make a client for the API server")
}
