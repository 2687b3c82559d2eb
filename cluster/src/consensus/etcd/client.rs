//! Clients of this node's member, and of others.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use etcd_client as api;
use nodekeel_localstorage::pki::Credentials;
use tonic::transport::{Channel, Endpoint};

use crate::BoxError;
use crate::consensus::{ConsensusError, MemberName};

/// The timeout of a connection attempt. The member is on the same host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The answer of a member that has no leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WithoutLeader {
    /// With an error, instead of silence.
    Fails,
    /// From the member's own data: for questions that need no leader.
    IsAnswered,
}

/// Connects to this node's member with these credentials. The server's certificate is checked by name, at any
/// address.
pub(super) async fn connect(
    name: &MemberName,
    socket: SocketAddr,
    credentials: &Credentials,
    without_leader: WithoutLeader,
) -> Result<api::Client, ConsensusError> {
    let connected = async {
        // etcd-client keeps its options, and so would keep the private key in PEM.
        let endpoint = Endpoint::from_shared(format!("https://{socket}"))?
            .tls_config(tls_options(name, credentials))?
            .connect_timeout(CONNECT_TIMEOUT);
        let channel = api::Channel::Tonic(Channel::balance_list([endpoint].into_iter()));
        let options = api::ConnectOptions::new().with_require_leader(without_leader == WithoutLeader::Fails);
        api::Client::from_channel(channel, Some(options)).await
    };
    connected.await.map_err(ConsensusError::backend("connect to etcd"))
}

/// Connects to a member at its URL from this address: a certificate that names addresses is accepted from those
/// alone.
pub(super) async fn connect_from(
    address: IpAddr,
    url: &str,
    name: &MemberName,
    credentials: &Credentials,
    without_leader: WithoutLeader,
) -> Result<api::Client, BoxError> {
    // etcd-client's own options bind no local address, so the channel is built here.
    let endpoint = Endpoint::from_shared(url.to_owned())?
        .tls_config(tls_options(name, credentials))?
        .connect_timeout(CONNECT_TIMEOUT)
        .local_address(Some(address));
    let channel = api::Channel::Tonic(endpoint.connect_lazy());
    let options = api::ConnectOptions::new().with_require_leader(without_leader == WithoutLeader::Fails);
    Ok(api::Client::from_channel(channel, Some(options)).await?)
}

fn tls_options(name: &MemberName, credentials: &Credentials) -> api::TlsOptions {
    let (certificate, key) = (credentials.certificate.to_pem(), credentials.key.to_pem());
    api::TlsOptions::new()
        .domain_name(name.as_str())
        .ca_certificate(api::Certificate::from_pem(credentials.ca.to_pem()))
        .identity(api::Identity::from_pem(certificate, key.as_bytes()))
}
