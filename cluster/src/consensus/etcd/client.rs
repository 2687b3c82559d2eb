//! Clients of this node's member, and of others.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use etcd_client as api;
use nodekeel_localstorage::pki::Credentials;
use rustix::net::sockopt;
use tokio::net::TcpStream;
use tonic::transport::Endpoint;

use super::peer_client::{CONNECT_TIMEOUT, PeerClient};
use crate::BoxError;
use crate::consensus::{ConsensusError, MemberName, PeerUrl};

/// How long a connection to the member of this host may be half-open: a filter or a lost address may let nothing come back
/// on it, while the member is well. TCP keeps such a connection for a quarter of an hour; the kernel of a process that is
/// frozen still acknowledges what it gets. Much longer than a machine that has too much to do delays that: a new connection
/// costs it more.
const HALF_OPEN_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause after which the kernel asks for an acknowledgement where nothing is sent, as in a watch.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);

/// The answer of a member that has no leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WithoutLeader {
    /// With an error, instead of silence.
    Fails,
    /// From the member's own data: for questions that need no leader.
    IsAnswered,
}

/// A client of this node's member with these credentials, which connects with its first call, and again when the connection
/// is lost. The server's certificate is checked by name, at any address.
pub(super) async fn connect(
    name: &MemberName,
    socket: SocketAddr,
    credentials: &Credentials,
    without_leader: WithoutLeader,
) -> Result<api::Client, ConsensusError> {
    let connected = async {
        let url = PeerUrl::new(socket.ip(), socket.port());
        let channel = PeerClient::new(credentials)?.channel(name.as_str(), url, end_half_open)?;
        let options = api::ConnectOptions::new().with_require_leader(without_leader == WithoutLeader::Fails);
        Ok::<_, BoxError>(api::Client::from_channel(api::Channel::Tonic(channel), Some(options)).await?)
    };
    connected.await.map_err(ConsensusError::backend("connect to etcd"))
}

/// Lets the kernel end the connection once it is half-open.
fn end_half_open(connection: &TcpStream) -> io::Result<()> {
    let timeout = u32::try_from(HALF_OPEN_TIMEOUT.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(connection, timeout)?;
    sockopt::set_tcp_keepidle(connection, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(connection, Duration::from_secs(1))?;
    Ok(sockopt::set_socket_keepalive(connection, true)?)
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
