//! The kubelet's part, as its plugin watcher plays it.

use std::path::Path;

use thiserror::Error;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use crate::csi::proto::csi::node_client::NodeClient;
use crate::csi::proto::csi::{NodeGetInfoRequest, NodeGetInfoResponse};
use crate::csi::proto::registration::registration_client::RegistrationClient;
use crate::csi::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};

/// A kubelet that has found a registration socket and asked who is there.
#[derive(Debug)]
pub struct Kubelet {
    registration: RegistrationClient<Channel>,
    /// What the plugin says of itself.
    pub info: PluginInfo,
}

/// What a kubelet didn't get.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KubeletError {
    /// Nobody listens at the socket.
    #[error("connect to the plugin")]
    Connect(#[source] tonic::transport::Error),
    /// A call was refused.
    #[error("call the plugin")]
    Call(#[source] Status),
}

impl Kubelet {
    /// Finds the plugin behind a registration socket.
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn find(registration: &Path) -> Result<Self, KubeletError> {
        let mut registration = RegistrationClient::new(connect(registration).await?);
        let info = registration.get_info(InfoRequest {}).await.map_err(KubeletError::Call)?.into_inner();
        Ok(Self { registration, info })
    }

    /// Takes the plugin: asks the node service at its endpoint for the node, and says that the driver is registered.
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn register(&mut self) -> Result<NodeGetInfoResponse, KubeletError> {
        let mut node = NodeClient::new(connect(Path::new(&self.info.endpoint)).await?);
        let info = node.node_get_info(NodeGetInfoRequest {}).await.map_err(KubeletError::Call)?.into_inner();
        self.notify(true, "").await?;
        Ok(info)
    }

    /// Says whether the driver is registered, and why not.
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn notify(&mut self, plugin_registered: bool, error: &str) -> Result<(), KubeletError> {
        let status = RegistrationStatus { plugin_registered, error: error.into() };
        self.registration.notify_registration_status(status).await.map_err(KubeletError::Call)?;
        Ok(())
    }
}

/// A channel to a unix socket.
///
/// # Errors
/// [`KubeletError::Connect`].
pub async fn connect(socket: &Path) -> Result<Channel, KubeletError> {
    let address = format!("unix://{}", socket.display());
    let endpoint = Endpoint::try_from(address).map_err(KubeletError::Connect)?;
    endpoint.connect().await.map_err(KubeletError::Connect)
}
