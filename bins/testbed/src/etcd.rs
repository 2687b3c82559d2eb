//! A real etcd with one member.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::{Daemon, Port, Scratch, free_port, output, tools};

/// How often a start is tried when a foreign program has taken a port in between.
const TRIES: usize = 5;
const CALL_WITHIN: Duration = Duration::from_secs(2);

/// An etcd server on loopback ports of its own, serving when [`Etcd::start`] returns.
#[derive(Debug)]
pub struct Etcd {
    daemon: Daemon,
    client: Port,
    _peer: Port,
    etcdctl_path: PathBuf,
}

impl Etcd {
    /// Starts it and waits until its health is good.
    ///
    /// # Errors
    /// [`tools::Missing`] where etcd or etcdctl isn't installed; else why it did not come up, with its last output.
    pub fn start() -> Result<Self> {
        let (etcd, etcdctl) = (tools::find(tools::ETCD)?, tools::find(tools::ETCDCTL)?);
        let mut tries = 1;
        loop {
            match Self::try_start(&etcd, &etcdctl) {
                Err(error) if tries < TRIES && is_port_taken(&error) => tries += 1,
                result => return result,
            }
        }
    }

    /// The URL for clients.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.client.address())
    }

    /// The daemon below.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Puts a value through etcdctl.
    ///
    /// # Errors
    /// When etcdctl says so.
    pub fn put(&self, key: &str, value: &str) -> Result<()> {
        output(self.etcdctl().args(["put", "--", key, value])).map(drop)
    }

    /// Gets a value through etcdctl; `None` for a key that isn't there.
    ///
    /// # Errors
    /// When etcdctl says so.
    pub fn get(&self, key: &str) -> Result<Option<String>> {
        let text = output(self.etcdctl().args(["get", "--print-value-only", "--", key]))?;
        Ok(text.strip_suffix('\n').map(String::from))
    }

    /// An etcdctl that speaks the v3 protocol with this server.
    pub fn etcdctl(&self) -> Command {
        let mut command = Command::new(&self.etcdctl_path);
        command.env("ETCDCTL_API", "3").arg(format!("--endpoints={}", self.endpoint()));
        command
    }

    fn try_start(etcd: &Path, etcdctl: &Path) -> Result<Self> {
        let scratch = Scratch::new()?;
        let (client, peer) = (free_port()?, free_port()?);
        let (client_url, peer_url) =
            (format!("http://{}", client.address()), format!("http://{}", peer.address()));
        let mut command = Command::new(etcd);
        // Whatever ETCD_* the caller's environment holds is not meant for this one.
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

/// *Source:* etcd's server/etcdserver/api/etcdhttp: `GET /health` answers `{"health":"true"}` once there is a leader.
pub(crate) fn is_healthy(client: &Port) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&client.address().into(), CALL_WITHIN).context("connect")?;
    stream.set_read_timeout(Some(CALL_WITHIN)).context("limit the call")?;
    let request = format!("GET /health HTTP/1.0\r\nHost: {}\r\n\r\n", client.address());
    stream.write_all(request.as_bytes()).context("ask for health")?;
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
    fn what_is_put_can_be_got_and_nothing_is_left() {
        let etcd = Etcd::start().unwrap();
        assert_eq!(etcd.get("k").unwrap(), None);
        etcd.put("k", "v w").unwrap();
        assert_eq!(etcd.get("k").unwrap().as_deref(), Some("v w"));
        let directory = etcd.daemon().directory().to_owned();
        drop(etcd);
        assert_eq!(leftovers::processes(&directory).unwrap(), []);
        assert!(!directory.exists());
    }

    #[test]
    #[ignore = "needs etcd"]
    fn two_at_once_do_not_meet() {
        let (one, two) = (Etcd::start().unwrap(), Etcd::start().unwrap());
        one.put("k", "one").unwrap();
        assert_eq!(two.get("k").unwrap(), None);
    }
}
