//! The client of a node on another machine.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::AsyncBufReadExt as _;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};

use super::{ConnectError, MAX_CALL_BYTES, NodeClient};
use crate::access::{ClientTls, MismatchedKey, PrivateKey, PublicKey, RemoteNode};

/// A connection whose machine has gone is closed after the interval and the timeout, while there are calls.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects to the control API of a node on another machine. The client is cheap to clone.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect_remote(node: &RemoteNode) -> Result<NodeClient, ConnectError> {
    let channel = connect_channel(node.address.clone(), node.node_key, &node.operator_key).await?;
    Ok(NodeClient::new(channel).max_decoding_message_size(MAX_CALL_BYTES))
}

/// Connects to the node with this key, as the operator or the node with the other one: for any service of its API. The channel is
/// cheap to clone.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect_channel(
    address: String,
    node: PublicKey,
    caller: &PrivateKey,
) -> Result<Channel, ConnectError> {
    let tls = ClientTls::new(node, caller).map_err(|source| ConnectError::Remote {
        address: address.clone(),
        source: io::Error::other(source),
    })?;
    let target = Arc::new(Target { address, tls, node, operator: caller.public_key() });
    // Here the reason is at hand; tonic would only report a failed transport.
    let mut first = Some(target.open().await?);
    // tonic calls the connector again when the connection breaks.
    let connector = tower::service_fn(move |_| {
        let (first, target) = (first.take(), Arc::clone(&target));
        async move {
            let stream = match first {
                Some(stream) => stream,
                None => target.open().await.map_err(io::Error::other)?,
            };
            Ok::<_, io::Error>(TokioIo::new(stream))
        }
    });
    // A stream whose node has lost its power ends, too.
    let endpoint = Endpoint::from_static("http://node")
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT);
    Ok(endpoint.connect_with_connector_lazy(connector))
}

struct Target {
    address: String,
    tls: ClientTls,
    node: PublicKey,
    operator: PublicKey,
}

impl Target {
    async fn open(&self) -> Result<TlsStream<TcpStream>, ConnectError> {
        let failed = |source| ConnectError::Remote { address: self.address.clone(), source };
        let mut stream = self.tls.connect(&self.address).await.map_err(|error| self.explain(error))?;
        // The handshake ends here before the node looks at the operator's key. Its answer is an alert, or the first frame of HTTP/2,
        // which a server sends unasked (RFC 9113, section 3.4).
        match stream.fill_buf().await {
            Ok([]) => Err(failed(io::ErrorKind::UnexpectedEof.into())),
            Ok(_) => Ok(stream),
            Err(error) => Err(self.explain(error)),
        }
    }

    fn explain(&self, error: io::Error) -> ConnectError {
        let address = self.address.clone();
        if let Some(found) = MismatchedKey::of_error(&error) {
            return ConnectError::WrongNode { address, expected: self.node, found };
        }
        if ClientTls::is_unknown_operator(&error) {
            return ConnectError::UnknownOperator { address, key: self.operator };
        }
        ConnectError::Remote { address, source: error }
    }
}
