//! A node as a library: its place in a cluster on an etcd of its own, containerd with its images, volumes for Kubernetes and
//! services of your own under one supervisor, with their logs in one tree and a control API on a unix socket.
//!
//! It does not run Kubernetes, and it does not configure the machine.
//!
//! ```text
//! root
//! ├─ control          the control API: last to stop
//! ├─ <your runnables> given in code
//! ├─ network          where the node's address is an interface's: follows it
//! ├─ cluster          where the node is to be in one: ready when it is; below it, its etcd
//! ├─ etcd             where it is to be in none: one member; ready when it has said so and answers a linearizable read
//! ├─ containerd       ready when it tells its version; below it, images that are to be there
//! ├─ provisioner      where a Kubernetes API is given: ready when it has seen all claims, and the kubelet knows it
//! └─ service
//!    └─ <name>        the operator's own, from the configuration; each after what it depends on
//! ```
//!
//! What runs is decided before anything is touched: a [`Config`](config::Config) is parsed, a [`Plan`](plan::Plan) is
//! made of it on this machine, and only then a [`Node`](node::Node) takes the data directory and starts. `noded` is a
//! thin main around these three.
//!
//! ```no_run
//! use nodekeel_node::config::Config;
//! use nodekeel_node::node::{Deps, Node, Own, journal};
//! use nodekeel_node::plan::Plan;
//! use nodekeel_node::search::Search;
//! use nodekeel_supervisor::{Context, Failure};
//!
//! async fn greeter(ctx: Context) -> Result<(), Failure> {
//!     ctx.ready()?;
//!     tracing::info!("hello from {}", ctx.dn());
//!     Err(ctx.cancelled().await.into())
//! }
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let config = Config::read("noded.toml".as_ref())?;
//! let mut deps = Deps::new(journal(&config.log));
//! deps.runnables.push(Own::new("greeter", greeter));
//! let node = Node::start(Plan::make(config, Search::from_lists(None, None), true)?, deps)?;
//! node.ready("root").await;
//! node.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Bring your own
//! A [`Runnable`](nodekeel_supervisor::Runnable) in [`Deps`](node::Deps) stands in the tree beside etcd; a program needs
//! no code, only a `[[service]]` in the configuration. A tool of your own speaks to the node through
//! [`client`]: `bins/noded/proto` describes the messages.
//!
//! # Features
//! - `node` (default): everything. etcd-client and containerd-client need `protoc` at build time.
//! - `client`: only the control API's client, which needs no protoc.
//!
//! # Third-party types in the API
//! tonic and prost (the generated client), and nodekeel's own supervisor, logtree, localstorage and provisioner.

#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "node")]
pub mod config;
#[cfg(feature = "node")]
mod control;
#[cfg(feature = "node")]
pub mod data;
#[cfg(feature = "node")]
pub mod history;
#[cfg(feature = "node")]
mod layout;
#[cfg(feature = "node")]
pub mod node;
#[cfg(feature = "node")]
pub mod notify;
#[cfg(feature = "node")]
pub mod output;
#[cfg(feature = "node")]
pub mod plan;
#[cfg(feature = "node")]
mod ports;
#[cfg(feature = "node")]
pub mod search;
#[cfg(feature = "node")]
mod service;
#[cfg(feature = "node")]
mod wire;

/// The control API's messages, its client, and with the feature `node` its server: generated from
/// `proto/nodekeel/control/v1/control.proto`, where they are described.
#[cfg(feature = "client")]
#[allow(missing_docs, clippy::all, clippy::pedantic, clippy::exhaustive_enums, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("nodekeel.control.v1");

    impl std::fmt::Debug for CreateGoldenTicketResponse {
        /// Without the enrolment configuration, which holds keys.
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("CreateGoldenTicketResponse").field("node", &self.node).finish_non_exhaustive()
        }
    }

    #[cfg(test)]
    mod tests {
        #[test]
        fn the_keys_of_a_ticket_are_not_printed() {
            let ticket =
                super::CreateGoldenTicketResponse { enrolment: vec![217], node: "nodekeel-1".into() };
            let shown = format!("{ticket:?}");
            assert!(shown.contains("nodekeel-1") && !shown.contains("217"), "{shown}");
        }
    }
}
