//! The daemons' command lines, and when they are ready.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::access::SEEN_FROM_GUEST;
use super::egress::Egress;
use super::options::{CONTROLLER_MANAGER, Options, SCHEDULER};
use super::{Kube, Part, Programs};
use crate::etcd::is_healthy;
use crate::{Daemon, Port, Scratch, free_port, output};

const CALL_WITHIN: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Ports {
    pub(super) etcd: Port,
    pub(super) etcd_peer: Port,
    pub(super) apiserver: Port,
    pub(super) controller_manager: Port,
    pub(super) scheduler: Port,
}

impl Ports {
    fn free() -> Result<Self> {
        Ok(Self {
            etcd: free_port()?,
            etcd_peer: free_port()?,
            apiserver: free_port()?,
            controller_manager: free_port()?,
            scheduler: free_port()?,
        })
    }
}

impl Kube {
    pub(super) fn try_start(options: Options, programs: Programs) -> Result<Self> {
        let (home, ports) = (Scratch::new()?, Ports::free()?);
        let egress = Egress::start(home.path().join("egress.socket"))?;
        let mut kube = Self { daemons: BTreeMap::new(), ports, options, programs, egress, home };
        kube.write_access()?;
        let is_wanted = |part: &Part| !kube.options.left_out.contains(part);
        let wanted: Vec<Part> = Part::ALL.into_iter().filter(is_wanted).collect();
        // Each needs the one before it, but for the last two, which start together.
        let (first, last): (Vec<Part>, Vec<Part>) =
            wanted.into_iter().partition(|part| matches!(part, Part::Etcd | Part::Apiserver));
        for part in first {
            kube.launch(part)?;
        }
        kube.launch_together(&last)?;
        if kube.options.service_accounts {
            kube.wait("serviceaccount", "default/default", "create")?;
        }
        Ok(kube)
    }

    fn launch_together(&mut self, parts: &[Part]) -> Result<()> {
        let kube = &*self;
        let started: Vec<_> = thread::scope(|scope| {
            let start = |part: Part| scope.spawn(move || (part, kube.start_daemon(part)));
            let threads: Vec<_> = parts.iter().map(|part| start(*part)).collect();
            threads.into_iter().map(|thread| thread.join().expect("a start does not panic")).collect()
        });
        for (part, daemon) in started {
            self.daemons.insert(part, daemon.with_context(|| format!("start {part}"))?);
        }
        Ok(())
    }

    pub(super) fn start_daemon(&self, part: Part) -> Result<Daemon> {
        let scratch = Scratch::new()?;
        let mut command = Command::new(self.programs.path(part.program()));
        // What the caller's environment holds is not meant for these.
        command.env_clear().current_dir(scratch.path());
        match part {
            Part::Etcd => self.etcd(&mut command),
            Part::Apiserver => self.apiserver(&mut command)?,
            Part::ControllerManager => self.controller_manager(&mut command)?,
            Part::Scheduler => self.scheduler(&mut command)?,
        }
        let own = self.options.arguments.iter().filter(|(of, _)| *of == part);
        command.args(own.map(|(_, argument)| argument));
        Daemon::start(command, scratch, || self.is_ready(part))
    }

    fn etcd(&self, command: &mut Command) {
        let url = |port: &Port| format!("http://{}", port.address());
        let (client, peer) = (url(&self.ports.etcd), url(&self.ports.etcd_peer));
        command.args(["--name=testbed", "--log-level=warn"]);
        command.arg(format!("--data-dir={}", self.home.path().join("etcd").display()));
        command.args([format!("--listen-client-urls={client}"), format!("--advertise-client-urls={client}")]);
        command.args([format!("--listen-peer-urls={peer}"), format!("--initial-advertise-peer-urls={peer}")]);
        command.arg(format!("--initial-cluster=testbed={peer}"));
    }

    fn apiserver(&self, command: &mut Command) -> Result<()> {
        let pki = self.pki();
        fs::create_dir_all(&pki).with_context(|| format!("create {}", pki.display()))?;
        // The key that it makes for its certificate also signs the tokens of service accounts.
        let key = pki.join("apiserver.key");
        command.arg(format!("--etcd-servers=http://{}", self.ports.etcd.address()));
        command.args([
            "--bind-address=127.0.0.1",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
        ]);
        command.arg(format!("--secure-port={}", self.port()));
        // It can't advertise a loopback address, and finds none by itself on a machine without a default route.
        command.arg(format!("--advertise-address={SEEN_FROM_GUEST}"));
        command.arg(format!("--cert-dir={}", pki.display()));
        command.arg(format!("--token-auth-file={}", self.tokens().display()));
        command.arg(format!("--service-account-key-file={}", key.display()));
        command.arg(format!("--service-account-signing-key-file={}", key.display()));
        command.arg("--service-account-issuer=https://kubernetes.default.svc");
        command
            .args(["--service-cluster-ip-range=10.0.0.0/24", "--kubelet-preferred-address-types=InternalIP"]);
        let egress = self.home.path().join("egress.json");
        fs::write(&egress, self.egress.config()).with_context(|| format!("write {}", egress.display()))?;
        command.arg(format!("--egress-selector-config-file={}", egress.display()));
        if !self.options.service_accounts {
            command.arg("--disable-admission-plugins=ServiceAccount");
        }
        Ok(())
    }

    fn controller_manager(&self, command: &mut Command) -> Result<()> {
        let pki = self.pki();
        self.client(command, CONTROLLER_MANAGER, &self.ports.controller_manager)?;
        command.arg(format!("--service-account-private-key-file={}", pki.join("apiserver.key").display()));
        command.arg(format!("--root-ca-file={}", pki.join("apiserver.crt").display()));
        // A fake node has no kubelet that would say that it lives.
        command.args(["--node-monitor-grace-period=24h", "--node-startup-grace-period=24h"]);
        Ok(())
    }

    fn scheduler(&self, command: &mut Command) -> Result<()> {
        self.client(command, SCHEDULER, &self.ports.scheduler)
    }

    /// What a daemon needs that calls the API server and serves nothing but its health.
    fn client(&self, command: &mut Command, user: &str, port: &Port) -> Result<()> {
        command.arg(format!("--kubeconfig={}", self.kubeconfig(user)?.display()));
        command.args(["--leader-elect=false", "--bind-address=127.0.0.1"]);
        command.arg(format!("--secure-port={}", port.number()));
        Ok(())
    }

    /// They tell nobody when they are ready, but answer who asks. The cheap question comes first.
    fn is_ready(&self, part: Part) -> Result<()> {
        let (port, path) = match part {
            Part::Etcd => return is_healthy(&self.ports.etcd),
            Part::Apiserver => (&self.ports.apiserver, "/readyz"),
            Part::ControllerManager => (&self.ports.controller_manager, "/healthz"),
            Part::Scheduler => (&self.ports.scheduler, "/healthz"),
        };
        TcpStream::connect_timeout(&port.address().into(), CALL_WITHIN).context("connect")?;
        let mut kubectl = self.kubectl();
        if part != Part::Apiserver {
            // Its certificate is its own, and whoever asks for its health needs no name.
            kubectl = self.bare_kubectl();
            // Without a token kubectl would ask the terminal for a name.
            kubectl.args(["--kubeconfig=/dev/null", "--insecure-skip-tls-verify", "--token=none"]);
            kubectl.arg(format!("--server=https://{}", port.address()));
        }
        output(kubectl.args(["get", "--raw", path])).map(drop)
    }
}
