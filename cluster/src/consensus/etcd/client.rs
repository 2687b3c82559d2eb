//! A client of this node's member.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use etcd_client as api;
use nodekeel_localstorage::pki::Credentials;

use super::{EtcdConfig, backend_error};
use crate::consensus::{ConsensusError, MemberName};

/// The timeout of a connection attempt. The member is on the same host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects to the member with these credentials. The server's certificate is checked by name, whatever its
/// address.
pub(super) async fn connect_client(
    config: &EtcdConfig,
    name: &MemberName,
    address: IpAddr,
    credentials: &Credentials,
) -> Result<api::Client, ConsensusError> {
    let certificate = credentials.certificate.to_pem();
    let key = credentials.key.to_pem();
    let tls = api::TlsOptions::new()
        .domain_name(name.as_str())
        .ca_certificate(api::Certificate::from_pem(credentials.ca.to_pem()))
        .identity(api::Identity::from_pem(certificate, key.as_bytes()));
    let options = api::ConnectOptions::new()
        .with_tls(tls)
        .with_connect_timeout(CONNECT_TIMEOUT)
        // A member that loses its leader then returns an error instead of going silent.
        .with_require_leader(true);
    let url = format!("https://{}", SocketAddr::new(address, config.client_port));
    let connected = api::Client::connect([url.as_str()], Some(options)).await;
    connected.map_err(|error| backend_error("connect to etcd")(error))
}
