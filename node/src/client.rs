//! The client of the control API.

mod log_entry;
mod log_parser;
mod node_health;
mod remote;
mod reset_text;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

pub use log_entry::{InvalidLogEntry, level_from_wire, level_to_wire};
pub use log_parser::log_parser_for;
pub use remote::{connect_channel, connect_remote};
pub use reset_text::describe_reset;

use crate::access::PublicKey;
pub use crate::error_chain::format_chain;
use crate::program_name::program_name;
use crate::v1::control_client::ControlClient;

/// The generated client with its connection.
pub type NodeClient = ControlClient<Channel>;

/// The largest message: one with the header of an encrypted volume, of 16 MiB.
pub(crate) const MAX_CALL_BYTES: usize = 17 << 20;

/// The default control socket.
pub const DEFAULT_SOCKET: &str = "/var/lib/nodekeel/run/control.sock";

/// The reason why a node can't be reached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The socket does not exist: no node has run with this data directory, or the path is wrong.
    #[error("can't connect to {0} at {1}: the socket does not exist; start {0}, or use another path with --socket", program_name(), path.display())]
    NoSocket {
        /// The socket's path.
        path: PathBuf,
    },
    /// The socket does not exist, but a node runs: it has another socket, or its file or directory was removed. The node binds it
    /// again by itself, and when it gets SIGHUP.
    #[error(
        "can't connect to noded at {}: the socket does not exist, but process {pid} runs the node: use its control.socket with \
         --socket, or, if the socket was removed, `kill -HUP {pid}`",
        path.display()
    )]
    Gone {
        /// The socket's path.
        path: PathBuf,
        /// The process that holds the lock of the data directory.
        pid: u32,
    },
    /// No process listens on the socket: the node was killed. Start it again.
    #[error("can't connect to {0} at {1}: the socket is stale; start {0} again", program_name(), path.display())]
    Stale {
        /// The socket's path.
        path: PathBuf,
    },
    /// This user has no access. Only root and the user that runs noded have.
    #[error("can't connect to {0} at {1}: permission denied; only the user that runs {0}, and root, may use it", program_name(), path.display())]
    Permission {
        /// The socket's path.
        path: PathBuf,
    },
    /// A node on another machine can't be reached, or what answers there is no API of a node: look whether it runs, whether its
    /// `api.address` is this one, and whether a firewall is between.
    #[error("can't connect to the node at {address}: does it run, with this api.address?")]
    Remote {
        /// `HOST:PORT`.
        address: String,
        /// The error of the network, or of TLS.
        #[source]
        source: io::Error,
    },
    /// Another node answers at the address than the one that is known: it was installed anew, or someone is in between. Compare the
    /// found key with the one that `nodectl operator list` prints on the node before trusting it.
    #[error(
        "the node at {address} has another key than the one that is known, {expected}: if `nodectl operator list` on that node prints \
         {found}, give it by `nodectl context add`"
    )]
    WrongNode {
        /// `HOST:PORT`.
        address: String,
        /// The key that is known.
        expected: PublicKey,
        /// The key that it has.
        found: PublicKey,
    },
    /// The node does not admit the operator's key. It names it in its log.
    #[error(
        "the node at {address} does not admit your key, {key}: an admin can type `nodectl operator add NAME --key {key} --role ROLE` on a voter \
         of the cluster, or add it to the node's api.operators and reload"
    )]
    UnknownOperator {
        /// `HOST:PORT`.
        address: String,
        /// The operator's public key.
        key: PublicKey,
    },
    /// The kernel rejected the connection for another reason.
    #[error("can't connect to {} at {}", program_name(), path.display())]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
}

/// Connects to the control API of the node behind a socket. The client is cheap to clone.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect(path: &Path) -> Result<NodeClient, ConnectError> {
    // The first connection is opened here, where the kernel's error is available; tonic would only report a
    // failed transport.
    let mut first = Some(UnixStream::connect(path).await.map_err(|source| connect_error(path, source))?);
    let path = path.to_owned();
    // tonic calls the connector again when the connection breaks, for example after a restart of the node.
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
    // Lazy: the client has a connection already, and awaits nothing here that could fail a second time.
    let channel = Endpoint::from_static("http://node").connect_with_connector_lazy(connector);
    Ok(NodeClient::new(channel).max_decoding_message_size(MAX_CALL_BYTES))
}

fn connect_error(path: &Path, source: io::Error) -> ConnectError {
    // The kinds are those of connect(2) on a unix socket: ENOENT without a file, and ECONNREFUSED for a file on
    // which no process listens any more.
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => match find_node(&path) {
            Some(pid) => ConnectError::Gone { path, pid },
            None => ConnectError::NoSocket { path },
        },
        io::ErrorKind::ConnectionRefused => ConnectError::Stale { path },
        io::ErrorKind::PermissionDenied => ConnectError::Permission { path },
        _ => ConnectError::Connect { path, source },
    }
}

/// The process of the node whose socket is at `run/control.sock` in its data directory, if one holds the lock there.
///
/// *Source:* proc_locks(5): a lock of an open file has the type `OFDLCK`, and the inode after the device.
fn find_node(socket: &Path) -> Option<u32> {
    let lock = socket.parent()?.parent()?.join("lock");
    let inode = format!(":{} ", lock.metadata().ok()?.ino());
    let locks = fs::read_to_string("/proc/locks").ok()?;
    // A node that has ended leaves its pid in the file, and no lock.
    let is_locked = locks.lines().any(|line| line.contains("OFDLCK") && line.contains(&inode));
    fs::read_to_string(lock).ok().filter(|_| is_locked)?.trim().parse().ok()
}
