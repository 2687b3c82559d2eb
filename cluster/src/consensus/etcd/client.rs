//! The client of this node's member, at its socket.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use etcd_client as api;
use hyper_util::rt::TokioIo;
use nodekeel_localstorage::tree::LayoutDir;
use tokio::net::UnixStream;
use tonic::transport::Endpoint;

use super::local_member::CLIENT_SOCKET;
use crate::BoxError;
use crate::consensus::ConsensusError;

/// The answer of a member that has no leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WithoutLeader {
    /// With an error, instead of silence.
    Fails,
    /// From the member's own data: for questions that need no leader.
    IsAnswered,
}

/// A client of this node's member, whose socket is in this directory. It connects with its first call, and again when the
/// connection is lost.
pub(super) async fn connect(
    directory: &LayoutDir,
    without_leader: WithoutLeader,
) -> Result<api::Client, ConsensusError> {
    let directory = directory.path().to_owned();
    let connected = async {
        // The connector dials the socket; the URL only names an authority.
        let endpoint = Endpoint::from_static("http://localhost");
        let connector = tower::service_fn(move |_| {
            let directory = directory.clone();
            async move { connect_socket(&directory).await.map(TokioIo::new) }
        });
        let channel = api::Channel::Tonic(endpoint.connect_with_connector_lazy(connector));
        let options = api::ConnectOptions::new().with_require_leader(without_leader == WithoutLeader::Fails);
        Ok::<_, BoxError>(api::Client::from_channel(channel, Some(options)).await?)
    };
    connected.await.map_err(ConsensusError::backend("connect to etcd"))
}

/// The path of a data directory may be longer than that of a socket may be: 107 bytes. *Source:* unix(7).
async fn connect_socket(directory: &Path) -> io::Result<UnixStream> {
    let directory = File::open(directory)?;
    UnixStream::connect(format!("/proc/self/fd/{}/{CLIENT_SOCKET}", directory.as_raw_fd())).await
}
