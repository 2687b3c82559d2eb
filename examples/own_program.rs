//! A node program of its own name, without etcd, cluster and Kubernetes: a part, and the services of its configuration.
//!
//! `cargo run -p examples --features node --example own_program -- run --data target/station`, and then
//! `nodectl --socket target/station/run/control.sock tree`; `--help` has its other commands.

use std::process::ExitCode;

use nodekeel_node::node::{ExtraRunnable, NodeBuilder};
use nodekeel_node::supervisor::{Context, Failure};

async fn watch_sky(ctx: Context) -> Result<(), Failure> {
    tracing::info!("the sky is clear");
    ctx.signal_ready()?;
    ctx.until_canceled().await
}

fn parts(node: NodeBuilder) -> NodeBuilder {
    let not_here = ["etcd", "network", "cluster", "containerd", "provisioner"];
    not_here.into_iter().fold(node, NodeBuilder::without).with(ExtraRunnable::new("sky", watch_sky))
}

fn main() -> ExitCode {
    nodekeel_node::program("stationd", parts).version(env!("CARGO_PKG_VERSION")).main()
}
