//! Clients of this node's member, and of others.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use etcd_client as api;
use nodekeel_localstorage::pki::Credentials;
use tonic::transport::Endpoint;

use super::{EtcdConfig, backend_error};
use crate::BoxError;
use crate::consensus::{ConsensusError, MemberName};

/// The timeout of a connection attempt. The member is on the same host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects to this node's member with these credentials. The server's certificate is checked by name, whatever
/// its address.
pub(super) async fn connect_client(
    config: &EtcdConfig,
    name: &MemberName,
    address: IpAddr,
    credentials: &Credentials,
) -> Result<api::Client, ConsensusError> {
    let options =
        connect_options().with_tls(tls_options(name, credentials)).with_connect_timeout(CONNECT_TIMEOUT);
    connect_with(config, address, options).await
}

async fn connect_with(
    config: &EtcdConfig,
    address: IpAddr,
    options: api::ConnectOptions,
) -> Result<api::Client, ConsensusError> {
    let url = format!("https://{}", SocketAddr::new(address, config.client_port));
    let connected = api::Client::connect([url.as_str()], Some(options)).await;
    connected.map_err(|error| backend_error("connect to etcd")(error))
}

/// Like [`connect_client`], for questions that the member answers without a leader.
pub(super) async fn connect_without_leader(
    config: &EtcdConfig,
    name: &MemberName,
    address: IpAddr,
    credentials: &Credentials,
) -> Result<api::Client, ConsensusError> {
    let options = api::ConnectOptions::new()
        .with_tls(tls_options(name, credentials))
        .with_connect_timeout(CONNECT_TIMEOUT);
    connect_with(config, address, options).await
}

/// Connects to a member at its URL from this address: a certificate that names addresses is accepted from those
/// alone.
pub(super) async fn connect_from(
    address: IpAddr,
    url: &str,
    name: &MemberName,
    credentials: &Credentials,
    needs_leader: bool,
) -> Result<api::Client, BoxError> {
    let endpoint = Endpoint::from_shared(url.to_owned())?
        .tls_config(tls_options(name, credentials))?
        .connect_timeout(CONNECT_TIMEOUT)
        .local_address(Some(address));
    let channel = api::Channel::Tonic(endpoint.connect_lazy());
    let options = api::ConnectOptions::new().with_require_leader(needs_leader);
    Ok(api::Client::from_channel(channel, Some(options)).await?)
}

fn tls_options(name: &MemberName, credentials: &Credentials) -> api::TlsOptions {
    let (certificate, key) = (credentials.certificate.to_pem(), credentials.key.to_pem());
    api::TlsOptions::new()
        .domain_name(name.as_str())
        .ca_certificate(api::Certificate::from_pem(credentials.ca.to_pem()))
        .identity(api::Identity::from_pem(certificate, key.as_bytes()))
}

/// A member that loses its leader returns an error instead of going silent.
fn connect_options() -> api::ConnectOptions {
    api::ConnectOptions::new().with_require_leader(true)
}
