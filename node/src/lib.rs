//! A node as a library: cluster membership on a supervised etcd, containerd with its images, volumes for
//! Kubernetes and your services under one supervisor, with their logs in one tree and a control API on a unix
//! socket and, by key, for other machines.
//!
//! It does not run Kubernetes, and it does not configure the machine.
//!
//! ```text
//! root
//! ├─ control          the control API: stops last
//! ├─ kernel           the log of the kernel
//! ├─ storage          opens the data volume: etcd, the cluster, containerd and volumes wait for it
//! ├─ api              with [api]: the control API for operators of other machines, and calls of other nodes, by key
//! ├─ metrics          with [metrics]: metrics and health for programs, over HTTP
//! ├─ <your parts>     from `NodeBuilder`, or runnables from `Deps`
//! ├─ network          with `cluster.interface`: watches its address
//! ├─ cluster          with [cluster]: ready when the node is a member; its etcd runs below it
//! ├─ etcd             without [cluster]: one member; ready after sd_notify and a linearizable read
//! ├─ containerd       ready when it reports its version; below it, the import of preseeded images
//! ├─ provisioner      with [provisioner]: ready when it has listed the claims and is registered at the kubelet
//! └─ service
//!    └─ <name>        a [[service]] of the configuration; starts after its dependencies
//! ```
//!
//! Each of these is a [part](part::Part), as are yours. A node is planned before anything is changed: a
//! [`NodedConfig`](config::NodedConfig) is parsed, a [`NodePlan`](plan::NodePlan) applies it to this machine, and only then a
//! [`NodeHandle`](node::NodeHandle) acquires the data directory and starts the tree.
//! [`NodeHandle::builder`](node::NodeHandle::builder) runs a node inside a program of yours. With the feature `program`,
//! `nodekeel_node::program("mynode", parts).main()` is a whole node program, as `noded` is one.
//!
//! ```
//! use nodekeel_node::node::{ExtraRunnable, NodeHandle};
//! use nodekeel_supervisor::{Context, Failure};
//!
//! // Without daemons; with "" instead, noded's defaults run etcd and containerd.
//! const CONFIG: &str = "services.etcd.enable = false\nservices.containerd.enable = false\n";
//!
//! async fn greeter(ctx: Context) -> Result<(), Failure> {
//!     tracing::info!("hello from {}", ctx.dn());
//!     ctx.signal_ready()?;
//!     ctx.until_canceled().await
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let data = std::env::temp_dir().join(format!("nodekeel-example-{}", std::process::id()));
//!     let node = NodeHandle::builder("example.toml", CONFIG)
//!         .data(&data)
//!         .with(ExtraRunnable::new("greeter", greeter))
//!         .start()?;
//!     node.wait_ready("root.greeter").await;
//!     for runnable in node.snapshot() {
//!         println!("{} is {}", runnable.dn, runnable.state);
//!     }
//!     node.shutdown().await;
//!     std::fs::remove_dir_all(data)?;
//!     Ok(())
//! }
//! ```
//!
//! # Bring your own
//! - A program needs only a `[[service]]` in the configuration.
//! - A [`Runnable`](nodekeel_supervisor::Runnable) is a part by [`ExtraRunnable`](node::ExtraRunnable).
//! - A [`Part`](part::Part) has its own table of the configuration, needs, directories and gRPC calls; it answers
//!   [health](health::HealthSource) and adds [metrics](metrics::MetricsRegistries).
//! - A volume, a network, a consensus: [`NodeBuilder`](node::NodeBuilder).
//! - Your tools call the node through [`client`]; `node/proto` describes the messages.
//!
//! # Features
//! - `node` (default): everything. etcd-client and containerd-client need `protoc` at build time.
//! - `program`: the program around a node, with its command line ([`program()`]); needs clap.
//! - `testing`: checks over arbitrary input.
//! - `client`: only the client of the control API, which does not need protoc.
//!
//! # Third-party types in the API
//! tonic and prost (the generated client), prometheus-client (the registries of metrics), and nodekeel's own crates. They are
//! re-exported: a part needs no versions of them.

#[cfg(feature = "client")]
pub mod access;
#[cfg(feature = "node")]
mod block_events;
#[cfg(feature = "node")]
mod blocking;
#[cfg(feature = "node")]
mod caller;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "node")]
pub mod config;
#[cfg(feature = "node")]
mod control;
#[cfg(feature = "node")]
pub mod data;
#[cfg(feature = "node")]
mod dependency;
#[cfg(feature = "node")]
mod device_faults;
#[cfg(feature = "node")]
mod directory_watch;
#[cfg(feature = "node")]
mod dn;
#[cfg(feature = "client")]
mod error_chain;
#[cfg(feature = "node")]
mod event_history;
#[cfg(feature = "node")]
pub mod health;
#[cfg(feature = "node")]
mod kernel_kills;
#[cfg(feature = "node")]
mod layout;
#[cfg(feature = "node")]
mod listen_address;
#[cfg(feature = "node")]
mod log_sink;
#[cfg(feature = "node")]
pub mod metrics;
#[cfg(feature = "node")]
pub mod node;
#[cfg(feature = "node")]
pub mod notify;
#[cfg(feature = "node")]
pub mod part;
#[cfg(feature = "node")]
pub mod parts;
#[cfg(feature = "node")]
pub mod plan;
#[cfg(feature = "node")]
mod ports;
#[cfg(feature = "node")]
mod preparation;
#[cfg(feature = "program")]
pub mod program;
#[cfg(feature = "client")]
mod program_name;
#[cfg(feature = "node")]
pub mod reset;
#[cfg(feature = "node")]
mod running;
#[cfg(feature = "node")]
pub mod search_path;
#[cfg(feature = "node")]
mod supervisor_slot;
#[cfg(feature = "node")]
mod sys;
#[cfg(feature = "node")]
mod volume;
#[cfg(feature = "node")]
mod wire;

#[cfg(feature = "program")]
pub use program::program;

/// Compiles the program of the README.
#[cfg(all(doctest, feature = "program"))]
#[doc = include_str!("../README.md")]
struct ReadmeExample;
/// nodekeel's crates whose types are in this interface, in the versions that it has.
#[cfg(feature = "node")]
pub use {
    nodekeel_cluster as cluster, nodekeel_containerd_svc as containerd, nodekeel_fsquota as fsquota,
    nodekeel_localstorage as localstorage, nodekeel_logtree as logtree, nodekeel_provisioner as provisioner,
    nodekeel_supervisor as supervisor, prometheus_client, tonic,
};

/// Checks over arbitrary input.
#[cfg(feature = "testing")]
pub mod testing {
    /// Arbitrary bytes as the request of a new node that redeems a join ticket: never panics, and a valid one survives a round
    /// trip.
    ///
    /// # Panics
    /// If that does not hold.
    pub fn fuzz_enrol_request(bytes: &[u8]) {
        crate::parts::api::check_arbitrary_request(bytes);
    }

    /// Arbitrary bytes as what a voter tells a worker, and as the file in which the worker keeps it: never panics.
    ///
    /// # Panics
    /// If that does not hold.
    pub fn fuzz_membership(bytes: &[u8]) {
        crate::parts::worker::check_arbitrary_membership(bytes);
    }
}

/// The calls of nodes to each other: generated from `proto/nodekeel/node/v1/node.proto`, where they are described.
#[cfg(feature = "client")]
#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::exhaustive_enums, reason = "generated")]
pub mod node_v1 {
    tonic::include_proto!("nodekeel.node.v1");

    impl std::fmt::Debug for EnrolRequest {
        /// Without the secret of the ticket.
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("EnrolRequest").field("address", &self.address).finish_non_exhaustive()
        }
    }

    impl std::fmt::Debug for ReplaceUnlockKeysRequest {
        /// Without the keys.
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("ReplaceUnlockKeysRequest").field("volume", &self.volume).finish_non_exhaustive()
        }
    }

    impl std::fmt::Debug for UnlockKeysResponse {
        /// Without the keys.
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("UnlockKeysResponse")
        }
    }
}

/// The control API's messages, its client, and with the feature `node` its server: generated from
/// `proto/nodekeel/control/v1/control.proto`, where they are described.
#[cfg(feature = "client")]
#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::exhaustive_enums, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("nodekeel.control.v1");

    impl std::fmt::Debug for CreateGoldenTicketResponse {
        /// Without the enrolment configuration, which contains private keys.
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("CreateGoldenTicketResponse").field("node", &self.node).finish_non_exhaustive()
        }
    }

    impl std::fmt::Debug for CreateJoinTicketResponse {
        /// Without the ticket, which is a secret.
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("CreateJoinTicketResponse").field("id", &self.id).finish_non_exhaustive()
        }
    }

    impl std::fmt::Debug for RecoveryPassphrase {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("RecoveryPassphrase")
        }
    }

    #[cfg(test)]
    mod tests {
        #[test]
        fn a_recovery_passphrase_is_not_printed() {
            let passphrase = Some(super::RecoveryPassphrase { text: "00000".into() });
            let shown = format!("{:?}", super::UnlockStorageRequest { passphrase });
            assert_eq!(shown, "UnlockStorageRequest { passphrase: Some(RecoveryPassphrase) }");
        }

        #[test]
        fn the_keys_of_a_ticket_are_not_printed() {
            let ticket =
                super::CreateGoldenTicketResponse { enrolment: vec![217], node: "nodekeel-1".into() };
            let shown = format!("{ticket:?}");
            assert!(shown.contains("nodekeel-1") && !shown.contains("217"), "{shown}");
        }
    }
}
