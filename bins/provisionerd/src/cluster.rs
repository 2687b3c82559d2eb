//! The API server.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// How long a connection may be silent. Watches tell something each minute (a bookmark), and are ended by the server within
/// five; so nothing that works is as silent as this.
const SILENCE: Duration = Duration::from_secs(330);

/// A client, by this kubeconfig or by what the environment says.
pub(crate) async fn client(kubeconfig: Option<&Path>) -> Result<Client> {
    let mut config = match kubeconfig {
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
    // A peer that is gone never answers; without this, a list would wait for ever.
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    Client::try_from(config).context("make a client for the API server")
}
