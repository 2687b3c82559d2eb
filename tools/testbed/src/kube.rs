//! A real Kubernetes control plane.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::{Daemon, ScratchDir};

mod access;
mod egress;
mod fake_node;
mod image;
mod kube_daemon;
mod launch;
mod node;
mod objects;
mod options;
mod programs;
mod shared;
mod watch;

pub use fake_node::FakeNode;
pub use image::{BUSYBOX_IMAGE, ContainerImage};
pub use kube_daemon::KubeDaemon;
pub use node::{GUEST_NODE, GuestNode, GuestNodeBuilder};
pub use options::{KubeBuilder, KubeUser};
pub use programs::KubePrograms;
pub use shared::SharedKube;
pub use watch::{ObjectChange, ObjectWatch};

use egress::EgressProxy;
use launch::KubePorts;

/// The API server takes five seconds to shut down gracefully, and lets requests finish for up to a minute.
const STOPS_WITHIN: Duration = Duration::from_secs(75);

/// Etcd, API server, controller manager and scheduler on reserved loopback ports; they serve when
/// [`Kube::start`] returns.
///
/// Tokens identify users, who are authorized as in a real cluster (Node, RBAC). It starts without a node:
/// create [fake ones](Self::create_fake_node), or join [real ones](GuestNode). Pods get no service account unless
/// [asked for](KubeBuilder::with_service_accounts). A node that is silent for a day still counts as ready.
///
/// Dropping this ends all of it by SIGKILL: the state is not needed any more.
#[derive(Debug)]
pub struct Kube {
    daemons: BTreeMap<KubeDaemon, Daemon>,
    ports: KubePorts,
    options: KubeBuilder,
    programs: KubePrograms,
    egress: EgressProxy,
    /// Dropped last: certificates, kubeconfigs, and etcd's data, which outlive a restart of their daemons.
    home: ScratchDir,
}

impl Kube {
    /// Starts one with the defaults.
    ///
    /// # Errors
    /// As [`KubeBuilder::start`].
    pub fn start() -> Result<Self> {
        Self::builder().start()
    }

    /// Sets other daemons, users or flags.
    pub fn builder() -> KubeBuilder {
        KubeBuilder::default()
    }

    /// The URL of the API server on this machine.
    pub fn api_url(&self) -> String {
        format!("https://{}", self.ports.apiserver.socket_address())
    }

    /// The API server's port at 127.0.0.1.
    pub fn api_port(&self) -> u16 {
        self.ports.apiserver.number()
    }

    /// Etcd's ports at 127.0.0.1: for clients, and for peers.
    pub fn etcd_ports(&self) -> [u16; 2] {
        [self.ports.etcd.number(), self.ports.etcd_peer.number()]
    }

    /// A daemon; `None` while it doesn't run.
    pub fn daemon(&self, part: KubeDaemon) -> Option<&Daemon> {
        self.daemons.get(&part)
    }

    /// The paths of its programs.
    pub fn programs(&self) -> &KubePrograms {
        &self.programs
    }

    /// Kills a daemon (SIGKILL). Does nothing where it doesn't run.
    pub fn kill_daemon(&mut self, part: KubeDaemon) {
        self.daemons.remove(&part);
    }

    /// Sends SIGTERM to a daemon and waits for its exit. Does nothing where it doesn't run.
    ///
    /// # Errors
    /// It does not exit in time, and is killed.
    pub fn stop_daemon(&mut self, part: KubeDaemon) -> Result<()> {
        let Some(mut daemon) = self.daemons.remove(&part) else { return Ok(()) };
        match daemon.terminate(STOPS_WITHIN)? {
            Some(_) => Ok(()),
            None => bail!("{part} did not exit within {STOPS_WITHIN:?}"),
        }
    }

    /// Starts a daemon that was killed, stopped, or left out by the builder; it is ready when this returns.
    /// State, ports, certificates and tokens are as before.
    ///
    /// # Errors
    /// It already runs, or does not start; with its last output.
    pub fn launch_daemon(&mut self, part: KubeDaemon) -> Result<()> {
        if self.daemons.contains_key(&part) {
            bail!("{part} is already running");
        }
        let daemon = self.start_daemon(part).with_context(|| format!("start {part}"))?;
        self.daemons.insert(part, daemon);
        Ok(())
    }

    /// Kills the API server and starts it again: watches are cut off, stored objects stay.
    ///
    /// # Errors
    /// It does not start; with its last output.
    pub fn restart_apiserver(&mut self) -> Result<()> {
        self.kill_daemon(KubeDaemon::Apiserver);
        self.launch_daemon(KubeDaemon::Apiserver)
    }
}

impl Drop for Kube {
    fn drop(&mut self) {
        // In the order of the enum: an API server that outlives its etcd logs much about that.
        while self.daemons.pop_first().is_some() {}
    }
}

#[cfg(test)]
#[path = "kube_test.rs"]
mod tests;
