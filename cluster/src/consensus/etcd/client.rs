//! A client of this node's member.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use etcd_client as api;
use nodekeel_localstorage::pki::Credentials;

use super::{EtcdConfig, backend};
use crate::consensus::{ConsensusError, MemberName};

/// How long a connection may take to be made. The member is on the same machine.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);

/// Connects with these credentials to the member, which is known by its name, whatever address it has.
pub(super) async fn connect(
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
        .with_connect_timeout(CONNECT_WITHIN)
        // A member that loses its leader says so, instead of being silent.
        .with_require_leader(true);
    let url = format!("https://{}", SocketAddr::new(address, config.client_port));
    let connected = api::Client::connect([url.as_str()], Some(options)).await;
    connected.map_err(|error| backend("make a client of etcd")(error))
}
