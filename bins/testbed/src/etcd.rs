//! A real etcd with one member.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::{Daemon, ReservedPort, ScratchDir, command_output, reserve_port, tools};

/// How often a start is tried where another program takes a port in between.
const TRIES: usize = 5;
const CALL_WITHIN: Duration = Duration::from_secs(2);

/// An etcd server on reserved loopback ports; it serves when [`Etcd::start`] returns.
#[derive(Debug)]
pub struct Etcd {
    daemon: Daemon,
    client: ReservedPort,
    _peer: ReservedPort,
    etcdctl_path: PathBuf,
}

impl Etcd {
    /// Starts it and waits until it is healthy.
    ///
    /// # Errors
    /// [`tools::MissingTool`] where etcd or etcdctl isn't installed; else why it did not start, with its last
    /// output.
    pub fn start() -> Result<Self> {
        let (etcd, etcdctl) = (tools::find_tool(tools::ETCD)?, tools::find_tool(tools::ETCDCTL)?);
        let mut tries = 1;
        loop {
            match Self::try_start(&etcd, &etcdctl) {
                Err(error) if tries < TRIES && is_port_taken(&error) => tries += 1,
                result => return result,
            }
        }
    }

    /// The URL for clients.
    pub fn client_url(&self) -> String {
        format!("http://{}", self.client.socket_address())
    }

    /// The daemon.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Stores a value by etcdctl.
    ///
    /// # Errors
    /// etcdctl fails.
    pub fn put_value(&self, key: &str, value: &str) -> Result<()> {
        command_output(self.etcdctl_command().args(["put", "--", key, value])).map(drop)
    }

    /// Reads a value by etcdctl; `None` for a missing key.
    ///
    /// # Errors
    /// etcdctl fails.
    pub fn get_value(&self, key: &str) -> Result<Option<String>> {
        let text = command_output(self.etcdctl_command().args(["get", "--print-value-only", "--", key]))?;
        Ok(text.strip_suffix('\n').map(String::from))
    }

    /// An etcdctl that calls this server by the v3 protocol.
    pub fn etcdctl_command(&self) -> Command {
        let mut command = Command::new(&self.etcdctl_path);
        command.env("ETCDCTL_API", "3").arg(format!("--endpoints={}", self.client_url()));
        command
    }

    fn try_start(etcd: &Path, etcdctl: &Path) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let (client, peer) = (reserve_port()?, reserve_port()?);
        let (client_url, peer_url) =
            (format!("http://{}", client.socket_address()), format!("http://{}", peer.socket_address()));
        let mut command = Command::new(etcd);
        // Variables ETCD_* of the caller's environment are not meant for this server.
        command.env_clear().current_dir(scratch.path());
        command.args(["--name", "testbed", "--data-dir"]).arg(scratch.path().join("data"));
        command.args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url]);
        command.args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url]);
        command.args(["--initial-cluster", &format!("testbed={peer_url}")]);
        command.args(["--logger", "zap", "--log-outputs", "stderr"]);
        let daemon = Daemon::start(command, scratch, || is_healthy(&client))?;
        Ok(Self { daemon, client, _peer: peer, etcdctl_path: etcdctl.to_path_buf() })
    }
}

/// *Source:* etcd's server/etcdserver/api/etcdhttp: `GET /health` answers `{"health":"true"}` once there is a
/// leader.
pub(crate) fn is_healthy(client: &ReservedPort) -> Result<()> {
    let mut stream =
        TcpStream::connect_timeout(&client.socket_address().into(), CALL_WITHIN).context("connect")?;
    stream.set_read_timeout(Some(CALL_WITHIN)).context("limit the call")?;
    let request = format!("GET /health HTTP/1.0\r\nHost: {}\r\n\r\n", client.socket_address());
    stream.write_all(request.as_bytes()).context("request health")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("read health")?;
    let body = answer.rsplit("\r\n\r\n").next().unwrap_or_default();
    ensure!(body.replace(' ', "").contains(r#""health":"true""#), "not healthy: {body}");
    Ok(())
}

pub(crate) fn is_port_taken(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("address already in use")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leftovers;

    #[test]
    #[ignore = "needs etcd"]
    fn a_value_is_stored_and_nothing_is_left() {
        let etcd = Etcd::start().unwrap();
        assert_eq!(etcd.get_value("k").unwrap(), None);
        etcd.put_value("k", "v w").unwrap();
        assert_eq!(etcd.get_value("k").unwrap().as_deref(), Some("v w"));
        let directory = etcd.daemon().directory_path().to_owned();
        drop(etcd);
        assert_eq!(leftovers::find_processes(&directory).unwrap(), []);
        assert!(!directory.exists());
    }

    #[test]
    #[ignore = "needs etcd"]
    fn concurrent_etcds_are_separate() {
        let (one, two) = (Etcd::start().unwrap(), Etcd::start().unwrap());
        one.put_value("k", "one").unwrap();
        assert_eq!(two.get_value("k").unwrap(), None);
    }
}
