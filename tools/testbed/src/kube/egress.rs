//! Connections from the API server to nodes in guests, which it can't reach by their addresses.
//!
//! A guest's network ends at this machine's loopback interface: its kubelet's port is forwarded to the same
//! port there. The API server sends each connection to a node through this proxy, which connects to that
//! port. So `kubectl logs` and `exec` work without rights over this machine's network.

use std::io::{BufReader, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context as _, Result};
use serde_json::json;

/// A running proxy; dropping this ends it for new connections.
#[derive(Debug)]
pub(super) struct EgressProxy {
    socket: PathBuf,
    is_over: Arc<AtomicBool>,
}

impl EgressProxy {
    pub(super) fn start(socket: PathBuf) -> Result<Self> {
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("listen on {}", socket.display()))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        thread::spawn(move || {
            for caller in listener.incoming().flatten() {
                if seen.load(Ordering::SeqCst) {
                    break;
                }
                // A caller that leaves, or names a port without a server, gets its connection closed.
                thread::spawn(move || serve_caller(caller));
            }
        });
        Ok(Self { socket, is_over })
    }

    /// *Source:* kubernetes.io, setting up the konnectivity service: `cluster` are nodes, pods and services.
    pub(super) fn selector_config(&self) -> String {
        let transport = json!({"uds": {"udsName": self.socket}});
        let config = json!({
            "apiVersion": "apiserver.k8s.io/v1beta1", "kind": "EgressSelectorConfiguration",
            "egressSelections": [{
                "name": "cluster",
                "connection": {"proxyProtocol": "HTTPConnect", "transport": transport},
            }],
        });
        config.to_string()
    }
}

impl Drop for EgressProxy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        drop(UnixStream::connect(&self.socket));
    }
}

fn serve_caller(caller: UnixStream) -> Result<()> {
    let mut reader = BufReader::new(caller.try_clone().context("share the connection")?);
    let port = parse_port(&mut reader)?;
    let node = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).context("connect to the node")?;
    (&caller).write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").context("answer")?;
    let (mut to_node, mut back) = (node.try_clone().context("share the connection")?, caller);
    thread::spawn(move || {
        // The reader may have buffered more than the request.
        let _ = std::io::copy(&mut reader, &mut to_node);
        let _ = to_node.shutdown(Shutdown::Write);
    });
    let mut from_node = node;
    let _ = std::io::copy(&mut from_node, &mut back);
    let _ = back.shutdown(Shutdown::Both);
    Ok(())
}

/// Reads `CONNECT ADDRESS:PORT HTTP/1.1` and the empty line behind its headers.
fn parse_port(reader: &mut impl std::io::BufRead) -> Result<u16> {
    let mut request = String::new();
    reader.read_line(&mut request).context("read the request")?;
    let mut line = String::new();
    while reader.read_line(&mut line).context("read the headers")? > 2 {
        line.clear();
    }
    let target = request.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next());
    let port = target.and_then(|target| target.rsplit(':').next()?.parse().ok());
    port.with_context(|| format!("parse {request:?} as CONNECT"))
}
