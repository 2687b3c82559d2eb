//! Measures the time of a claim from its POST to Bound on a real control plane, and the cost of the program
//! that serves it.
//!
//! `cargo xtask bench claims`. The null provisioner, for comparison, has the same watches and creates exactly
//! one PersistentVolume and one event for each claim, but no volume. Both are processes of this program, run
//! all the time, and take turns; each serves the claims of its StorageClass. There is no scheduler (claims
//! come with a selected node), and the controller manager may send 2,000 requests a second: its default of 20
//! would dominate the results. etcd does not sync: it usually has another disk than volumes, and on a shared
//! disk each would wait for the other.
//!
//! local-path-provisioner runs as it is released. It makes a directory by a pod; a kubelet that needs no time for it stands in for
//! the node's.
//!
//! The local kernel may lack quotas: ours keeps limits in a map, so the cost of the kernel's calls (`cargo
//! xtask bench quota`) has to be added. The memory is that of the provisionerd binary, with limits in files.

mod bench_cluster;
mod bursts;
mod contender;
mod erasing;
mod footprint;
mod local_path;
mod null_provisioner;
mod ours;
mod program;
mod requests;
mod singles;
mod watches;

use std::path::Path;

use anyhow::{Result, bail};
use testbed::bench::RowWriter;

use crate::bench_cluster::BenchCluster;
use crate::contender::Contender;

fn main() -> Result<()> {
    // Cargo passes `--bench`.
    let given: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let given: Vec<&str> = given.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match given.as_slice() {
            [] => measure_all().await,
            ["ours", kubeconfig, directory] => ours::run(Path::new(kubeconfig), Path::new(directory)).await,
            ["null", kubeconfig] => null_provisioner::run(Path::new(kubeconfig)).await,
            _ => bail!("unexpected arguments: run it without any"),
        }
    })
}

/// Writes each part as soon as it is measured.
async fn measure_all() -> Result<()> {
    let mut cluster = BenchCluster::start().await?;
    let mut rows = RowWriter::new("claims");
    {
        let _contenders = [Contender::Ours.start(&cluster)?, Contender::Null.start(&cluster)?];
        rows.add_rows(singles::measure(&mut cluster).await?)?;
        rows.add_rows(bursts::measure(&mut cluster).await?)?;
        rows.add_rows(local_path::measure(&mut cluster).await?)?;
    }
    rows.add_rows(footprint::measure(&mut cluster).await?)?;
    rows.add_rows(erasing::measure(&mut cluster).await?)?;
    rows.add_rows(footprint::measure_foreign(&cluster).await?)?;
    rows.finish().map(drop)
}
