//! The kubelet's part, as its plugin watcher plays it.

use std::fmt::Write as _;
use std::path::Path;

use thiserror::Error;
use tonic::Status;
use tonic::codegen::http::uri::InvalidUri;
use tonic::transport::{Channel, Endpoint, Uri};

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
    /// The kubelet names the socket's path as the host, and in this one that is something that servers refuse.
    #[error("call the plugin by the path of its socket")]
    Host(#[source] InvalidUri),
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
        let origin = Uri::try_from(format!("http://{}", host(registration))).map_err(KubeletError::Host)?;
        let channel =
            endpoint(registration)?.origin(origin).connect().await.map_err(KubeletError::Connect)?;
        let mut registration = RegistrationClient::new(channel);
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
    endpoint(socket)?.connect().await.map_err(KubeletError::Connect)
}

fn endpoint(socket: &Path) -> Result<Endpoint, KubeletError> {
    Endpoint::try_from(format!("unix://{}", socket.display())).map_err(KubeletError::Connect)
}

/// The host that the kubelet asks for at a registration socket.
///
/// *Source:* grpc-go, `clientconn.go`, `encodeAuthority`.
fn host(socket: &Path) -> String {
    let mut host = String::new();
    for byte in socket.as_os_str().as_encoded_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => host.push(char::from(*byte)),
            _ if b"-_.~!$&'()*+,;=:[]@".contains(byte) => host.push(char::from(*byte)),
            // Writing into a string can't fail.
            _ => drop(write!(host, "%{byte:02X}")),
        }
    }
    host
}
