//! The client of the API server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use thiserror::Error;

/// Maximum idle time of a connection. Watches get a bookmark every minute, and the server closes them within
/// five minutes; so no working connection is idle for this long.
const READ_TIMEOUT: Duration = Duration::from_secs(330);

/// The API server can't be found, or not be called with what is configured.
#[derive(Debug, Error)]
pub(crate) enum ApiClientError {
    #[error("can't read kubeconfig {}: correct it, or set another --kubeconfig", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: KubeconfigError,
    },
    #[error("can't use kubeconfig {}: correct it, or set another --kubeconfig", path.display())]
    Use {
        path: PathBuf,
        #[source]
        source: KubeconfigError,
    },
    #[error("can't find the API server: set --kubeconfig, or run in a pod with a service account")]
    Infer(#[source] InferConfigError),
    #[error("can't create the client of the API server")]
    Create(#[source] kube::Error),
}

/// Creates a client from this kubeconfig, or from the environment.
pub(crate) async fn api_client(kubeconfig: Option<&Path>) -> Result<Client, ApiClientError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)
                .map_err(|source| ApiClientError::Read { path: path.to_owned(), source })?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(|source| ApiClientError::Use { path: path.to_owned(), source })?
        }
        None => Config::infer().await.map_err(ApiClientError::Infer)?,
    };
    prepare_unverified(&mut config);
    // A dead peer never answers; without this, a list would block forever.
    config.read_timeout = Some(READ_TIMEOUT);
    // Each request starts the time again: a connection that was idle before is not a dead one.
    config.reset_reader_on_write = true;
    Client::try_from(config).map_err(ApiClientError::Create)
}

/// With `insecure-skip-tls-verify`, no certificate is verified: then the client needs no trust store, which a small
/// system does not have and without which it would not be created.
fn prepare_unverified(config: &mut Config) {
    if config.accept_invalid_certs && config.root_cert.is_none() && config.root_cert_file.is_none() {
        config.root_cert = Some(Vec::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_client_that_verifies_nothing_goes_without_a_trust_store() {
        let mut config = Config::new("https://localhost:6443".parse().expect("a URL"));
        prepare_unverified(&mut config);
        assert_eq!(config.root_cert, None, "the trust store of the system");
        config.accept_invalid_certs = true;
        prepare_unverified(&mut config);
        assert_eq!(config.root_cert, Some(Vec::new()));
    }
}
