//! The daemons' command lines and readiness.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::access::SEEN_FROM_GUEST;
use super::egress::EgressProxy;
use super::options::{CONTROLLER_MANAGER, SCHEDULER};
use super::{Kube, KubeBuilder, KubeDaemon, KubePrograms};
use crate::{Daemon, ReservedPort, ScratchDir, command_output, reserve_port};

const CALL_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct KubePorts {
    pub(super) etcd: ReservedPort,
    pub(super) etcd_peer: ReservedPort,
    pub(super) apiserver: ReservedPort,
    pub(super) controller_manager: ReservedPort,
    pub(super) scheduler: ReservedPort,
}

impl KubePorts {
    fn reserve_all() -> Result<Self> {
        Ok(Self {
            etcd: reserve_port()?,
            etcd_peer: reserve_port()?,
            apiserver: reserve_port()?,
            controller_manager: reserve_port()?,
            scheduler: reserve_port()?,
        })
    }
}

impl Kube {
    pub(super) fn try_start(options: KubeBuilder, programs: KubePrograms) -> Result<Self> {
        let (home, ports) = (ScratchDir::new()?, KubePorts::reserve_all()?);
        let egress = EgressProxy::start(home.path().join("egress.socket"))?;
        let mut kube = Self { daemons: BTreeMap::new(), ports, options, programs, egress, home };
        kube.write_access()?;
        let is_wanted = |part: &KubeDaemon| !kube.options.left_out.contains(part);
        let wanted: Vec<KubeDaemon> = KubeDaemon::ALL.into_iter().filter(is_wanted).collect();
        // Each daemon needs the one before it, but for the last two, which start together.
        let (first, last): (Vec<KubeDaemon>, Vec<KubeDaemon>) =
            wanted.into_iter().partition(|part| matches!(part, KubeDaemon::Etcd | KubeDaemon::Apiserver));
        for part in first {
            kube.launch_daemon(part)?;
        }
        kube.launch_together(&last)?;
        if kube.options.has_service_accounts {
            kube.wait_for_condition("serviceaccount", "default/default", "create")?;
        }
        Ok(kube)
    }

    fn launch_together(&mut self, parts: &[KubeDaemon]) -> Result<()> {
        let kube = &*self;
        let started: Vec<_> = thread::scope(|scope| {
            let start = |part: KubeDaemon| scope.spawn(move || (part, kube.start_daemon(part)));
            let threads: Vec<_> = parts.iter().map(|part| start(*part)).collect();
            threads.into_iter().map(|thread| thread.join().expect("a start does not panic")).collect()
        });
        for (part, daemon) in started {
            self.daemons.insert(part, daemon.with_context(|| format!("start {part}"))?);
        }
        Ok(())
    }

    pub(super) fn start_daemon(&self, part: KubeDaemon) -> Result<Daemon> {
        let scratch = ScratchDir::new()?;
        let mut command = self.daemon_command(part)?;
        command.current_dir(scratch.path());
        Daemon::start(command, scratch, || self.is_ready(part))
    }

    /// The command line of a daemon, for a caller that runs it. Its environment is empty: the caller's is not meant
    /// for the daemons.
    ///
    /// # Errors
    /// A file that the daemon reads can't be written.
    pub fn daemon_command(&self, part: KubeDaemon) -> Result<Command> {
        let mut command = Command::new(self.programs.program_path(part.program_name()));
        command.env_clear();
        match part {
            KubeDaemon::Etcd => self.add_etcd_arguments(&mut command),
            KubeDaemon::Apiserver => self.add_apiserver_arguments(&mut command)?,
            KubeDaemon::ControllerManager => self.add_controller_manager_arguments(&mut command)?,
            KubeDaemon::Scheduler => self.add_scheduler_arguments(&mut command)?,
        }
        let own = self.options.arguments.iter().filter(|(of, _)| *of == part);
        command.args(own.map(|(_, argument)| argument));
        Ok(command)
    }

    /// A kubectl that fails until a daemon serves; `None` for etcd, which does not serve this API.
    pub fn health_command(&self, part: KubeDaemon) -> Option<Command> {
        let (mut kubectl, path) = match part {
            KubeDaemon::Etcd => return None,
            KubeDaemon::Apiserver => (self.kubectl_command(), "/readyz"),
            KubeDaemon::ControllerManager => {
                (self.health_kubectl(&self.ports.controller_manager), "/healthz")
            }
            KubeDaemon::Scheduler => (self.health_kubectl(&self.ports.scheduler), "/healthz"),
        };
        kubectl.args(["get", "--raw", path]);
        Some(kubectl)
    }

    /// A kubectl for a daemon whose certificate is self-signed, and whose health needs no authentication.
    fn health_kubectl(&self, port: &ReservedPort) -> Command {
        let mut kubectl = self.bare_kubectl();
        // Without a token kubectl would prompt for a user name.
        kubectl.args(["--kubeconfig=/dev/null", "--insecure-skip-tls-verify", "--token=none"]);
        kubectl.arg(format!("--server=https://{}", port.socket_address()));
        kubectl
    }

    fn add_etcd_arguments(&self, command: &mut Command) {
        let url = |port: &ReservedPort| format!("http://{}", port.socket_address());
        let (client, peer) = (url(&self.ports.etcd), url(&self.ports.etcd_peer));
        command.args(["--name=testbed", "--log-level=warn"]);
        command.arg(format!("--data-dir={}", self.home.path().join("etcd").display()));
        command.args([format!("--listen-client-urls={client}"), format!("--advertise-client-urls={client}")]);
        command.args([format!("--listen-peer-urls={peer}"), format!("--initial-advertise-peer-urls={peer}")]);
        command.arg(format!("--initial-cluster=testbed={peer}"));
    }

    fn add_apiserver_arguments(&self, command: &mut Command) -> Result<()> {
        let pki = self.pki();
        fs::create_dir_all(&pki).with_context(|| format!("create {}", pki.display()))?;
        // The key that it makes for its certificate also signs the tokens of service accounts.
        let key = pki.join("apiserver.key");
        command.arg(format!("--etcd-servers=http://{}", self.ports.etcd.socket_address()));
        command.args([
            "--bind-address=127.0.0.1",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
        ]);
        command.arg(format!("--secure-port={}", self.api_port()));
        // It can't advertise a loopback address, and finds no other on a machine without a default route.
        command.arg(format!("--advertise-address={SEEN_FROM_GUEST}"));
        command.arg(format!("--cert-dir={}", pki.display()));
        command.arg(format!("--token-auth-file={}", self.tokens().display()));
        command.arg(format!("--service-account-key-file={}", key.display()));
        command.arg(format!("--service-account-signing-key-file={}", key.display()));
        command.arg("--service-account-issuer=https://kubernetes.default.svc");
        command
            .args(["--service-cluster-ip-range=10.0.0.0/24", "--kubelet-preferred-address-types=InternalIP"]);
        let egress = self.home.path().join("egress.json");
        fs::write(&egress, self.egress.selector_config())
            .with_context(|| format!("write {}", egress.display()))?;
        command.arg(format!("--egress-selector-config-file={}", egress.display()));
        if !self.options.has_service_accounts {
            command.arg("--disable-admission-plugins=ServiceAccount");
        }
        Ok(())
    }

    fn add_controller_manager_arguments(&self, command: &mut Command) -> Result<()> {
        let pki = self.pki();
        self.add_client_arguments(command, CONTROLLER_MANAGER, &self.ports.controller_manager)?;
        command.arg(format!("--service-account-private-key-file={}", pki.join("apiserver.key").display()));
        command.arg(format!("--root-ca-file={}", pki.join("apiserver.crt").display()));
        // A fake node has no kubelet that would report its status.
        command.args(["--node-monitor-grace-period=24h", "--node-startup-grace-period=24h"]);
        Ok(())
    }

    fn add_scheduler_arguments(&self, command: &mut Command) -> Result<()> {
        self.add_client_arguments(command, SCHEDULER, &self.ports.scheduler)
    }

    /// The arguments of a daemon that calls the API server and serves its health alone.
    fn add_client_arguments(&self, command: &mut Command, user: &str, port: &ReservedPort) -> Result<()> {
        command.arg(format!("--kubeconfig={}", self.kubeconfig_file(user)?.display()));
        command.args(["--leader-elect=false", "--bind-address=127.0.0.1"]);
        command.arg(format!("--secure-port={}", port.number()));
        Ok(())
    }

    /// They send no notice when they are ready, but answer probes. The cheap probe comes first.
    fn is_ready(&self, part: KubeDaemon) -> Result<()> {
        let port = match part {
            KubeDaemon::Etcd => &self.ports.etcd,
            KubeDaemon::Apiserver => &self.ports.apiserver,
            KubeDaemon::ControllerManager => &self.ports.controller_manager,
            KubeDaemon::Scheduler => &self.ports.scheduler,
        };
        let Some(mut kubectl) = self.health_command(part) else { return is_healthy(port) };
        TcpStream::connect_timeout(&port.socket_address().into(), CALL_WITHIN).context("connect")?;
        command_output(&mut kubectl).map(drop)
    }
}

/// *Source:* etcd's server/etcdserver/api/etcdhttp: `GET /health` answers `{"health":"true"}` once there is a
/// leader.
fn is_healthy(client: &ReservedPort) -> Result<()> {
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
