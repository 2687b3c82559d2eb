//! A fake of the kubelet's plugin watcher.

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

/// A kubelet that has found a registration socket and asked for the plugin's info.
#[derive(Debug)]
pub struct FakeKubelet {
    registration: RegistrationClient<Channel>,
    /// The plugin's info.
    pub info: PluginInfo,
}

/// A call of the fake kubelet failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum KubeletError {
    /// Connecting to the socket failed.
    #[error("can't connect to the CSI plugin's socket")]
    Connect(#[source] tonic::transport::Error),
    /// The kubelet sends the socket's path as the HTTP authority, and this path is not a valid one.
    #[error("can't use the path of the CSI plugin's socket as the HTTP authority")]
    Host(#[source] InvalidUri),
    /// The plugin rejected the call.
    #[error("the CSI plugin rejected a call")]
    Call(#[source] Status),
}

impl FakeKubelet {
    /// Connects to a registration socket and reads the plugin's info.
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn discover_plugin(registration: &Path) -> Result<Self, KubeletError> {
        let origin = Uri::try_from(format!("http://{}", encode_authority(registration)))
            .map_err(KubeletError::Host)?;
        let channel =
            socket_endpoint(registration)?.origin(origin).connect().await.map_err(KubeletError::Connect)?;
        let mut registration = RegistrationClient::new(channel);
        let info = registration.get_info(InfoRequest {}).await.map_err(KubeletError::Call)?.into_inner();
        Ok(Self { registration, info })
    }

    /// Registers the plugin: asks the node service at its endpoint for the node, and notifies the plugin of
    /// the registration.
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn register_plugin(&mut self) -> Result<NodeGetInfoResponse, KubeletError> {
        let mut node = NodeClient::new(connect_socket(Path::new(&self.info.endpoint)).await?);
        let info = node.node_get_info(NodeGetInfoRequest {}).await.map_err(KubeletError::Call)?.into_inner();
        self.notify_registration(true, "").await?;
        Ok(info)
    }

    /// Notifies the plugin whether the driver is registered, and why not.
    ///
    /// # Errors
    /// See [`KubeletError`].
    pub async fn notify_registration(
        &mut self,
        plugin_registered: bool,
        error: &str,
    ) -> Result<(), KubeletError> {
        let status = RegistrationStatus { plugin_registered, error: error.into() };
        self.registration.notify_registration_status(status).await.map_err(KubeletError::Call)?;
        Ok(())
    }
}

/// Connects to a unix socket.
///
/// # Errors
/// [`KubeletError::Connect`].
pub async fn connect_socket(socket: &Path) -> Result<Channel, KubeletError> {
    socket_endpoint(socket)?.connect().await.map_err(KubeletError::Connect)
}

fn socket_endpoint(socket: &Path) -> Result<Endpoint, KubeletError> {
    Endpoint::try_from(format!("unix://{}", socket.display())).map_err(KubeletError::Connect)
}

/// The HTTP authority that the kubelet sends to a registration socket.
///
/// *Source:* grpc-go, `clientconn.go`, `encodeAuthority`.
fn encode_authority(socket: &Path) -> String {
    let mut host = String::new();
    for byte in socket.as_os_str().as_encoded_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => host.push(char::from(*byte)),
            _ if b"-_.~!$&'()*+,;=:[]@".contains(byte) => host.push(char::from(*byte)),
            // Writing to a string cannot fail.
            _ => drop(write!(host, "%{byte:02X}")),
        }
    }
    host
}
