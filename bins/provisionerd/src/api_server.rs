//! The client of the API server.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Maximum idle time of a connection. Watches get a bookmark every minute, and the server closes them within
/// five minutes; so no working connection is idle for this long.
const READ_TIMEOUT: Duration = Duration::from_secs(330);

/// Creates a client from this kubeconfig, or from the environment.
pub(crate) async fn api_client(kubeconfig: Option<&Path>) -> Result<Client> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .with_context(|| format!("can't read kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(|| format!("can't use kubeconfig {}", path.display()))?
        }
        None => Config::infer()
            .await
            .context("can't find the API server: set --kubeconfig, or run in a pod with a service account")?,
    };
    // A dead peer never answers; without this, a list would block forever.
    config.read_timeout = Some(READ_TIMEOUT);
    config.reset_reader_on_write = true;
    Client::try_from(config).context("can't create the client of the API server")
}
