//! The client of the control API.

mod entry;
mod parser;

use std::io;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

pub use entry::{EntryError, level_from_wire, level_to_wire};
pub use parser::parser_of;

use crate::v1::control_client::ControlClient;

/// The generated client on its connection.
pub type Client = ControlClient<Channel>;

/// The socket of a node whose configuration does not say otherwise.
pub const DEFAULT_SOCKET: &str = "/var/lib/nodekeel/run/control.sock";

/// Why a node can't be reached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// There is no socket: no node has run with this data directory, or the path is wrong.
    #[error("no node at {}: there is no such socket; start noded, or give its socket with --socket", path.display())]
    Absent {
        /// The socket's path.
        path: PathBuf,
    },
    /// There is a socket and nobody listens: the node has died.
    #[error("no node at {}: the socket is dead; start noded again", path.display())]
    Dead {
        /// The socket's path.
        path: PathBuf,
    },
    /// The socket is not for this user.
    #[error("no permission for {}: only the user that runs noded, and root, may use it", path.display())]
    Permission {
        /// The socket's path.
        path: PathBuf,
    },
    /// Something else is wrong with the path.
    #[error("can't connect to {}", path.display())]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// Connects to the control API of the node behind a socket. The client is cheap to clone.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect(path: &Path) -> Result<Client, ConnectError> {
    // The first connection is made here, where the kernel's answer is still at hand; tonic would only tell of a
    // transport that failed.
    let mut first = Some(UnixStream::connect(path).await.map_err(|source| refused(path, source))?);
    let path = path.to_owned();
    let connector = tower::service_fn(move |_| {
        let (first, path) = (first.take(), path.clone());
        async move {
            let stream = match first {
                Some(stream) => stream,
                None => UnixStream::connect(path).await?,
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    // The address only fills the request's `:authority`.
    let channel = Endpoint::from_static("http://node").connect_with_connector_lazy(connector);
    Ok(Client::new(channel))
}

fn refused(path: &Path, source: io::Error) -> ConnectError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => ConnectError::Absent { path },
        io::ErrorKind::ConnectionRefused => ConnectError::Dead { path },
        io::ErrorKind::PermissionDenied => ConnectError::Permission { path },
        _ => ConnectError::Connect { path, source },
    }
}
