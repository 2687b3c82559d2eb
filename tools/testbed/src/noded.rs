//! Configurations of noded.

use std::process::Command;

use crate::{ReservedPort, command_output, reserve_port, tools};

/// A configuration without daemons, and without the kernel's log, which not every machine lets a test read.
pub const NO_DAEMONS: &str =
    "services.etcd.enable = false\nservices.containerd.enable = false\nkernel.log = false\n";

/// A section `[health]` that ignores the disk of the machine that runs the tests, which may be full.
pub const NO_DISKS: &str = "[health]\nmin_free_percent = 0\nwarn_free_percent = 0\n";

/// The configuration of a service that runs a shell script; it finds programs unless `keys` has another environment.
pub fn service_config(name: &str, script: &str, keys: &str) -> String {
    let path = if keys.contains("environment") { "" } else { "environment = { PATH = \"/usr/bin:/bin\" }\n" };
    format!("[[service]]\nname = \"{name}\"\ncommand = [\"/bin/sh\", \"-c\", {script:?}]\n{path}{keys}\n")
}

/// The configuration of a service that runs until it is stopped.
pub fn sleep_config(name: &str, keys: &str) -> String {
    service_config(name, "exec sleep 1000", keys)
}

/// The ports of an etcd, which stay reserved while the value exists.
#[derive(Debug)]
pub struct EtcdPorts {
    /// For clients.
    pub client: ReservedPort,
    /// For the other members.
    pub peer: ReservedPort,
}

impl EtcdPorts {
    /// Reserves two ports.
    ///
    /// # Panics
    /// If none are free.
    pub fn reserve() -> Self {
        let reserve = || reserve_port().expect("a free port");
        Self { client: reserve(), peer: reserve() }
    }

    /// The section `[services.etcd]`, with more keys.
    pub fn section(&self, keys: &str) -> String {
        let (client, peer) = (self.client.number(), self.peer.number());
        format!("[services.etcd]\nclient_port = {client}\npeer_port = {peer}\n{keys}")
    }

    /// A configuration without containerd, and with an etcd that is any program, to be checked and not to be run.
    pub fn config_to_check(&self) -> String {
        format!("services.containerd.enable = false\n{}", self.section("binary = \"/bin/true\"\n"))
    }

    /// The output of `etcdctl`.
    ///
    /// # Panics
    /// If it fails.
    pub fn etcdctl(&self, args: &[&str]) -> String {
        etcdctl(&self.client, args)
    }
}

/// The output of `etcdctl` at the port of a client.
///
/// # Panics
/// If it fails.
pub fn etcdctl(client: &ReservedPort, args: &[&str]) -> String {
    let mut command = Command::new(tools::find_tool(tools::ETCDCTL).expect("etcdctl"));
    command.env("ETCDCTL_API", "3").arg("--endpoints").arg(client.socket_address().to_string()).args(args);
    command_output(&mut command).expect("etcdctl succeeds")
}
